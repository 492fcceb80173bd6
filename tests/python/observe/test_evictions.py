# SPDX-License-Identifier: Apache-2.0
"""Reasons of evictions: each page counts once, and `evicted_pages` counts evictions for room."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from builders import claimed, make_manager
from grouped_traffic import manager_of, params_of
from kvcore import TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.metrics import EvictionMetrics
from state_model import prefill, state_manager, state_params
from tier_steps import A, B, C, serve, tiered

NONE = EvictionMetrics(policy=0, window=0, unreachable=0, reset=0)


def cache(manager: Any, tokens: Any) -> None:
    """Serve a prompt and release it."""
    context = claimed(manager, tokens)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    manager.release(context.request_id)


def test_the_policy_makes_room_for_new_pages() -> None:
    manager = make_manager(4, 8)
    cache(manager, range(16))
    assert manager.eviction_metrics == {"device": NONE}
    cache(manager, range(100, 124))
    found = manager.eviction_metrics["device"]
    assert asdict(found) == asdict(NONE) | {"policy": manager.metrics.evicted_pages}
    assert found.policy == 2  # 4 of 8 were cached, 6 are needed
    manager.reset_metrics()
    assert manager.eviction_metrics == {"device": NONE}


def test_what_a_reset_takes_made_no_room() -> None:
    manager = make_manager(4, 16)
    cache(manager, range(16))
    held = claimed(manager, range(100, 109))
    manager.fetch([held])
    held.update(0)
    manager.step([held])
    cached = manager.num_cached_blocks
    manager.reset_prefix_cache()
    found = manager.eviction_metrics["device"]
    assert found.reset == cached == 6  # two pages belong to the running request
    assert manager.num_cached_blocks == 0
    assert found == EvictionMetrics(policy=0, window=0, unreachable=0, reset=6)
    assert manager.metrics.evicted_pages == 0
    manager.reset_prefix_cache()
    assert manager.eviction_metrics["device"].reset == 6


def test_the_host_tier_has_counts_of_its_own() -> None:
    manager, pool = tiered(num_pages=8, host_pages=8)
    for tokens in (A, B, C):
        serve(manager, pool, tokens)
    found = manager.eviction_metrics["host"]
    stored = manager.metrics.d2h_blocks_copied
    (replica,) = manager.replica_metrics
    assert found.policy == stored - replica.host_cached_pages > 0
    manager.reset_prefix_cache()
    assert manager.eviction_metrics["host"].reset == replica.host_cached_pages
    assert manager.eviction_metrics["device"].policy == manager.metrics.evicted_pages


def run_grouped(manager: Any, name: str, tokens: list[int]) -> None:
    manager.claim(name)
    context = TextGenerationContext(name, tokens)
    manager.fetch([context])
    context.update(9)
    manager.step([context])
    manager.release(name)


def test_pages_behind_windows_go_first() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 4))
    manager = manager_of(params, num_pages=24)
    for i in range(8):
        run_grouped(manager, str(i), list(range(100 * i, 100 * i + 17)))
        found = manager.eviction_metrics["device"]
        assert found.policy + found.window + found.unreachable == manager.metrics.evicted_pages
    assert found.window > 0
    assert found.reset == 0
    cached = manager.num_cached_blocks
    manager.reset_prefix_cache()
    assert manager.eviction_metrics["device"].reset == cached - manager.num_cached_blocks > 0
    assert asdict(manager.eviction_metrics["device"]) == asdict(found) | {"reset": cached}


def test_pages_that_no_checkpoint_makes_worth_it() -> None:
    manager = state_manager(state_params(), num_pages=12)
    for i in range(6):
        prefill(manager, f"r{i}", [(7 * i + k) % 50 for k in range(19)])
        manager.release(f"r{i}")
    found = manager.eviction_metrics["device"]
    assert found.policy + found.unreachable == manager.metrics.evicted_pages
    assert min(found.policy, found.unreachable) > 0
