# SPDX-License-Identifier: Apache-2.0
"""Requests that continue from another request's tokens: shared pages, copied on write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from families import family, forks, pages_of
from foreign_context import Context
from written_pool import WrittenPool


# -- pages of a fork -------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 128])
@pytest.mark.parametrize("written", [1, 2, 3, 4, 5, 6, 8, 12])
def test_child_holds_the_written_pages_of_its_parent(page_size: int, written: int) -> None:
    manager = make_manager(page_size, 16)
    parent = prefilled(manager, range(written))
    before = manager.num_free_blocks, manager.metrics
    (child,) = forks(manager, parent)
    assert (manager.num_free_blocks, manager.metrics) == before
    assert (child.start_idx, child.active_idx, child.end_idx) == (
        (written, written + 1, written + 1)
    )
    assert pages_of(manager, child) == pages_of(manager, parent)[: -(-written // page_size)]
    assert manager.get_replica(child) == 0
    assert manager.contains(child.request_id)


@pytest.mark.parametrize("moment", ["fetched", "updated", "extended"])
def test_written_is_what_the_last_step_saw(moment: str) -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(5), sampled=5)
    manager.fetch([parent])
    if moment == "updated":
        parent.update(6)
    elif moment == "extended":
        parent.extend([6, 7])
    child = make_context([*range(5), 99])
    manager.fork(parent.request_id, child)
    assert child.start_idx == 5
    if moment == "updated":
        manager.step([parent])
        later = make_context([*range(6), 99])
        manager.fork(parent.request_id, later)
        assert later.start_idx == 6


def test_pages_reserved_ahead_are_not_shared() -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(6))
    assert manager.maybe_reserve(parent, num_steps=20)
    (child,) = forks(manager, parent)
    assert pages_of(manager, child) == pages_of(manager, parent)[:2]


def test_hit_that_was_reserved_counts_as_written() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(12))
    parent = claimed(manager, [*range(8), 50])
    assert manager.maybe_reserve(parent)
    child = make_context([*range(8), 60])
    manager.fork(parent.request_id, child)
    assert child.start_idx == 8
    assert pages_of(manager, child) == pages_of(manager, parent)[:2]


@pytest.mark.parametrize("reserved", [False, True])
def test_fork_of_a_parent_that_has_written_nothing_is_a_claim(reserved: bool) -> None:
    manager = make_manager(4, 16)
    parent = claimed(manager, range(9))
    if reserved:
        assert manager.maybe_reserve(parent)
    put_in_cache(manager, range(50, 58))
    child = make_context(range(50, 60))
    manager.fork(parent.request_id, child)
    assert (child.start_idx, child.active_idx, pages_of(manager, child)) == (0, 10, [])
    assert manager.maybe_reserve(child)
    assert child.start_idx == 8


@pytest.mark.parametrize(
    ("given", "becomes"), [(1, 9), (5, 9), (6, 9), (7, 7), (8, 8), (9, 9), (None, 9)]
)
@pytest.mark.parametrize("kind", [make_context, Context])
def test_active_idx_stays_behind_what_is_written(given: Any, becomes: int, kind: Any) -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(6))
    ids = [*range(6), 70, 71, 72]
    child = (
        Context("child", ids, active_idx=given)
        if kind is Context
        else make_context(ids, active_idx=given)
    )
    manager.fork(parent.request_id, child)
    assert (child.start_idx, child.active_idx, child.end_idx) == (6, becomes, 9)
    (entry,) = manager.fetch([child])
    assert entry.cache_lengths.tolist() == [6]


def test_no_children_is_no_error() -> None:
    manager = make_manager()
    parent = prefilled(manager, range(6))
    manager.fork(parent.request_id)
    with pytest.raises(kvcore.RequestNotFoundError):
        manager.fork("nobody")


# -- copy on write ---------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", [None, "allocate"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_who_writes_first_copies_and_the_last_writes_in_place(order: Any, blocks: Any) -> None:
    manager, pool, rows = family(16, count=2, blocks=blocks)
    shared = pages_of(manager, rows[0])
    for turn, index in enumerate(order):
        row, free = rows[index], manager.num_free_blocks
        plan = manager.plan(row)
        assert (plan.new_pages, plan.copied_tokens, plan.fits) == (int(turn < 2), 0, True)
        pool.run([row], sampled=20 + index)
        pages = pages_of(manager, row)
        assert manager.num_free_blocks == free - int(turn < 2)
        assert pages[0] == shared[0]
        assert (pages[1] == shared[1]) is (turn == 2)
    assert pool.num_copies == (2 if blocks is None else 0)
    assert manager.metrics.copied_tokens == 0
    for row in rows:
        pool.check(row)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_copies_owed_name_the_written_start_of_the_page(order: Any) -> None:
    manager, _, rows = family(16, prompt=7, count=2)
    shared = pages_of(manager, rows[0])[1]
    manager.fetch([rows[index] for index in order])
    assert manager.take_copies().tolist() == [
        [0, shared, pages_of(manager, rows[index])[1], 3] for index in order[:2]
    ]
    assert len(manager.take_copies()) == 0


@pytest.mark.parametrize("blocks", [None, "allocate"])
def test_fork_at_the_end_of_a_page_copies_nothing(blocks: Any) -> None:
    manager, pool, rows = family(16, prompt=8, count=2, blocks=blocks)
    pool.run(rows)
    assert manager.num_free_blocks == 16 - 2 - 3
    assert {tuple(pages_of(manager, row)[:2]) for row in rows} == {(0, 1)}
    assert pool.num_copies == 0


@pytest.mark.parametrize("blocks", [None, "allocate"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_batch_of_the_whole_family_needs_a_page_per_child(
    count: int, caching: bool, blocks: Any
) -> None:
    """Each child needs exactly one page, with any copies: the last request keeps the old page."""
    manager, pool, rows = family(2 + count, count=count, blocks=blocks, caching=caching)
    assert manager.num_free_blocks == count
    pool.run(rows[::-1])
    assert manager.num_free_blocks == 0
    assert len({pages_of(manager, row)[1] for row in rows}) == count + 1
    for row in rows:
        pool.check(row)


@pytest.mark.parametrize("blocks", [None, "allocate"])
@pytest.mark.parametrize("verb", ["fetch", "maybe_reserve_batch"])
def test_one_page_too_few_for_the_family(verb: str, blocks: Any) -> None:
    manager, _, rows = family(4, count=3, blocks=blocks)
    before = manager.num_free_blocks, manager.metrics, [pages_of(manager, row) for row in rows]
    if verb == "fetch":
        with pytest.raises(kvcore.InsufficientBlocksError, match=r"needs 1 .* 0 of 4"):
            manager.fetch(rows)
        after = manager.num_free_blocks, manager.metrics, [pages_of(manager, row) for row in rows]
        assert after == before
        assert len(manager.take_copies()) == 0
    else:
        assert manager.maybe_reserve_batch(rows) == 2
    manager.release(rows[3].request_id)
    manager.fetch(rows[:3])


@pytest.mark.parametrize("blocks", [None, "allocate"])
def test_copies_evict_what_is_cached(blocks: Any) -> None:
    manager = make_manager(4, 5, blocks=blocks)
    put_in_cache(manager, range(500, 512))
    pool = WrittenPool(manager)
    parent = claimed(manager, range(6))
    pool.run([parent])
    rows = [parent, *forks(manager, parent, 3)]
    assert manager.plan(rows[1]).evicted_pages == 1
    pool.run(rows)
    assert manager.metrics.evicted_pages == 3
    assert manager.match_prefix(list(range(500, 512))) == 0


def test_what_was_reserved_may_fail_once_it_is_forked() -> None:
    manager, _, (parent, child) = family(3)
    other = claimed(manager, [7])
    assert manager.maybe_reserve(other)
    assert not manager.plan(parent).fits
    assert manager.maybe_reserve(parent) is False
    with pytest.raises(kvcore.InsufficientBlocksError):
        manager.fetch([parent])
    manager.release(child.request_id)
    assert manager.plan(parent).new_pages == 0
    manager.fetch([parent])


def test_whole_family_sees_what_it_wrote_for_many_steps() -> None:
    manager, pool, rows = family(40, prompt=5, count=3, blocks="allocate")
    for turn in range(12):
        for row in rows:
            assert manager.plan(row).fits
        pool.run(rows[turn % 3 :] + rows[: turn % 3], sampled=turn)
        rows[turn % 4].rewind(rows[turn % 4].end_idx - turn % 2)
    for row in rows:
        manager.release(row.request_id)
    assert manager.num_free_blocks == 40


# -- generations -----------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", [None, "allocate"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_forks_of_forks_outlive_each_other(order: Any, blocks: Any) -> None:
    manager, pool, rows = family(24, prompt=5, blocks=blocks)
    rows += forks(manager, rows[1])  # forks a fork that has written no token itself
    pool.run([rows[2]], sampled=4)
    rows += forks(manager, rows[2])
    left = list(rows)
    for index in order:
        manager.release(rows[index].request_id)
        left.remove(rows[index])
        pool.run(left, sampled=index)
    assert manager.num_free_blocks == 24


@pytest.mark.parametrize("who", [0, 1])
def test_page_goes_back_when_its_last_holder_leaves(who: int) -> None:
    manager, _, rows = family(8, prompt=6, caching=False)
    assert manager.num_free_blocks == 6
    manager.release(rows[who].request_id)
    assert manager.num_free_blocks == 6
    manager.release(rows[1 - who].request_id)
    assert manager.num_free_blocks == 8


def test_name_of_a_released_child_can_be_used_again() -> None:
    manager, _, (parent, child) = family(8)
    manager.release(child.request_id)
    again = make_context([*range(6), 5], child.request_id)
    manager.fork(parent.request_id, again)
    assert pages_of(manager, again) == pages_of(manager, parent)
