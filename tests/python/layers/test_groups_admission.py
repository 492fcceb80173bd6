# SPDX-License-Identifier: Apache-2.0
"""Reservations when layers do not all keep every token, and requests that could never fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grouped_traffic import manager_of, params_of
from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow
from kvcore.scheduler import Request, Scheduler
from kvcore.sizing import pages_per_sequence
from state_model import prompt, state_manager, state_params

FULL = FullAttention([0])
KINDS: dict[str, tuple[Any, ...]] = {
    "window": (FULL, SlidingWindow([1], 6)),
    "window alone": (SlidingWindow([0, 1], 6),),
    "chunk": (FULL, ChunkedLocal([1], 8)),
    "chunk across pages": (FULL, ChunkedLocal([1], 7)),
    "chunk alone": (ChunkedLocal([0], 7),),
    "both": (FULL, ChunkedLocal([1], 8), SlidingWindow([2], 6)),
    "other heads": (FullAttention([0], n_kv_heads=1), SlidingWindow([1], 9, n_kv_heads=2)),
}


def run_token_by_token(manager: PagedKVCacheManager, n: int) -> int | None:
    """Run a prompt in the shortest chunks; return its peak page count, or None if it is stuck."""
    context = TextGenerationContext("a", list(range(n)), active_idx=1)
    manager.claim("a")
    most = 0
    while True:
        if not manager.reserve(context):
            return None
        most = max(most, manager.total_num_pages - manager.num_free_blocks)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
        if context.start_idx == n:
            return most
        context.active_idx = context.start_idx + 1


def refusal_of(manager: PagedKVCacheManager, n: int) -> str:
    context = TextGenerationContext("a", list(range(n)), active_idx=1)
    manager.claim("a")
    assert not manager.plan(context).fits
    with pytest.raises(
        CapacityError,
        match=r"tokens need .* pages, more than the whole pool of .*; give the pool more memory",
    ) as caught:
        manager.reserve(context)
    assert manager.num_free_blocks == manager.total_num_pages
    return str(caught.value)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("by_chunk", [False, True])
@pytest.mark.parametrize("page", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_admitted_can_be_run_and_what_never_fits_is_refused(
    kind: str, page: int, by_chunk: bool, drafts: int
) -> None:
    """The first reserve refuses a request exactly if no chunk is short enough."""
    params = params_of(*KINDS[kind], page_size=page)
    options: dict[str, Any] = {"reserve_chunks": by_chunk, "max_draft_tokens": drafts}
    options |= {"blocks": None, "enable_runtime_checks": False}
    for n in (1, 4, 5, 8, 9, 13, 17, 30):
        needed = run_token_by_token(manager_of(params, **options), n)
        assert needed is not None
        assert needed <= pages_per_sequence(params, n, 1 + drafts)  # the count of sizing
        assert run_token_by_token(manager_of(params, needed, **options), n) == needed, n
        if needed > 1:
            text = refusal_of(manager_of(params, needed - 1, **options), n)
            told = rf"{n} tokens need {needed} pages, more than the whole pool of {needed - 1}"
            assert re.search(told, text), text


def test_one_request_alone_is_never_preempted_for_ever() -> None:
    """A scheduler can serve every request that it admits, however small the pool is."""
    params = params_of(FULL, SlidingWindow([1], 6), page_size=4)
    for pages in range(1, 14):
        scheduler = Scheduler(manager_of(params, pages, blocks=None), max_batch_tokens=1)
        try:
            scheduler.add(Request(TextGenerationContext("a", list(range(20))), 2))
        except CapacityError:
            assert pages < 9  # 21 tokens: 6 columns, and 3 of the window
            continue
        batch = scheduler.next_batch()
        steps = 0
        while batch is not None:
            assert not batch.preempted
            scheduler.update(batch, [7] * len(batch.requests))
            batch = scheduler.next_batch()
            steps += 1
        assert steps == 21


def held(manager: PagedKVCacheManager, name: str) -> list[int]:
    """Return the request's number of pages in each bundle."""
    none = manager.total_num_pages
    tables = [manager.get_req_blocks(name, bundle) for bundle in range(2)]
    return [sum(page < none for page in table) for table in tables]


@pytest.mark.parametrize("group", [SlidingWindow([1], 8), ChunkedLocal([1], 8)])
def test_windows_are_reserved_for_the_chunk_and_the_steps_ahead(group: Any) -> None:
    manager = manager_of(params_of(FULL, group, page_size=4))
    context = TextGenerationContext("a", list(range(40)), active_idx=10)
    manager.claim("a")
    assert manager.reserve(context)
    assert held(manager, "a") == [10, 3]
    assert manager.reserve(context, num_steps=4)  # 43 tokens in full pages, 10 + 3 in window pages
    assert held(manager, "a") == [11, 4]
    table = manager.get_req_blocks("a", 1)
    assert table[4:] == [manager.total_num_pages] * 7
    with_chunks = manager_of(params_of(FULL, group, page_size=4), reserve_chunks=True)
    with_chunks.claim("a")
    assert with_chunks.reserve(context, num_steps=4)
    assert held(with_chunks, "a") == [4, 4]


def test_reserve_chunks_reserves_by_the_chunk_without_groups_too() -> None:
    params = KVCacheParams("float32", 1, 4, 1, page_size=4)
    for by_chunk, pages in ((False, 10), (True, 3)):
        manager = manager_of(params, reserve_chunks=by_chunk)
        context = TextGenerationContext("a", list(range(40)), active_idx=10)
        manager.claim("a")
        assert manager.plan(context).new_pages == pages
        assert manager.reserve(context)
        assert len(manager.get_req_blocks("a")) == pages


def test_a_later_chunk_may_be_told_no_and_nothing_changes() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)), num_pages=16)
    first = TextGenerationContext("a", list(range(10)), active_idx=2)
    other = TextGenerationContext("b", list(range(100, 106)), active_idx=2)
    for context in (first, other):
        manager.claim(context.request_id)
        manager.fetch([context])  # 5 + 1 and 3 + 1 pages
        context.update(7)
        manager.step([context])
    manager.fetch([other])
    manager.claim("c")
    assert manager.reserve(TextGenerationContext("c", [1]))
    before = held(manager, "a"), manager.num_free_blocks, manager.metrics
    assert before[:2] == ([5, 1], 2)
    first.active_idx = 10
    assert not manager.plan(first).fits
    assert not manager.reserve(first)
    assert (held(manager, "a"), manager.num_free_blocks, manager.metrics) == before
    assert (first.start_idx, first.active_idx) == (2, 10)
    manager.release("b")  # preempts the other request
    assert manager.reserve(first)
    assert held(manager, "a") == [5, 5]


def test_a_batch_that_is_refused_has_reserved_nothing() -> None:
    """The pool, pages, a slot or a checkpoint is missing for its second request."""
    windows = manager_of(params_of(FULL, SlidingWindow([1], 4)), num_pages=20)
    states = state_manager(state_params())
    few = state_manager(state_params(), num_states=4)
    pins = []
    for turn in range(3):
        done = TextGenerationContext("done", prompt((100 * turn, 9)))
        few.claim("done")
        while done.end_idx == 9:
            few.fetch([done])
            done.update(1)
            few.step([done])
        few.release("done")
        pins.append(few.pin(prompt((100 * turn, 9))))
    cases: list[tuple[PagedKVCacheManager, list[int], int, type[Exception], str]] = [
        (windows, [1] * 60, 1, CapacityError, "60 tokens need 33 pages"),
        (windows, [1] * 20, 1, InsufficientBlocksError, "needs 20 more pages"),
        (states, prompt((0, 14)), 2, ValueError, "num_steps is 2, must be 1"),
        (few, [1, 2], 1, InsufficientBlocksError, "needs a slot for its state"),
    ]
    for manager, tokens, steps, error, text in cases:
        batch = [TextGenerationContext("a", [1, 2, 3]), TextGenerationContext("b", tokens)]
        for context in batch:
            manager.claim(context.request_id)
        free, slots = manager.num_free_blocks, manager.state_metrics.used_slots
        manager.reset_metrics()
        metrics = manager.metrics
        with pytest.raises(error, match=rf"'b'.*{text}"):
            manager.fetch(batch, steps)
        if error is not InsufficientBlocksError:
            with pytest.raises(error, match=rf"'b'.*{text}"):
                manager.maybe_reserve_batch(batch, steps)
        assert (manager.num_free_blocks, manager.state_metrics.used_slots) == (free, slots)
        assert manager.metrics == metrics
        assert [(c.start_idx, c.active_idx) for c in batch] == [(0, 3), (0, len(tokens))]
        for context in batch:
            manager.release(context.request_id)
