# SPDX-License-Identifier: Apache-2.0
"""A cache reset: its result, and no hits on older pages after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow
from tiered_requests import LONG, run, tiered_manager

PROMPT = list(range(16))
GROUPS = [None, [FullAttention([0]), SlidingWindow([1], 8)]]


def make(**options: Any) -> PagedKVCacheManager:
    groups = options.pop("groups", None)
    params = KVCacheParams(
        "float32",
        1,
        8,
        2,
        page_size=4,
        enable_prefix_caching=True,
        groups=groups,
        n_devices=options.pop("replicas", 1),
        data_parallel_degree=options.get("dp", 1),
    )
    options.pop("dp", None)
    return PagedKVCacheManager(
        params,
        8,
        512,
        num_pages=100,
        blocks=None,
        enable_runtime_checks=True,
        devices=["cpu"] * params.n_devices,
        **in_groups(options),
    )


def begun(manager: PagedKVCacheManager, name: Any = "r", replica: int = 0) -> Any:
    context = TextGenerationContext(name, PROMPT)
    manager.claim(name, replica)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    manager.take_copies()
    return context


def step(manager: PagedKVCacheManager, context: Any, count: int = 1) -> None:
    for _ in range(count):
        manager.fetch([context])
        manager.take_copies()
        context.update(1)
        manager.step([context])


def cached(manager: PagedKVCacheManager, tokens: Any = PROMPT, replica: int = 0) -> int:
    return manager.match_prefix(tokens, replica_idx=replica)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_cache_that_nobody_holds_is_empty(groups: Any) -> None:
    manager = make(groups=groups)
    assert manager.reset_prefix_cache() is True
    begun(manager)
    manager.release("r")
    assert cached(manager) == 16
    assert manager.reset_prefix_cache() is True
    assert cached(manager) == 0
    assert manager.num_cached_blocks == 0


@pytest.mark.parametrize("groups", GROUPS)
def test_pages_of_a_request_are_hit_no_more(groups: Any) -> None:
    manager = make(groups=groups)
    context = begun(manager)
    assert manager.reset_prefix_cache() is False
    assert cached(manager) == 0
    step(manager, context, 10)  # computed from forgotten pages
    assert cached(manager, context.tokens) == 0
    assert manager.reset_prefix_cache() is False
    manager.release("r")
    assert cached(manager, context.tokens) == 0
    assert manager.reset_prefix_cache() is True
    assert manager.num_free_blocks == 100
    begun(manager, "new")
    assert cached(manager) == 16


def test_a_request_whose_pages_were_not_cached_yet_caches_none() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    manager.fetch([context])
    assert manager.reset_prefix_cache() is True
    context.update(1)
    manager.step([context])
    step(manager, context, 5)
    assert cached(manager) == 0


def test_a_request_that_begins_behind_the_reset_is_cached() -> None:
    manager = make()
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    assert manager.maybe_reserve(context)
    assert manager.reset_prefix_cache() is True
    step(manager, context)
    assert cached(manager) == 16


def test_a_request_that_was_truncated_to_nothing_is_cached_again() -> None:
    manager = make()
    context = begun(manager)
    assert manager.reset_prefix_cache() is False
    manager.truncate("r", 0)
    context.rewind(16)
    context.start_idx = 0
    step(manager, context)
    assert cached(manager) == 16
    manager.release("r")
    assert manager.reset_prefix_cache() is True


def test_a_hit_that_was_reserved_before_is_not_shared_behind_it() -> None:
    manager = make()
    begun(manager)
    manager.release("r")
    context = TextGenerationContext("s", [*PROMPT, 1, 2, 3, 4, 5])
    manager.claim("s")
    assert manager.maybe_reserve(context)
    assert context.start_idx == 16
    assert manager.reset_prefix_cache() is False
    manager.take_copies()
    step(manager, context, 4)
    assert cached(manager, context.tokens) == 0


def test_forks_and_pins_hold_what_is_hit_no_more() -> None:
    manager = make()
    context = begun(manager)
    child = TextGenerationContext("c", [*PROMPT, 9])
    manager.fork("r", child)
    with manager.pin(PROMPT) as pinned:
        assert pinned.num_tokens == 16
        manager.release("r")
        assert manager.reset_prefix_cache() is False
        assert cached(manager) == 0
        step(manager, child, 5)
        assert cached(manager, child.tokens) == 0
        manager.release("c")
        assert manager.reset_prefix_cache() is False
    assert manager.reset_prefix_cache() is True
    assert manager.num_free_blocks == 100
    assert context.end_idx == 17


def test_held_pages_are_hit_no_more() -> None:
    manager = make()
    begun(manager)
    held = manager.hold(manager.get_req_blocks("r"))
    assert manager.reset_prefix_cache() is False
    manager.release("r")
    manager.reset_prefix_cache()
    assert cached(manager) == 0
    held.let_go()
    assert manager.reset_prefix_cache() is True
    assert manager.num_free_blocks == 100


def test_every_replica_is_reset() -> None:
    manager = make(replicas=2, dp=2)
    for replica in range(2):
        begun(manager, replica, replica)
    manager.release(0)
    assert manager.reset_prefix_cache() is False
    assert [cached(manager, replica=r) for r in range(2)] == [0, 0]
    manager.release(1)
    assert manager.reset_prefix_cache() is True


def test_the_host_tier_and_disks_of_its_own_are_empty(tmp_path: Path) -> None:
    with tiered_manager("host:1MiB", f"disk:{tmp_path}:16MiB") as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        manager.fetch([context])
        context.update(9)
        manager.step([context])
        assert manager.flush(timeout=60)
        assert manager.reset_prefix_cache() is False
        for _ in range(8):
            manager.fetch([context])
            context.update(9)
            manager.step([context])
        manager.release("r")
        assert manager.flush(timeout=60)
        assert manager.reset_prefix_cache() is True
        assert run(manager, LONG, "again") == 0
