# SPDX-License-Identifier: Apache-2.0
"""Bounds of reservations in small pools of page ids: a refusal changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager, prefilled, put_in_cache

PROMPT = list(range(12))


def state_of(manager: kvcore.PagedKVCacheManager) -> tuple[Any, ...]:
    """The pages of the pool, and the counters."""
    return repr(manager), manager.replica_metrics, manager.metrics


def test_a_refusal_for_pages_that_must_stay_free_evicts_nothing() -> None:
    manager = make_manager(2, 8, max_seq_len=16, reserve_chunks=True)
    put_in_cache(manager, PROMPT)
    tokens = [50 + i for i in range(6)]
    context = claimed(manager, tokens, active_idx=2)
    before = state_of(manager)
    refused: list[dict[str, Any]] = [
        {"keep_free": 8},
        {"must_fit": 16, "keep_free": 1},
        {"keep_free": 2**62},
    ]
    for bounds in (*refused, {"keep_free": 2**62}):
        assert not manager.plan(context, **bounds).fits
        assert not manager.reserve(context, **bounds)
        assert (context.start_idx, context.active_idx) == (0, 2)
        assert state_of(manager) == before
    with pytest.raises(kvcore.CapacityError):
        manager.reserve(context, must_fit=17)
    assert state_of(manager) == before
    assert manager.reserve(context, keep_free=5, must_fit=6)
    assert manager.num_free_blocks == 7


def test_held_pages_are_no_room_for_a_longer_hit() -> None:
    manager = make_manager(1, 12, max_seq_len=64, partial_page_reuse=False)
    context = claimed(manager, PROMPT[:9], active_idx=6)
    assert manager.reserve(claimed(manager, PROMPT[:6], request_id="short"))
    assert not manager.plan(context).hit_tokens
    pages = manager.get_req_blocks("short")
    manager.release(prefilled(manager, PROMPT[:5]).request_id)  # the same prefix is cached
    longer = kvcore.TextGenerationContext("short", PROMPT[:9])
    with manager.hold(pages):
        plan = manager.plan(longer)
        assert (plan.hit_tokens, plan.fits) == (5, False)
        assert not manager.reserve(longer)
        assert longer.start_idx == 0
        assert manager.get_req_blocks("short") == pages
    assert manager.reserve(longer)
    assert longer.start_idx == 5


@pytest.mark.parametrize("pages", [[-1], [8], [0, 2**31 - 1]])
def test_ids_of_no_page_change_nothing(pages: list[int]) -> None:
    manager = make_manager(2, 8)
    put_in_cache(manager, PROMPT)
    before = state_of(manager)
    for verb in (manager.hold, manager.forget):
        with pytest.raises(kvcore.InvalidHandleError):
            verb(pages)
        with pytest.raises(IndexError):
            verb([0], 1)
    assert state_of(manager) == before


def test_a_reservation_does_what_was_planned() -> None:
    """A refusal with random bounds changes nothing; a reservation matches its plan."""
    rng = random.Random(3)
    counts = {True: 0, False: 0}
    for _ in range(60):
        manager = make_manager(2, rng.randrange(12, 20), max_seq_len=24)
        live: list[kvcore.TextGenerationContext] = []
        for _ in range(40):
            if len(live) == 4:
                manager.release(live.pop().request_id)
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            context = claimed(manager, tokens, active_idx=rng.randrange(1, len(tokens) + 1))
            bounds: dict[str, Any] = {
                "max_hit": rng.choice((None, *range(8))),
                "keep_free": rng.randrange(6),
                "must_fit": rng.choice((None, *range(24))),
            }
            plan = manager.plan(context, **bounds)
            before, evicted = state_of(manager), manager.metrics.evicted_pages
            fits = manager.reserve(context, **bounds)
            counts[fits] += 1
            assert fits == plan.fits
            if not fits:
                assert state_of(manager) == before
                manager.release(context.request_id)
                continue
            assert context.start_idx == plan.hit_tokens
            assert manager.metrics.evicted_pages == evicted + plan.evicted_pages
            held = len(manager.get_req_blocks(context.request_id))
            ahead = -(-(bounds["must_fit"] or 0) // 2) - held
            assert manager.num_free_blocks >= bounds["keep_free"] + max(ahead, 0)
            manager.take_copies()
            manager.fetch([context])
            context.update(0)
            manager.step([context])
            live.append(context)
    assert min(counts.values()) > 300, counts
