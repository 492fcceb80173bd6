# SPDX-License-Identifier: Apache-2.0
"""CacheManager, the building block: bounds of reservations, held pages, forgotten pages."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

import kvcore
from kvcore import CacheManager
from kvcore._core import SequenceHandle

PROMPT = list(range(12))


def make(**options: Any) -> CacheManager:
    sizes = {"num_blocks": 8, "page_size": 2, "max_sequences": 4, "max_seq_len": 16}
    return CacheManager(**sizes | options)


def run(manager: CacheManager, tokens: list[int]) -> SequenceHandle:
    """Return a sequence that has written all of its tokens."""
    sequence = manager.claim()
    assert manager.reserve(sequence, tokens)[0]
    manager.commit(sequence, tokens, len(tokens))
    return sequence


def test_a_hit_is_bounded() -> None:
    manager = make(num_blocks=64)
    manager.release(run(manager, PROMPT))
    for most in range(14):
        sequence = manager.claim()
        plan = manager.plan(sequence, PROMPT, max_hit=most)
        fits, start, _ = manager.reserve(sequence, PROMPT, max_hit=most)
        assert (fits, start, plan.hit_tokens) == (True, min(most, 11), min(most, 11))
        manager.release(sequence)
    with pytest.raises(ValueError, match="max_hit"):
        manager.reserve(manager.claim(), PROMPT, max_hit=-1)


def test_a_refusal_for_what_is_to_stay_free_evicts_nothing() -> None:
    manager = make(reserve_chunks=True)
    manager.release(run(manager, PROMPT))
    sequence = manager.claim()
    other = [50 + i for i in range(6)]
    before = repr(manager)
    refused: list[dict[str, Any]] = [
        {"keep_free": 6},
        {"must_fit": 16, "keep_free": 1},
        {"keep_free": 2**62},
    ]
    for bounds in (*refused, {"keep_free": 2**62}):
        assert not manager.plan(sequence, other, **bounds).fits
        assert manager.reserve(sequence, other, **bounds) == (False, 0, 6)
        assert (repr(manager), manager.metrics.evicted_pages) == (before, 0)
    with pytest.raises(kvcore.CapacityError):
        manager.reserve(sequence, other, must_fit=17)
    with pytest.raises(ValueError, match="keep_free"):
        manager.plan(sequence, other, keep_free=-1)
    with pytest.raises(ValueError, match="must_fit"):
        manager.plan(sequence, other, must_fit=-1)
    assert manager.reserve(sequence, other, active=2, keep_free=5, must_fit=6)[0]
    assert manager.stats().available_pages == 7
    manager.check_integrity()


def test_pages_from_one_on() -> None:
    manager = make(first_page=3)
    sequence = run(manager, PROMPT)
    pages = manager.pages_of(sequence).tolist()
    assert min(pages) >= 3
    for first in range(8):
        assert manager.pages_of(sequence, first=first).tolist() == pages[first:]
    with pytest.raises(ValueError, match="first"):
        manager.pages_of(sequence, first=-1)


def test_held_pages_are_not_handed_out() -> None:
    manager = make()
    sequence = run(manager, PROMPT)
    pages = manager.pages_of(sequence)[1:3]
    held = manager.hold(pages)
    assert (len(held), held.pages.tolist()) == (2, pages.tolist())
    manager.release(sequence)
    other = manager.claim()
    assert manager.reserve(other, [50 + i for i in range(10)])[0]
    assert not {*pages.tolist()} & {*manager.pages_of(other).tolist()}
    assert not manager.reserve(other, [50 + i for i in range(12)])[0]
    held.let_go()
    with pytest.raises(kvcore.InvalidHandleError):
        held.let_go()
    assert manager.reserve(other, [50 + i for i in range(12)])[0]
    manager.check_integrity()


def test_held_pages_do_not_come_back_with_a_longer_hit() -> None:
    manager = make(num_blocks=12, page_size=1, max_seq_len=64, partial_page_reuse=0)
    sequence = manager.claim()
    assert manager.reserve(sequence, PROMPT[:6])[0]
    pages = manager.pages_of(sequence)
    manager.release(run(manager, PROMPT[:5]))  # caches the same prefix: 1 page is free
    prompt = PROMPT[:9]  # a hit of 5 pages, and 3 more
    with manager.hold(pages):
        plan = manager.plan(sequence, prompt)
        assert (plan.hit_tokens, plan.fits) == (5, False)
        assert manager.reserve(sequence, prompt) == (False, 0, 9)
        assert manager.pages_of(sequence).tolist() == pages.tolist()
        manager.check_integrity()
    assert manager.reserve(sequence, prompt) == (True, 5, 9)
    manager.check_integrity()


def test_a_hold_ends_with_its_block_or_its_object() -> None:
    manager = make()
    manager.release(run(manager, PROMPT))
    pages = manager.match(PROMPT)[1]
    with manager.hold(pages) as held:
        assert manager.stats().available_pages == 2
        assert len(held) == 6
    assert manager.stats().available_pages == 8
    with manager.hold(pages[:1]) as held:
        held.let_go()
    kept = manager.hold(pages.tolist())
    assert manager.stats().available_pages == 2
    del kept
    gc.collect()
    assert manager.stats().available_pages == 8
    held = make().hold([])  # keeps its manager alive
    gc.collect()
    held.let_go()


@pytest.mark.parametrize("pages", [[-1], [8], [0, 2**31 - 1]])
def test_ids_of_no_page_change_nothing(pages: list[int]) -> None:
    manager = make()
    manager.release(run(manager, PROMPT))
    before = repr(manager)
    for verb in (manager.hold, manager.forget):
        with pytest.raises(kvcore.InvalidHandleError):
            verb(pages)
        with pytest.raises(IndexError):
            verb([0], 1)
        with pytest.raises(TypeError):
            verb("0")  # type: ignore[arg-type]
    assert repr(manager) == before


def test_forgotten_pages_are_run_again() -> None:
    manager = make()
    sequence = run(manager, PROMPT)
    pages = manager.pages_of(sequence)
    assert manager.forget(pages[2:3]) == 4
    assert manager.match(PROMPT)[0] == 4
    assert manager.pages_of(sequence).tolist() == pages.tolist()
    manager.commit(sequence, PROMPT, len(PROMPT))
    assert manager.match(PROMPT)[0] == 4
    manager.release(sequence)
    assert manager.stats().available_pages == 8
    assert manager.forget(manager.match(PROMPT)[1]) == 2
    manager.check_integrity()


def test_a_reservation_does_what_was_planned() -> None:
    """With random bounds, "no" changes nothing, and "yes" keeps its promise."""
    rng = random.Random(3)
    said = {True: 0, False: 0}
    for _ in range(60):
        manager = make(num_blocks=rng.randrange(12, 20), max_seq_len=24)
        live: dict[SequenceHandle, list[int]] = {}
        for _ in range(40):
            if len(live) == 4:
                manager.release(live.popitem()[0])
            sequence = manager.claim()
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            active = rng.randrange(1, len(tokens) + 1)
            bounds: dict[str, Any] = {
                "max_hit": rng.choice((None, *range(8))),
                "keep_free": rng.randrange(6),
                "must_fit": rng.choice((None, *range(24))),
            }
            plan = manager.plan(sequence, tokens, active=active, **bounds)
            before, evicted = repr(manager), manager.metrics.evicted_pages
            fits, start, _ = manager.reserve(sequence, tokens, active=active, **bounds)
            said[fits] += 1
            assert fits == plan.fits
            if not fits:
                assert (repr(manager), manager.metrics.evicted_pages) == (before, evicted)
                manager.release(sequence)
                continue
            assert start == plan.hit_tokens
            assert manager.metrics.evicted_pages == evicted + plan.evicted_pages
            free = manager.stats().available_pages
            ahead = -(-(bounds["must_fit"] or 0) // 2) - len(manager.pages_of(sequence))
            assert free >= bounds["keep_free"] + max(ahead, 0)
            manager.take_copies()
            manager.commit(sequence, tokens, max(start, active))
            manager.check_integrity()
            live[sequence] = tokens
    assert min(said.values()) > 300, said
