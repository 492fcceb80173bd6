# SPDX-License-Identifier: Apache-2.0
"""Bytes that stores return, for every kind of pool, groups, states, devices and namespaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import SlidingWindow
from kvcore.keys import page_keys
from kvcore.stores import MemoryStore
from moved_requests import moving_params
from state_model import prefill, prompt, state_manager, state_params
from tiered_requests import LONG, DictStore, run, served_by, store_prompt, tiered_manager

ALL = (len(LONG) - 1) // 4 * 4

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16", "head_dim": 59, "n_kv_heads": 3},
    "scales": {"dtype": "int8", "kv_scale_granularity": 4, "head_dim": 12, "n_kv_heads": 3},
    "wide V": {"v_head_dim": 5},
    "MLA": {"is_mla": True, "n_kv_heads": 1, "head_dim": 7, "dtype": "float16"},
    "tp 2": {"n_devices": 2},
    "dp 2": {"n_devices": 2, "data_parallel_degree": 2},
    "dp 2, tp 2": {"n_devices": 4, "data_parallel_degree": 2},
    "large pages": {"page_size": 16, "head_dim": 64, "num_layers": 2},
}

Tiers = Callable[[], list[Any]]


@pytest.fixture(params=["memory", "own", "disk", "disk below memory"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    """Return stores that keep their pages when managers come and go."""
    memory, own = MemoryStore(1 << 22), DictStore()
    kinds: dict[str, Tiers] = {
        "memory": lambda: [memory],
        "own": lambda: [own],
        "disk": lambda: [f"disk:{tmp_path}:16MiB"],
        "disk below memory": lambda: ["host:1MiB", MemoryStore(1 << 22), f"disk:{tmp_path}:16MiB"],
    }
    return kinds[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_another_manager_has_the_same_bytes(tiers: Tiers, kind: str) -> None:
    params = moving_params(**KINDS[kind])
    store_prompt(tiers(), params=params)
    whole = (len(LONG) - 1) // params.page_size * params.page_size
    for replica in range(params.data_parallel_degree):
        assert served_by(tiers(), params=params, replica_idx=replica) == whole


def test_only_what_is_in_whole_pages_is_found(tiers: Tiers) -> None:
    store_prompt(tiers(), LONG[:23])
    assert served_by(tiers(), LONG[:23]) == 20
    assert served_by(tiers(), LONG) == 20
    assert served_by(tiers(), LONG[:20] + [99] * 5) == 20
    assert served_by(tiers(), LONG[:10] + [99] * 20) == 8
    assert served_by(tiers(), [99] * 20) == 0


def test_a_hit_leaves_a_token_to_run(tiers: Tiers) -> None:
    store_prompt(tiers(), LONG[:20])
    with tiered_manager(*tiers()) as manager:
        assert 16 <= run(manager, LONG[:20]) < 20


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"extra_key": "a"}, {"cache_salt": "a"}),
        ({}, {"extra_key": ""}),
        ({"extra_keys": [(5, 3, b"cat")]}, {"extra_keys": [(5, 3, b"dog")]}),
        ({"extra_keys": [(5, 3, b"cat")]}, {"extra_keys": [(4, 4, b"cat")]}),
    ],
)
def test_namespaces_and_images_are_apart(
    tiers: Tiers, stored: dict[str, Any], asked: dict[str, Any]
) -> None:
    store_prompt(tiers(), **stored)
    is_image = "extra_keys" in stored
    assert served_by(tiers(), **asked) == (4 if is_image else 0)
    assert served_by(tiers(), **stored) == ALL


def test_windows_alone_need_no_pages_in_front_of_them() -> None:
    params = moving_params(groups=[SlidingWindow([0, 1], 8)])
    store = DictStore()
    prompt = list(range(32))
    with tiered_manager(store, params=params) as manager:
        context = TextGenerationContext("r", prompt)
        manager.claim("r")
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        assert manager.flush(timeout=60)
    keys = [*store.pages]
    assert len(keys) == 8
    for lost, hit in ((keys[:5], 28), (keys[5:6], 0)):
        store.remove(lost)
        with tiered_manager(store, params=params) as manager:
            context = TextGenerationContext("r", prompt)
            manager.claim("r")
            assert manager.maybe_reserve(context)
            assert context.start_idx == hit


def test_models_are_apart(tiers: Tiers) -> None:
    with tiered_manager(*tiers(), fingerprint="llama") as manager:
        run(manager, LONG)
        assert manager.flush(timeout=60)
    for fingerprint, wanted in (("qwen", 0), (b"llama", 0), (None, 0), ("llama", ALL)):
        with tiered_manager(*tiers(), fingerprint=fingerprint) as manager:
            assert run(manager, LONG[:-3]) <= wanted
            metrics = [each for name, each in manager.tier_metrics.items() if name != "host"]
            assert sum(each.corrupt for each in metrics) == 0


def test_layouts_are_apart() -> None:
    store = DictStore()
    store_prompt([store])
    other = moving_params(num_layers=1)
    assert served_by([store], params=other) == 0
    assert served_by([store]) == ALL


def test_keys_are_those_of_the_model_and_the_tokens() -> None:
    from kvcore.stores.tiers.choice import model_fingerprint

    store = DictStore()
    store_prompt([store])
    seed = model_fingerprint(moving_params(), None)
    written = [*LONG, 9][: len(LONG)]
    assert {*page_keys(written, 4, seed=seed)} == {*store.pages}


def test_what_a_lower_store_had_goes_to_those_above() -> None:
    upper, lower = DictStore(), MemoryStore(1 << 20)
    store_prompt([lower])
    with tiered_manager(upper, lower) as manager:
        assert run(manager, LONG) == ALL
        assert manager.flush(timeout=60)
    assert len(upper.pages) == len(LONG) // 4
    assert served_by([upper]) == ALL


def test_a_prompt_is_written_once() -> None:
    store = DictStore()
    with tiered_manager(store) as manager:
        run(manager, LONG)
        assert manager.flush(timeout=60)
        written = manager.tier_metrics["dictstore"].bytes_in
        run(manager, LONG)
        run(manager, LONG[:20] + [3] * 9)
        assert manager.flush(timeout=60)
        pages = (manager.tier_metrics["dictstore"].bytes_in - written) / len(
            next(iter(store.pages.values()))
        )
    assert pages == 2


def test_more_than_the_host_tier_holds_goes_through_it() -> None:
    store = MemoryStore(1 << 24)
    params = moving_params()
    small: dict[str, Any] = {"num_pages": 64, "max_seq_len": 100}
    prompts = [[(i * 7 + j) % 97 for j in range(60)] for i in range(12)]
    with tiered_manager(store, params=params, **small) as manager:
        for i, tokens in enumerate(prompts):
            run(manager, tokens, i)
        assert manager.flush(timeout=60)
    with tiered_manager(f"host:{20 * params.bytes_per_page}", store, **small) as manager:
        for i, tokens in enumerate(prompts):
            assert run(manager, tokens, i) == 56
        manager.check_integrity()


def grouped(**options: Any) -> KVCacheParams:
    from kvcore.groups import FullAttention, SlidingWindow

    return moving_params(groups=[FullAttention([0]), SlidingWindow([1], window=8)], **options)


def test_groups_come_back(tiers: Tiers) -> None:
    tokens = prompt((0, 42))

    def manager() -> PagedKVCacheManager:
        fields: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 200, "num_pages": 64}
        return PagedKVCacheManager(
            grouped(), tiers=tiers(), enable_runtime_checks=True, **in_groups(fields)
        )

    with manager() as first:
        context = TextGenerationContext("a", tokens)
        first.claim("a")
        first.fetch([context])
        context.update(1)
        first.step([context])
        first.release("a")
        assert first.flush(timeout=60)
    with manager() as second:
        context = TextGenerationContext("b", tokens)
        second.claim("b")
        assert second.maybe_reserve(context)
        assert context.start_idx == 40
        full, window = second.group_metrics
        assert full.loaded_pages == 10
        assert window.loaded_pages == 2


@pytest.mark.parametrize("interval", [None, 8])
def test_states_come_back(tiers: Tiers, interval: int | None) -> None:
    tokens = prompt((0, 30))

    def manager() -> PagedKVCacheManager:
        return state_manager(state_params(interval=interval), tiers=tiers(), num_pages=40)

    with manager() as first:
        prefill(first, "a", tokens)
        first.release("a")
        assert first.flush(timeout=60)
    with manager() as second:
        prefill(second, "b", tokens + [77] * 3)  # checks the state in its slot
        assert second.metrics.cache_tokens >= 24
        assert second.state_metrics.loaded_checkpoints == 1
        second.release("b")
