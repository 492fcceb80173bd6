# SPDX-License-Identifier: Apache-2.0
"""Truncated tokens: rejected drafts, pages reserved ahead, committed pages and shared pages."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from families import Manager, family, forks, pages_of
from foreign_context import Context
from written_pool import WrittenPool

PROMPT, DRAFTS = 11, 5
POOLS = pytest.mark.parametrize("blocks", [None, "allocate"])


def drafted(page_size: int, **rest: Any) -> tuple[Manager, WrittenPool, Any]:
    """Return a request whose prompt is committed, and whose draft tokens have run."""
    manager = make_manager(page_size, 64, **rest)
    pool = WrittenPool(manager)
    context = claimed(manager, range(PROMPT))
    pool.run([context], sampled=50)
    context.extend([*range(60, 60 + DRAFTS - 1)])
    pool.forward([context])
    assert context.end_idx == PROMPT + DRAFTS
    return manager, pool, context


def set_back(manager: Manager, context: Any, n: int) -> None:
    manager.truncate(context.request_id, n)
    if n > 0:
        context.rewind(n)


# -- every place to cut ----------------------------------------------------------------------------
@POOLS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", range(PROMPT + DRAFTS + 1))
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_behind_the_cut_are_free_and_the_next_write_copies(
    page_size: int, n: int, caching: bool, blocks: Any
) -> None:
    manager, pool, context = drafted(page_size, caching=caching, blocks=blocks)
    whole, left = PROMPT // page_size * caching, -(-n // page_size)
    before, metrics = pages_of(manager, context), manager.metrics
    set_back(manager, context, n)
    assert pages_of(manager, context) == before[:left]
    assert manager.num_free_blocks == 64 - left
    assert manager.metrics == metrics
    assert manager.match_prefix(list(range(PROMPT))) == whole * page_size
    if n == 0:
        context.rewind(1)
    first, begun = divmod(max(0, n - 1), page_size)  # the last token runs again at this place
    assert manager.plan(context).new_pages == int(n == 0 or first < whole)
    pool.run([context], sampled=70)
    copies = n > 0 and first < whole and begun > 0
    assert pool.num_copies == (copies and blocks is None)
    for token in range(80, 90):
        pool.run([context], sampled=token)
    assert pages_of(manager, context)[: min(first, whole)] == before[: min(first, whole)]
    assert manager.match_prefix(list(range(PROMPT))) == whole * page_size
    manager.release(context.request_id)
    assert manager.num_free_blocks == 64


@POOLS
@pytest.mark.parametrize("n", range(1, 13))
def test_shared_pages_stay_what_they_were_for_the_others(n: int, blocks: Any) -> None:
    manager = make_manager(4, 64, blocks=blocks)
    pool = WrittenPool(manager)
    rows = []
    for _ in range(2):
        rows.append(claimed(manager, range(12)))
        pool.run(rows, sampled=12)
    first, second = rows
    shared = pages_of(manager, second)[:2]
    set_back(manager, first, n)
    for token in range(100, 110):
        pool.run([first], sampled=token)
        pool.run([second], sampled=token)
    assert pages_of(manager, second)[:2] == shared
    assert manager.match_prefix(list(range(12))) == 12


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 7])
def test_pages_reserved_ahead_are_given_back(n: int) -> None:
    manager = make_manager(4, 16)
    context = prefilled(manager, range(6))
    assert manager.maybe_reserve(context, num_steps=30)
    assert manager.num_free_blocks == 16 - 9
    manager.fetch([context])
    manager.truncate(context.request_id, n)
    assert manager.num_free_blocks == 16 - -(-n // 4)


def test_truncation_to_where_it_stands_keeps_everything() -> None:
    manager = make_manager(4, 16)
    context = prefilled(manager, range(6))
    before = pages_of(manager, context)
    for _ in range(2):
        manager.truncate(context.request_id, 6)
    assert pages_of(manager, context) == before
    assert manager.plan(context).new_pages == 0


# -- bounds ----------------------------------------------------------------------------------------
def test_bound_is_the_end_of_the_chunk_fetched_last() -> None:
    manager = make_manager(4, 16)
    context = claimed(manager, range(20), active_idx=6)
    assert manager.maybe_reserve(context)
    with pytest.raises(ValueError, match=r"1 tokens, must be 0 \.\. 0"):
        manager.truncate(context.request_id, 1)
    manager.fetch([context])
    for refused in (-1, 7, 20):
        with pytest.raises(ValueError, match=rf"{refused} tokens, must be 0 \.\. 6"):
            manager.truncate(context.request_id, refused)
    manager.truncate(context.request_id, 6)


def test_all_steps_of_one_fetch_can_be_cut() -> None:
    manager = make_manager(4, 16)
    context = claimed(manager, range(6))
    manager.fetch([context], num_steps=4)
    for token in range(4):
        context.update(token)
    manager.step([context])
    assert context.start_idx == 9
    with pytest.raises(ValueError, match=r"cannot be truncated to 10 tokens, must be 0 \.\. 9"):
        manager.truncate(context.request_id, 10)
    set_back(manager, context, 8)
    assert len(pages_of(manager, context)) == 2


def test_reserved_request_can_be_truncated_to_nothing() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(8))
    context = claimed(manager, range(10))
    assert manager.maybe_reserve(context)
    manager.truncate(context.request_id, 0)
    assert (pages_of(manager, context), manager.num_free_blocks) == ([], 16)
    assert manager.plan(context).fits
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    manager.fetch([context])


def test_request_cut_to_nothing_starts_anew_wherever_its_context_stands() -> None:
    manager = make_manager(4, 16)
    rows = [prefilled(manager, range(6)) for _ in range(2)]
    for row in rows:
        manager.truncate(row.request_id, 0)
    assert manager.maybe_reserve(rows[0])
    (entry,) = manager.fetch(rows)
    assert entry.cache_lengths.tolist() == [0, 0]
    assert [row.start_idx for row in rows] == [0, 0]


# -- memory ----------------------------------------------------------------------------------------
def test_cut_into_a_committed_page_needs_one_to_copy_to() -> None:
    manager = make_manager(4, 4)
    context = prefilled(manager, range(8))
    filler = claimed(manager, range(100, 108))
    assert manager.maybe_reserve(filler)
    set_back(manager, context, 6)
    before = pages_of(manager, context)
    assert not manager.plan(context).fits
    assert manager.maybe_reserve(context) is False
    with pytest.raises(kvcore.InsufficientBlocksError):
        manager.fetch([context])
    assert pages_of(manager, context) == before
    manager.truncate(filler.request_id, 0)
    assert manager.plan(context).new_pages == 1
    manager.fetch([context])


def test_pages_of_a_cut_are_cached_until_they_are_needed() -> None:
    manager = make_manager(4, 4)
    context = prefilled(manager, range(16))
    set_back(manager, context, 4)
    assert manager.num_free_blocks == 3
    assert manager.match_prefix(list(range(16))) == 16
    other = claimed(manager, range(50, 62))
    assert manager.maybe_reserve(other)
    assert manager.match_prefix(list(range(16))) == 4


def test_copy_into_a_page_cut_off_is_not_owed() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(12))
    parent = claimed(manager, [*range(10), 50])
    assert manager.maybe_reserve(parent)
    manager.truncate(parent.request_id, 0)
    assert len(manager.take_copies()) == 0


def test_copy_into_a_page_cut_off_is_owed_to_a_fork() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(12))
    parent = claimed(manager, [*range(10), 50])
    assert manager.maybe_reserve(parent)
    (child,) = forks(manager, parent)
    manager.truncate(parent.request_id, 3)
    ((_, _, target, tokens),) = manager.take_copies().tolist()
    assert (target, tokens) == (pages_of(manager, child)[2], 2)


# -- with forks ------------------------------------------------------------------------------------
@POOLS
@pytest.mark.parametrize("n", range(1, 12))
def test_truncation_then_fork(n: int, blocks: Any) -> None:
    manager, pool, context = drafted(4, blocks=blocks)
    set_back(manager, context, n)
    child = make_context([*context.tokens[: context.start_idx].tolist(), 200])
    manager.fork(context.request_id, child)
    assert child.start_idx == n - 1
    for token in range(5):
        pool.run([child, context], sampled=token)
    manager.release(context.request_id)
    pool.run([child])


@POOLS
@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("n", range(7))
def test_fork_then_truncation(n: int, who: int, blocks: Any) -> None:
    manager, pool, rows = family(16, count=2, blocks=blocks)
    assert manager.num_free_blocks == 14
    set_back(manager, rows[who], n)
    assert manager.num_free_blocks == 14
    for row in rows[:who] + rows[who + 1 :]:
        pool.check(row)
    if n == 0:
        rows[who].rewind(1)
    for token in range(5):
        for row in rows:
            assert manager.plan(row).fits
        pool.run(rows, sampled=token)
    for row in rows:
        manager.release(row.request_id)
    assert manager.num_free_blocks == 16


def test_last_holder_of_a_page_that_the_others_cut_off_writes_in_place() -> None:
    manager, pool, (parent, *children) = family(4, count=2)
    for child in children:
        set_back(manager, child, 4)
    assert manager.plan(parent).new_pages == 0
    before = pages_of(manager, parent)
    pool.run([parent])
    assert pages_of(manager, parent) == before


def test_fork_has_what_is_left_of_its_parent() -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(12), sampled=12)
    manager.truncate(parent.request_id, 6)
    child = make_context([*range(6), 70])
    manager.fork(parent.request_id, child)  # works with or without a rewind of the parent
    assert child.start_idx == 6
    assert pages_of(manager, child) == pages_of(manager, parent)


def test_kept_pages_are_cut_too() -> None:
    manager = make_manager(4, 16, dedup=False, blocks="allocate")
    pool = WrittenPool(manager)
    twins = [claimed(manager, range(8)) for _ in range(2)]
    pool.run(twins)
    assert manager.num_free_blocks == 12
    set_back(manager, twins[1], 3)
    assert manager.num_free_blocks == 13
    kept = pages_of(manager, twins[1])
    # No other request reads its duplicate of the cached page
    assert manager.plan(twins[1]).new_pages == 0
    for token in range(5):
        pool.run(twins, sampled=token)
    assert pages_of(manager, twins[1])[0] == kept[0]
    for row in twins:
        manager.release(row.request_id)
    assert manager.num_free_blocks == 16


# -- speculative decoding --------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_speculative_decoding(page_size: int, foreign: bool, forked: bool) -> None:
    """Some drafts are accepted, in pages that forks share and the cache keeps."""
    draw = random.Random(page_size)
    manager = make_manager(page_size, 160 // page_size + 40, blocks="allocate")
    pool = WrittenPool(manager)
    kind = Context if foreign else kvcore.TextGenerationContext
    rows: list[Any] = [kind(name, [*range(10), name]) for name in range(3)]
    for row in rows:
        manager.external_claim(row.request_id)
    pool.run(rows)
    if forked:
        rows.append(kind("child", [*rows[0].tokens[: rows[0].start_idx].tolist(), 7]))
        manager.fork(0, rows[3])
    for _ in range(12):
        for row in rows:
            row.extend([draw.randrange(3) for _ in range(draw.randint(1, 6))])
        pool.forward(rows)
        for row in rows:
            accepted = draw.randint(row.start_idx + 1, row.end_idx)
            manager.truncate(row.request_id, accepted)
            row.rewind(accepted)
            assert len(pages_of(manager, row)) == -(-accepted // page_size)
            row.update(draw.randrange(3))
            assert (row.start_idx, row.active_idx) == (accepted, accepted + 1)
        manager.step(rows)
        for row in rows:
            pool.check(row)
            assert manager.match_prefix(row.tokens) >= row.start_idx // page_size * page_size
    for row in rows:
        manager.release(row.request_id)
    assert manager.num_free_blocks == manager.total_num_pages


def test_replicas_are_cut_apart() -> None:
    manager = make_manager(4, 8, replicas=2, blocks="allocate")
    pool = WrittenPool(manager)
    rows = [claimed(manager, range(10), replica_idx=r) for r in range(2)]
    pool.run(rows)
    set_back(manager, rows[1], 2)
    assert manager.num_free_blocks == 16 - 3 - 1
    pool.run(rows)
    assert manager.match_prefix(list(range(8)), replica_idx=1) == 8
