# SPDX-License-Identifier: Apache-2.0
"""Hits and misses of a tier count pages: their sum is the pages that no upper tier had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.stores import MemoryStore
from moved_requests import moving_params
from tiered_requests import DictStore, tiered_manager

LENGTH, PAGES = 42, 10  # the tokens of a prompt, and the most pages that it can hit


def serve(manager: PagedKVCacheManager, number: int) -> None:
    context = TextGenerationContext(number, [1000 * number + i for i in range(LENGTH)])
    manager.claim(number)
    for _ in range(2):  # two calls count as one lookup
        assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    manager.release(number)


def test_a_disk_that_has_a_quarter_of_the_prompts_has_a_hit_rate_of_a_quarter(
    tmp_path: Path,
) -> None:
    tiers = ["host:1MiB", f"disk:{tmp_path}:16MiB"]
    with tiered_manager(*tiers, num_pages=40) as manager:
        for n in range(5):
            serve(manager, n)
        assert manager.flush(timeout=60)
    with tiered_manager(*tiers, num_pages=40) as manager:
        for n in range(20):
            serve(manager, n)
        for name in ("host", "disk"):
            found = manager.tier_metrics[name]
            assert (found.hits, found.misses) == (5 * PAGES, 15 * PAGES)
            assert found.tokens == 5 * PAGES * 4
        manager.reset_metrics()
        serve(manager, 100)
        found = manager.tier_metrics["disk"]
        assert (found.hits, found.misses, found.bytes_out) == (0, PAGES, 0)


def test_a_host_tier_counts_what_it_does_not_have() -> None:
    with tiered_manager("host:1MiB", num_pages=12) as manager:
        for n in (0, 1, 2, 0, 1, 3):
            serve(manager, n)
        found = manager.tier_metrics["host"]
        assert (found.hits, found.misses) == (2 * PAGES, 4 * PAGES)


def test_a_store_lacks_what_those_below_it_have() -> None:
    below = DictStore()
    with tiered_manager(below, num_pages=40) as manager:
        serve(manager, 0)
        assert manager.flush(timeout=60)
    with tiered_manager(MemoryStore(1 << 22), below, num_pages=40) as manager:
        serve(manager, 0)
        serve(manager, 1)
        found = {name: (each.hits, each.misses) for name, each in manager.tier_metrics.items()}
        assert found == {
            "host": (PAGES, PAGES),
            "memorystore": (0, 2 * PAGES),
            "dictstore": (PAGES, PAGES),
        }


@pytest.mark.parametrize("is_async", [True, False])
def test_pages_that_come_later_are_no_misses(is_async: bool) -> None:
    store = DictStore()
    with tiered_manager(store, num_pages=40) as manager:
        serve(manager, 0)
        assert manager.flush(timeout=60)
    options: dict[str, Any] = {"async_onload": is_async, "params": moving_params()}
    with tiered_manager(store, num_pages=40, **options) as manager:
        serve(manager, 0)
        found = manager.tier_metrics["dictstore"]
        assert (found.hits, found.misses) == (PAGES, 0)
