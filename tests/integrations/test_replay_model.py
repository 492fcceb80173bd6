# SPDX-License-Identifier: Apache-2.0
"""Replays of models with windows, chunks and states: oracles, a manager, bounds, sizes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcore import (
    KVCacheParams,
    LayerOptions,
    PagedKVCacheManager,
    TextGenerationContext,
    TierOptions,
)
from kvcore.apps.cli.presets import find_model
from kvcore.apps.replay.model_pools import is_hybrid, served_lines
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.replay import (
    ChatSettings,
    Comparison,
    EngineSettings,
    PoolError,
    PoolSettings,
    Workload,
    chat_workload,
    compare,
    model_pool,
    read_trace,
    replay_admission,
    replay_online,
    replay_routed,
    with_checkpoints,
    with_host_tier,
)
from kvcore.sizing import host_pages_per_replica, host_states_per_replica
from naive_checkpoints import hits_of_checkpoints, hits_of_prefixes
from trace_files import random_rows, row, write_trace

CHATS = ChatSettings(
    conversations=25,
    system_prompts=3,
    system_tokens=(30, 60),
    median_message=20,
    median_output=25,
    max_message=100,
    max_output=100,
)
GIB = 1 << 30
ARRAYS = {"ssm": ((4, 8), "float32"), "conv": ((6,), "float16")}  # 140 bytes for each layer
FULL, WINDOW, CHUNK = FullAttention([0]), SlidingWindow([1, 2], 40), ChunkedLocal([3], 96)
STATE = State([4, 5], ARRAYS)
SHAPES: dict[str, tuple[AttentionGroup | State, ...]] = {
    "full and window": (FULL, WINDOW),
    "window": (WINDOW,),
    "chunk": (FULL, CHUNK),
    "full and state": (FULL, STATE),
    "window and state": (WINDOW, STATE),
    "all": (FULL, WINDOW, CHUNK, STATE),
    "layers with both": (FULL, WINDOW, State([0, 1], ARRAYS)),
    "two states": (FULL, STATE, State([6], {"kept": ((3,), "int8")})),
    "two page sizes": (FullAttention([0], n_kv_heads=1), SlidingWindow([1, 2], 40), STATE),
}


def model_of(name: str, page_size: int = 8) -> KVCacheParams:
    groups = SHAPES[name]
    layers = 1 + max(layer for group in groups for layer in group.layers)
    return KVCacheParams("float16", 2, 4, layers, page_size=page_size, groups=groups)


@pytest.fixture(scope="module")
def chats() -> Workload:
    return chat_workload(seed=5, settings=CHATS)


def prompts_of(workload: Workload) -> list[list[int]]:
    return [workload.prompt(index).tolist() for index in range(len(workload))]


def roomy(model: KVCacheParams, **options: Any) -> PoolSettings:
    return model_pool(model, pages=400_000, requests=500, **options)


# ---- oracles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full and window", "window", "chunk"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_windows_hit_every_shared_token_of_whole_pages(
    chats: Workload, name: str, page_size: int
) -> None:
    report = replay_admission(chats, roomy(model_of(name, page_size)), chunk=64)
    expected = hits_of_prefixes(prompts_of(chats), page_size)
    assert list(report.request_hits) == expected
    assert sum(expected) == report.cached_tokens > 10_000
    assert report.is_unlimited


@pytest.mark.parametrize("every", [None, 16, 64])
@pytest.mark.parametrize("name", ["full and state", "window and state", "all", "layers with both"])
def test_states_hit_only_at_checkpoints(chats: Workload, name: str, every: int | None) -> None:
    model = model_of(name)
    if every is not None:
        model = with_checkpoints(model, every)
    for chunk in (64, 10_000):
        report = replay_admission(chats, roomy(model, state_slots=20_000), chunk=chunk)
        expected = hits_of_checkpoints(prompts_of(chats), 8, every)
        assert list(report.request_hits) == expected
        assert report.is_unlimited
        assert report.states is not None
        assert report.states.checkpoint_hits == sum(hit > 0 for hit in expected)
    flat = hits_of_prefixes(prompts_of(chats), 8)
    assert 10_000 < sum(expected) < sum(flat)
    assert all(hit <= most for hit, most in zip(expected, flat, strict=True))


def test_checkpoints_of_a_trace_of_blocks_need_pages_of_blocks(tmp_path: Path) -> None:
    # A prompt continues the one before; the end of a prompt is in the middle of a block.
    rows = [row([*range(n), 100 + n], length=512 * n + 200) for n in range(1, 9)]
    workload = read_trace(write_trace(tmp_path, *rows))
    hits = {}
    for page_size in (16, 512):
        pool = roomy(model_of("full and state", page_size))
        hits[page_size] = list(replay_admission(workload, pool).request_hits)
        assert hits[page_size] == hits_of_checkpoints(prompts_of(workload), page_size)
    assert hits[16][1:] == [0, *(512 * n for n in range(1, 7))]  # where the prompt before branched
    assert hits[512][1:] == [512 * n for n in range(1, 8)]
    small, large = (served_lines(roomy(model_of("full and state", n)), 512) for n in (16, 512))
    assert "--page-size 512 keeps checkpoints at the ends of blocks" in small[-1]
    assert len(large) == len(small) - 1


# ---- the manager ---------------------------------------------------------------------------------


def served_by_a_manager(
    workload: Workload, pool: PoolSettings, chunk: int
) -> tuple[list[int], list[int], PagedKVCacheManager]:
    """Serve the prompts by calls of a manager; return hits, and pages held by each prompt."""
    assert pool.model is not None
    params = pool.model
    fields = {name: getattr(params, name) for name in ("dtype", "n_kv_heads", "head_dim")}
    fields |= {name: getattr(params, name) for name in ("num_layers", "page_size", "groups")}
    cached = KVCacheParams(**fields, enable_prefix_caching=True)
    host = pool.host_pages * params.bytes_per_page
    host += pool.host_state_slots * params.bytes_per_state_slot
    tiers = TierOptions([f"host:{host}"], num_host_states=pool.host_state_slots or None)
    manager = PagedKVCacheManager(
        cached,
        max_batch_size=1,
        max_seq_len=100_000,
        num_pages=pool.pages,
        layers=LayerOptions(num_states=pool.state_slots or None),
        **({"tiers": tiers} if host else {"blocks": None}),
    )
    hits, held = [], []
    for index, prompt in enumerate(prompts_of(workload)):
        context = TextGenerationContext(index, prompt)
        manager.claim(index)
        begin = None
        while context.start_idx < len(prompt):
            context.active_idx = min(len(prompt), context.start_idx + chunk)
            manager.fetch([context])
            begin = context.start_idx if begin is None else begin
            context.update(0)
            manager.step([context])
            if not host:
                manager.take_copies()
                manager.take_state_copies()
        hits.append(begin or 0)
        held.append(manager.total_num_pages - manager.num_free_blocks)
        manager.release(index)
    return hits, held, manager


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize(("pages", "slots"), [(400, 5), (450, 20)])
def test_a_replay_counts_as_the_manager_does(
    chats: Workload, name: str, pages: int, slots: int
) -> None:
    model = model_of(name)
    pool = model_pool(model, pages=pages, state_slots=slots if model.state_groups else None)
    report = replay_admission(chats, pool, chunk=128)
    hits, held, manager = served_by_a_manager(chats, pool, 128)
    assert report.refused == 0
    assert list(report.request_hits) == hits
    assert report.evicted_pages == manager.metrics.evicted_pages > 0
    assert report.peak_used_pages == manager.metrics.peak_used_pages
    assert report.mean_used_pages == sum(held) / len(held)
    assert report.leaked_pages == 0
    if report.states is None:
        assert not model.state_groups
        return
    found = manager.state_metrics
    assert report.states.slots == slots == found.total_slots
    assert report.states.checkpoints == found.checkpoints
    assert report.states.checkpoint_hits == found.checkpoint_hits
    assert report.states.checkpoints_made == found.checkpoints_made
    assert report.states.evicted_checkpoints == found.evicted_checkpoints > 0
    assert report.states.leaked_slots == 0
    assert report.concurrency == min(pages / report.mean_used_pages, slots // 2)


@pytest.mark.parametrize("name", list(SHAPES))
def test_an_engine_serves_every_request(chats: Workload, name: str) -> None:
    model = model_of(name)
    pool = model_pool(model, pages=500, state_slots=9 if model.state_groups else None)
    report = replay_online(chats, pool, EngineSettings(concurrency=30, chunk=64))
    assert report.requests == len(chats)
    assert (report.refused, report.leaked_pages) == (0, 0)
    assert report.cached_tokens > 0
    if report.states is not None:
        assert report.concurrency <= 4  # two slots for each request
        assert report.states.leaked_slots == 0


@pytest.mark.parametrize("name", ["full and state", "window"])
def test_replicas_have_slots_and_pages_of_their_own(chats: Workload, name: str) -> None:
    model = model_of(name)
    one = replay_admission(chats, roomy(model, state_slots=2_000 if model.state_groups else None))
    pool = roomy(model, replicas=3, state_slots=2_000 if model.state_groups else None)
    three = replay_admission(chats, pool)
    assert three.cached_tokens == one.cached_tokens > 0
    assert (three.memory, three.total_pages) == (one.memory, 3 * one.total_pages)
    online = replay_online(chats, pool, EngineSettings(concurrency=12))
    assert (online.requests, online.leaked_pages) == (len(chats), 0)


# ---- host tiers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("slots", [3, 30])
def test_a_host_tier_counts_as_the_manager_does(chats: Workload, name: str, slots: int) -> None:
    model = model_of(name)
    states = {"state_slots": slots} if model.state_groups else {}
    pool = model_pool(model, pages=100 if name == "window" else 400, **states)
    tiered = replace(pool, host_pages=900, host_state_slots=2 * slots if states else 0)
    report = replay_admission(chats, tiered, chunk=128)
    hits, held, manager = served_by_a_manager(chats, tiered, 128)
    assert list(report.request_hits) == hits
    assert report.mean_used_pages == sum(held) / len(held)
    assert manager.total_num_host_pages == 900
    found = report.tiers
    assert found is not None
    assert found.host_written_pages == manager.metrics.d2h_blocks_copied > 0
    assert found.device_tokens + found.host_tokens == report.cached_tokens
    assert found.computed_tokens == report.prompt_tokens - report.cached_tokens
    assert found.host_tokens > 0
    if report.states is not None:
        stats = manager.state_metrics
        assert found.host_state_slots == stats.host_slots == 2 * slots
        assert report.states.loaded_checkpoints == stats.loaded_checkpoints > 0
        assert report.states.leaked_slots == 0
    alone = replay_admission(chats, pool, chunk=128)
    assert alone.cached_tokens < report.cached_tokens
    assert replay_online(chats, tiered, EngineSettings(concurrency=4)).leaked_pages == 0


@pytest.mark.parametrize("name", ["full and window", "window", "full and state", "all"])
def test_a_large_host_tier_finds_what_a_large_device_finds(chats: Workload, name: str) -> None:
    model = model_of(name)
    states = {"state_slots": 20} if model.state_groups else {}
    pool = model_pool(model, pages=400, **states)
    tiered = replace(pool, host_pages=60_000, host_state_slots=2_000 if states else 0)
    report = replay_admission(chats, tiered, chunk=128)
    prompts = prompts_of(chats)
    most = hits_of_checkpoints(prompts, 8) if states else hits_of_prefixes(prompts, 8)
    assert report.evicted_pages > 0
    # A page of the tier is loaded as a whole: hits inside of it need the page on the device.
    whole = [hit if states else hit // 8 * 8 for hit in most]
    found = list(report.request_hits)
    assert all(least <= hit <= most for least, hit, most in zip(whole, found, most, strict=True))


@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b"])
def test_a_host_tier_is_divided_as_a_manager_divides_it(name: str) -> None:
    model = find_model(name).params(16)
    pool = model_pool(model, memory=40 * GIB, replicas=2, requests=4)
    tiered = with_host_tier(pool, memory=64 * GIB)
    caching = replace(model, enable_prefix_caching=True)
    swapping: dict[str, Any] = {
        "enable_kvcache_swapping_to_host": True,
        "host_kvcache_swap_space_gb": 32,
    }
    real = replace(caching, **swapping)
    assert tiered.host_state_slots == host_states_per_replica(real)
    assert tiered.host_pages == host_pages_per_replica(real)
    assert 32 * GIB - model.bytes_per_page < tiered.host_memory <= 32 * GIB
    by_pages = with_host_tier(pool, pages=tiered.host_pages)
    assert abs(by_pages.host_state_slots - tiered.host_state_slots) <= 1
    share = with_host_tier(pool, memory=64 * GIB, state_share=0.25)
    slot = model.bytes_per_state_slot
    assert share.host_state_slots == (8 * GIB // slot if slot else 0)
    with pytest.raises(PoolError, match="have room for 0 pages"):
        with_host_tier(pool, memory=1000)
    with pytest.raises(PoolError, match="expected one of them"):
        with_host_tier(pool)
    with pytest.raises(PoolError, match="the pool has no model"):
        with_host_tier(PoolSettings(), pages=5)


# ---- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full and window", "full and state", "all"])
def test_tokens_without_a_window_or_a_checkpoint_are_unreachable(
    chats: Workload, name: str
) -> None:
    model = model_of(name)
    slots = {"state_slots": 6} if model.state_groups else {}
    pool = replace(model_pool(model, pages=300, **slots), explain=True)
    report = replay_admission(chats, pool, chunk=64)
    assert report.misses is not None
    assert report.misses.unreachable > 0
    assert report.misses.cached_tokens == report.cached_tokens
    assert sum(report.misses.by_reason.values()) == report.prompt_tokens - report.cached_tokens


# ---- bounds --------------------------------------------------------------------------------------


def compared(workload: Workload, model: KVCacheParams, **options: Any) -> Comparison:
    slots = {"state_slots": 12} if model.state_groups else {}
    pools = [model_pool(model, pages=pages, **slots) for pages in (60, 150, 400, 60_000)]
    return compare(workload, pools, ["lru", "lfu"], chunk=512, **options)


def test_a_bound_and_a_replay_have_the_same_chunks(chats: Workload) -> None:
    model = model_of("all", 2)
    for pages in range(300, 1_300, 50):
        pool = model_pool(model, pages=pages, state_slots=5)
        found = compare(chats, [pool], ["lru"], chunk=1)
        assert found.runs[0].report.refused == found.optima[0].refused
        if found.optima[0].refused < 20:
            break
    assert found.optima[0].refused > 0


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(SHAPES))
def test_no_policy_finds_more_than_the_bound(tmp_path: Path, name: str, seed: int) -> None:
    rows = random_rows(seed, requests=80, depth=6, fan_out=2)
    workload = read_trace(write_trace(tmp_path, *rows))
    found = compared(workload, model_of(name, 128))
    assert (found.optimum_name, found.has_flat) == ("bound", False)
    assert found.pages == tuple(best.pages for best in found.optima)
    for policy in ("lru", "lfu"):
        for run, best in zip(found.of(policy), found.optima, strict=True):
            report = run.report
            assert (report.requests, report.refused) == (best.requests, best.refused)
            assert report.cached_tokens <= best.cached_tokens
            assert report.cached_pages <= best.cached_pages
    run_of_tokens = model_pool(model_of(name, 128), pages=1).hit_tokens
    whole = replay_admission(workload, PoolSettings(page_size=run_of_tokens, pages=60_000))
    assert found.optima[-1].cached_tokens == whole.cached_tokens


def test_the_bound_refuses_the_requests_that_a_model_refuses(tmp_path: Path) -> None:
    # The window needs more pages than there are, so the long prompt never runs; a flat optimum of
    # the full layer would run it, and evict the two short prompts.
    short, long = row([0, 1]), row([9, 8, 7, 6])
    workload = read_trace(write_trace(tmp_path, short, row([2, 3]), long, short, row([2, 3, 5])))
    model = KVCacheParams(
        "float16", 1, 4, 2, page_size=512, groups=[FullAttention([0]), SlidingWindow([1], 512)]
    )
    pool = model_pool(model, pages=7)
    found = compare(workload, [pool], ["lru"], chunk=100_000)
    (best,) = found.optima
    (run,) = found.runs
    assert (run.report.refused, best.refused) == (1, 1)
    assert run.report.cached_tokens <= best.cached_tokens


def test_a_bound_has_the_pages_of_full_layers() -> None:
    # Bundles of full layers: 2 of Gemma 3 27B, 1 of Llama 4 Scout, none of Mistral 7B.
    for name, full in (("gemma-3-27b", 2), ("llama-4-scout", 1), ("qwen3-next-80b-a3b", 1)):
        assert model_pool(find_model(name).params(16), pages=1000).full_columns == 1000 // full
    assert model_pool(find_model("mistral-7b-v0.1").params(16), pages=10).full_columns > 10**9
    # A page of 16 tokens of both full layers takes one page of 32 tokens.
    assert model_pool(model_of("two page sizes", 16), pages=1000).full_columns == 1000


def test_the_best_rate_is_that_of_a_replay_without_evictions(chats: Workload) -> None:
    model = model_of("full and state")
    small, large = (model_pool(model, pages=n, state_slots=n) for n in (400, 4_000))
    both = compare(chats, [large, small], ["lru"], chunk=512)
    expected = hits_of_checkpoints(prompts_of(chats), 8)
    assert both.most_cached_tokens == sum(expected) < both.optima[-1].cached_tokens
    assert both.decision.best_of == "no evictions"
    assert both.memory == tuple(n * (model.bytes_per_page + 280) for n in (400, 4_000))
    assert both.decision.memory == both.memory[both.pages.index(both.decision.pages or 0)]
    one = model_pool(model, pages=4_000, state_slots=1)  # no slot for a checkpoint
    assert replay_admission(chats, one).cached_tokens == 0
    assert compare(chats, [one], ["lru"], chunk=512).most_cached_tokens is None
    only = compare(chats, [small], ["lru"], chunk=512)
    assert only.most_cached_tokens is None
    assert only.decision.best_of == "these replays"
    online = compare(chats, [large], ["lru"], engine=EngineSettings())
    assert (online.optima, online.most_cached_tokens) == ((), None)


@pytest.mark.parametrize(
    ("pages", "slots", "told"),
    [
        (4_000, 5, "checkpoints were evicted from 5 state slots: more slots may find more."),
        (
            150,
            900,
            "no checkpoint was evicted from 900 state slots, and [0-9,]+ pages were evicted",
        ),
        (4_000, 900, None),
    ],
)
def test_a_decision_says_whether_slots_or_pages_are_short(
    chats: Workload, pages: int, slots: int, told: str | None
) -> None:
    pool = model_pool(model_of("full and state"), pages=pages, state_slots=slots)
    text = compare(chats, [pool], ["lru"], chunk=512).decision.text
    assert re.search(told or "no smaller size was replayed.$", text)
    assert (told is None) == ("checkpoint" not in text)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "jamba-1.5-mini", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize("requests", [3, 16, 200])
def test_memory_is_divided_as_a_manager_divides_it(name: str, requests: int) -> None:
    model = find_model(name).params(16)
    assert is_hybrid(model)
    memory = 80 * GIB
    pool = model_pool(model, memory=memory, requests=requests)
    manager = PagedKVCacheManager(model, requests, 4096, available_cache_memory=memory, blocks=None)
    assert pool.state_slots == manager.state_metrics.total_slots
    assert pool.pages == manager.total_num_pages
    assert memory - model.bytes_per_page < pool.memory <= memory
    assert pool.most_running >= requests


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b", "llama-4-scout"])
def test_without_states_the_memory_is_pages(name: str) -> None:
    model = find_model(name).params(16)
    pool = model_pool(model, memory=24 * GIB, replicas=2)
    assert pool.pages == 12 * GIB // model.bytes_per_page
    assert (pool.state_slots, pool.most_running) == (0, float("inf"))


def test_states_take_at_most_half_of_the_memory() -> None:
    model = find_model("qwen3-next-80b-a3b").params(16)
    slot = model.bytes_per_state_slot
    pool = model_pool(model, memory=20 * GIB, requests=256)
    assert 10 * GIB - 2 * slot < pool.state_slots * slot <= 10 * GIB
    assert pool.pages_per_replica * model.bytes_per_page >= 10 * GIB - model.bytes_per_page
    by_pages = model_pool(model, pages=pool.pages_per_replica, requests=256)
    assert abs(by_pages.state_slots - pool.state_slots) <= 4
    assert by_pages.pages == pool.pages
    exact = model_pool(model, memory=20 * GIB, state_slots=10)
    assert exact.pages == (20 * GIB - 10 * slot) // model.bytes_per_page


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": 100}, "100 B on each of 1 replicas have room for 0 pages"),
        ({"memory": GIB, "state_slots": 10_000_000}, "fewer state slots"),
        ({"memory": GIB, "state_share": 1.0}, "expected more than 0 and less than 1"),
        ({"memory": GIB, "state_share": 0.5, "state_slots": 3}, "expected one of them"),
        ({}, "expected one of them"),
        ({"memory": GIB, "pages": 3}, "expected one of them"),
    ],
)
def test_a_memory_without_room_is_refused(options: dict[str, int], told: str) -> None:
    with pytest.raises(PoolError, match=told):
        model_pool(model_of("full and state"), **options)


def test_slots_and_checkpoints_need_a_state() -> None:
    with pytest.raises(PoolError, match="no layer of the model keeps a state"):
        model_pool(model_of("window"), pages=10, state_slots=3)
    with pytest.raises(PoolError, match="no layer of the model keeps a state"):
        with_checkpoints(model_of("window"), 16)
    with pytest.raises(PoolError, match="expected a multiple of 8"):
        with_checkpoints(model_of("full and state"), 20)
    with pytest.raises(PoolError, match="expected a multiple of 16"):
        with_checkpoints(model_of("two page sizes"), 8)


def test_a_comparison_has_one_model(chats: Workload) -> None:
    model = model_of("full and window")
    with pytest.raises(PoolError, match="and another model is given"):
        compare(chats, [roomy(model)], ["lru"], model=model)


def test_the_slots_of_a_comparison_are_those_of_its_managers(chats: Workload) -> None:
    model = model_of("full and state")
    pool = PoolSettings(page_size=8, pages=500, model=model, page_bytes=model.bytes_per_page)
    found = compare(chats, [pool], ["lru"])
    states = found.runs[0].report.states
    assert states is not None
    assert found.state_slots == (states.slots,) > (0,)
    assert found.memory == (found.runs[0].report.memory,)


def test_a_router_refuses_a_model(chats: Workload) -> None:
    with pytest.raises(PoolError, match="remove groups and tiers"):
        replay_routed(chats, roomy(model_of("window")), "prefix")
