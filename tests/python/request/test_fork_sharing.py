# SPDX-License-Identifier: Apache-2.0
"""Forks with the prefix cache, other replicas, other contexts and other threads."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from families import family, forks, pages_of
from foreign_context import Context
from together import THREADS, run_together
from written_pool import WrittenPool


# -- forks and the cache ---------------------------------------------------------------------------
def test_page_that_a_fork_holds_is_cached_and_stays_with_the_fork() -> None:
    """The fork happens after the model ran: the parent's step fills a page that the child holds."""
    manager = make_manager(4, 4, blocks="allocate")
    pool = WrittenPool(manager)
    parent = claimed(manager, range(7))
    pool.run([parent], sampled=7)
    pool.forward([parent])
    child = make_context([*range(7), 99])
    manager.fork(parent.request_id, child)
    parent.update(8)
    manager.step([parent])
    assert manager.match_prefix(list(range(8))) == 8
    assert pages_of(manager, parent) == pages_of(manager, child)
    pool.check(parent)
    pool.run([child])
    pool.run([parent])
    assert manager.match_prefix(list(range(8))) == 8
    pool.check(child)


def test_page_of_a_fork_is_never_evicted() -> None:
    manager = make_manager(4, 4)
    parent = prefilled(manager, range(7), sampled=7)
    manager.fetch([parent])
    child = make_context([*range(7), 99])
    manager.fork(parent.request_id, child)
    parent.update(8)
    manager.step([parent])
    manager.release(parent.request_id)
    assert manager.num_free_blocks == 2
    greedy = claimed(manager, range(500, 512))
    assert manager.maybe_reserve(greedy) is False
    greedy.rewind(8)
    assert manager.maybe_reserve(greedy)
    assert not {*pages_of(manager, greedy)} & {*pages_of(manager, child)}


def test_equal_forks_end_up_in_the_same_pages() -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(6), sampled=6)
    child = make_context([*range(6), 6])
    manager.fork(parent.request_id, child)
    rows = [parent, child]
    for token in (7, 8):
        manager.fetch(rows)
        for row in rows:
            row.update(token)
        swaps = manager.step(rows).tolist()
    assert swaps == [[1, 1, pages_of(manager, parent)[1]]]
    assert pages_of(manager, child)[:2] == pages_of(manager, parent)[:2]


def test_fork_of_kept_pages_without_deduplication() -> None:
    manager = make_manager(4, 16, dedup=False, blocks="allocate")
    pool = WrittenPool(manager)
    twins = [claimed(manager, range(8)) for _ in range(2)]
    pool.run(twins)
    first, second = twins
    manager.release(first.request_id)
    assert not {*pages_of(manager, second)} & {
        *manager.match_prefix(list(range(8)), return_pages=True)[1].tolist()
    }
    (child,) = forks(manager, second)
    child.rewind(7)
    kept = pages_of(manager, second)
    assert manager.plan(child).new_pages == 1
    pool.run([child], sampled=70)
    assert pages_of(manager, child)[0] == kept[0] != pages_of(manager, child)[1]
    manager.release(second.request_id)
    pool.run([child])
    manager.release(child.request_id)
    assert manager.num_free_blocks == 16


def test_forks_stay_in_their_namespace() -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, range(6), extra_key="a", cache_salt="b")
    (child,) = forks(manager, parent, extra_key="a", cache_salt="b")
    manager.fetch([child])
    child.update(1)
    child.extend([2])
    manager.fetch([child])
    child.update(3)
    manager.step([child])
    assert manager.match_prefix(child.tokens, "a", "b") == 8
    assert manager.match_prefix(child.tokens) == 0


def test_part_of_a_page_that_a_fork_wrote_is_reused() -> None:
    manager, pool, (parent, child) = family(16, blocks="allocate")
    child.extend([11, 12])
    pool.run([child])
    third = claimed(manager, [*child.tokens[:8].tolist()[:7], 50, 51])
    pool.run([third])
    assert (manager.metrics.cache_tokens, manager.metrics.copied_tokens) == (7, 3)
    with manager.pin(child.tokens[:8]) as pinned:
        for row in (parent, child, third):
            manager.release(row.request_id)
        assert (pinned.num_tokens, manager.num_free_blocks) == (8, 14)
    assert manager.num_free_blocks == 16


# -- pending copies --------------------------------------------------------------------------------
def test_copy_owed_to_a_shared_page_outlives_the_parent() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(12))
    parent = claimed(manager, [*range(10), 50])
    assert manager.maybe_reserve(parent)
    (child,) = forks(manager, parent)
    (grandchild,) = forks(manager, child)
    source = manager.match_prefix(list(range(12)), return_pages=True)[1][2]
    owed = [0, source, pages_of(manager, child)[2], 2]
    manager.release(parent.request_id)
    assert manager.maybe_reserve(child)
    manager.release(child.request_id)
    assert manager.take_copies().tolist() == [owed]
    assert pages_of(manager, grandchild)[2] == owed[2]


# -- replicas, contexts, threads -------------------------------------------------------------------
def test_child_is_on_the_replica_of_its_parent() -> None:
    manager = make_manager(4, 8, replicas=3, blocks="allocate")
    pool = WrittenPool(manager)
    parent = claimed(manager, range(6), replica_idx=1)
    pool.run([parent])
    children = forks(manager, parent, 2)
    assert [manager.get_replica(child) for child in children] == [1, 1]
    pool.run([*children, parent])
    assert manager.num_free_blocks == 24 - 4
    assert manager.get_data_parallel_splits(children).tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("foreign_parent", [False, True])
@pytest.mark.parametrize("foreign_child", [False, True])
def test_contexts_of_any_class_fork(foreign_parent: bool, foreign_child: bool) -> None:
    manager = make_manager(4, 8, blocks="allocate")
    pool = WrittenPool(manager)
    parent = (Context if foreign_parent else kvcore.TextGenerationContext)("parent", [*range(6)])
    child = (Context if foreign_child else kvcore.TextGenerationContext)("child", [*range(6), 9])
    manager.external_claim("parent")
    pool.run([parent])
    manager.fork("parent", child)
    for _ in range(4):
        pool.run([child, parent])


def test_threads_fork_their_own_requests() -> None:
    manager = make_manager(4, 16 * THREADS, max_batch_size=64, enable_runtime_checks=False)

    def work(number: int) -> None:
        for turn in range(30):
            parent = prefilled(manager, np.arange(6) + 100 * number)
            children = forks(manager, parent, 3)
            manager.fetch([parent, *children])
            manager.truncate(parent.request_id, turn % 7)
            manager.shared_prefixes(children)
            for row in (parent, *children):
                manager.release(row.request_id)

    run_together(work)
    manager.check_integrity()
    assert manager.num_free_blocks == 16 * THREADS
