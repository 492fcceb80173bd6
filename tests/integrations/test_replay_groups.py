# SPDX-License-Identifier: Apache-2.0
"""Replays with a model's groups, compared with a slow simulator and with the flat cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore import KVCacheParams
from kvcore.apps.cli.presets import find_model
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.replay import (
    ChatSettings,
    PoolError,
    PoolSettings,
    Timeline,
    chat_workload,
    compare,
    read_trace,
    replay_admission,
)
from naive_groups import NaiveGroups
from trace_files import random_rows, row, write_trace

CHATS = ChatSettings(conversations=40, system_prompts=3, system_tokens=(50, 90))


def model_of(page_size: int, *groups: AttentionGroup | State) -> KVCacheParams:
    layers = sum(len(group.layers) for group in groups)
    return KVCacheParams("float16", 1, 1, layers, page_size=page_size, groups=groups)


def shape_of(name: str, page_size: int) -> KVCacheParams:
    full = FullAttention([0])
    shapes: dict[str, tuple[AttentionGroup, ...]] = {
        "window": (full, SlidingWindow([1, 2], 1100)),
        "short window": (full, SlidingWindow([1], 600)),
        "two windows": (full, SlidingWindow([1], 300), SlidingWindow([2], 900)),
        "chunk": (FullAttention([0, 1]), ChunkedLocal([2, 3, 4], 1024)),
        "window and chunk": (full, SlidingWindow([1], 200), ChunkedLocal([2], 700)),
        "window alone": (SlidingWindow([0], 700),),
    }
    return model_of(page_size, *shapes[name])


class Hits(Timeline):
    """A record of the hit of every request."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def add_request(self, now: float, prompt_tokens: int, cached_tokens: int) -> None:
        self.found.append(cached_tokens)


def equals_the_simulator(folder: Path, seed: int, name: str, page_size: int) -> int:
    """Replay a random trace in both; return the number of cached tokens."""
    rows = random_rows(seed, requests=60, depth=6, fan_out=2)
    workload = read_trace(write_trace(folder, *rows))
    model, found = shape_of(name, page_size), 0
    for pages in (40, 70, 120, 300):
        for chunk in (512, 1500, 1_000_000):
            hits = Hits()
            pool = PoolSettings(page_size=page_size, pages=pages, model=model)
            report = replay_admission(workload, pool, timeline=hits, chunk=chunk)
            naive = NaiveGroups(model, pages, chunk)
            prompts = (workload.prompt(index) for index in range(len(workload)))
            expected = [naive.serve(prompt.tobytes(), len(prompt)) for prompt in prompts]
            assert hits.found == expected
            windows = [group for group in report.groups if group.kind != "full"]
            assert report.evicted_pages == naive.evicted
            assert [group.given_back for group in windows] == naive.given_back
            assert [group.filled for group in windows] == naive.filled
            assert report.leaked_pages == 0
            found += sum(expected)
    return found


NAMES = ["window", "short window", "two windows", "chunk", "window and chunk", "window alone"]


@pytest.mark.parametrize("name", NAMES)
def test_replay_equals_the_simulator(tmp_path: Path, name: str) -> None:
    assert equals_the_simulator(tmp_path, 0, name, 256) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [128, 512])
@pytest.mark.parametrize("name", NAMES)
def test_replay_equals_the_simulator_for_long(tmp_path: Path, name: str, page_size: int) -> None:
    for seed in (1, 2):
        equals_the_simulator(tmp_path, seed, name, page_size)


def test_hits_are_those_of_a_flat_cache_where_nothing_is_evicted(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, *random_rows(3, requests=50, depth=5, fan_out=2)))
    flat = PoolSettings(page_size=128, pages=20_000)
    grouped = flat.with_groups(shape_of("window", 128))
    reports = [replay_admission(workload, pool, chunk=700) for pool in (flat, grouped)]
    assert reports[0].cached_tokens == reports[1].cached_tokens > 0
    assert [report.evicted_pages for report in reports] == [0, 0]
    assert reports[0].groups == ()


def test_both_pools_have_the_same_memory() -> None:
    model = find_model("gemma-3-27b").params(16, groups=True)
    flat = PoolSettings(pages=1000)
    grouped = flat.with_groups(model)
    # 62 layers in a page without groups, 5 with them.
    assert (grouped.pages, grouped.model) == (1000 * 62 // 5, model)
    assert grouped.most_pages(50_000, 2048) < grouped.pages_per_replica
    assert flat.most_pages(50_000, 2048) == 3125 > flat.pages_per_replica


def test_what_a_request_holds_is_counted(tmp_path: Path) -> None:
    # Pages of 512 tokens; after 4,096 tokens a window of 600 tokens holds 2 of them.
    workload = read_trace(write_trace(tmp_path, row(list(range(8))), row(list(range(8, 16)))))
    model = model_of(512, FullAttention([0]), SlidingWindow([1, 2], 600))
    pool = PoolSettings(page_size=512, pages=100, model=model)
    report = replay_admission(workload, pool, chunk=1024)
    full, window = report.groups
    assert (full.kind, full.keeps, full.layers, full.bundles) == ("full", None, 1, 1)
    assert (window.kind, window.keeps, window.layers, window.bundles) == ("window", 600, 2, 2)
    assert (full.held_pages, window.held_pages) == (8, 2 * 2)
    assert (full.cached_pages, window.cached_pages) == (16, 32)
    assert (full.given_back, window.given_back) == (0, 2 * 2 * 6)
    assert (window.holes, window.filled) == (0, 0)
    assert report.mean_used_pages == 12
    assert report.concurrency == 100 / 12


def test_one_token_at_a_time_still_hits(tmp_path: Path) -> None:
    prompt = row([0], length=40)
    workload = read_trace(write_trace(tmp_path, prompt, prompt))
    pool = PoolSettings(page_size=8, pages=100, model=model_of(8, SlidingWindow([0], 9)))
    assert replay_admission(workload, pool, chunk=1).cached_tokens == 39


def test_pages_of_several_sizes_are_replayed() -> None:
    groups = [FullAttention([0], n_kv_heads=1), SlidingWindow([1, 2], 64)]
    model = KVCacheParams("float16", 2, 8, 3, page_size=8, groups=groups)
    for pages in (60, 300):
        pool = PoolSettings(page_size=8, pages=pages, model=model)
        workload = chat_workload(seed=5, settings=CHATS)
        report = replay_admission(workload, pool, chunk=128)
        assert report.leaked_pages == 0
        assert report.peak_used_pages <= pages
    assert report.cached_tokens > 0


def test_replicas_have_groups_too() -> None:
    workload = chat_workload(seed=5, settings=CHATS)
    flat = PoolSettings(page_size=8, pages=100_000)
    model = shape_of("short window", 8)
    one = replay_admission(workload, flat.with_groups(model), chunk=256)
    pool = PoolSettings(page_size=8, pages=100_000, replicas=3).with_groups(model)
    three = replay_admission(workload, pool, chunk=256)
    assert three.cached_tokens == one.cached_tokens > 0
    assert (three.total_pages, three.leaked_pages) == (3 * one.total_pages, 0)


def test_each_policy_is_compared_with_itself() -> None:
    model = shape_of("short window", 8)
    workload = chat_workload(seed=5, settings=CHATS)
    pools = [PoolSettings(page_size=8, pages=pages) for pages in (900, 300)]
    found = compare(workload, pools, ["lru", "lfu"], model=model, chunk=256)
    assert found.curves == ("lru flat", "lru groups", "lfu flat", "lfu groups")
    assert found.pages == (300, 900)
    assert found.memory == (300 * 2 * 2 * 2 * 8, 900 * 2 * 2 * 2 * 8)
    for policy in ("lru", "lfu"):
        for kind in ("flat", "groups"):
            for pool, run in zip(reversed(pools), found.of(f"{policy} {kind}"), strict=True):
                alone = pool if kind == "flat" else pool.with_groups(model)
                alone = alone.with_policy(policy)
                expected = replay_admission(workload, alone, chunk=256)
                assert run.report.cached_tokens == expected.cached_tokens
                assert run.report.groups == expected.groups
                assert run.report.policy == policy
    for run, best in zip(found.of("lru flat"), found.optima, strict=True):
        assert run.report.token_hit_rate <= best.token_hit_rate


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (model_of(16, FullAttention([0, 1])), "all 2 layers keep every token"),
        (KVCacheParams("float16", 1, 1, 2, page_size=16), "all 2 layers keep every token"),
        (
            model_of(16, SlidingWindow([0], 9), State([1, 2], {"s": ((4,), "float32")})),
            "2 of 3 layers keep a state",
        ),
        (model_of(32, SlidingWindow([0], 9)), "pages of 32 tokens, the pool has pages of 16"),
    ],
)
def test_a_model_that_tells_nothing_is_refused(model: KVCacheParams, told: str) -> None:
    with pytest.raises(PoolError, match=told):
        PoolSettings().with_groups(model)


def test_more_pages_than_can_be_numbered_are_refused() -> None:
    model = find_model("gemma-3-27b").params(16, groups=True)
    with pytest.raises(PoolError, match="expected at most 2147483647"):
        PoolSettings(pages=2**31 - 1).with_groups(model)
