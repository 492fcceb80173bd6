# SPDX-License-Identifier: Apache-2.0
"""A plan predicts exactly the evictions of its reservation, also with windows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

GROUPS: dict[str, Any] = {
    "window": [SlidingWindow([1], 8)],
    "full and window": [FullAttention([0]), SlidingWindow([1], 8)],
}


def prompt(rng: random.Random) -> list[int]:
    first = 100 * rng.randrange(4)
    tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
    return [*range(first, first + rng.randrange(4, 40)), *tail]


def decode(manager: PagedKVCacheManager, context: Any, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 7)):
        try:
            manager.fetch([context])
        except InsufficientBlocksError:
            return
        manager.take_copies()
        context.update(rng.randrange(1000))
        manager.step([context])


def evictions(manager: PagedKVCacheManager, seed: int) -> int:
    """Compare plans with reservations; return the number of reservations that evicted pages."""
    rng, live, found = random.Random(seed), list[int](), 0
    for name in range(60):
        while len(live) >= 3:
            manager.release(live.pop(rng.randrange(len(live))))
        context = TextGenerationContext(name, prompt(rng))
        plan, before = manager.plan(context), manager.metrics.evicted_pages
        manager.claim(name)
        live.append(name)
        try:
            fits = manager.maybe_reserve(context)
        except CapacityError:
            fits = False
        evicted = manager.metrics.evicted_pages - before
        assert (fits, evicted) == (plan.fits, plan.evicted_pages if plan.fits else 0), name
        manager.take_copies()
        found += evicted > 0
        if fits:
            decode(manager, context, rng)
    manager.check_integrity()
    return found


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_counts_what_a_reservation_evicts(kind: str, seed: int) -> None:
    params = KVCacheParams(
        "float32", 1, 8, 2, page_size=4, enable_prefix_caching=True, groups=GROUPS[kind]
    )
    pages = random.Random(seed).randrange(24, 60)
    manager = PagedKVCacheManager(params, 8, 128, num_pages=pages, blocks=None)
    assert evictions(manager, seed) > 10
