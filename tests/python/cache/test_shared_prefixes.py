# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch that hold the same leading pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager, prefilled
from families import Manager, family, forks
from foreign_context import Context


def shared(manager: Manager, batch: list[Any]) -> list[tuple[tuple[int, ...], int]]:
    return [(group.rows, group.num_tokens) for group in manager.shared_prefixes(batch)]


def prompts(manager: Manager, *tokens: list[int], **rest: Any) -> list[Any]:
    return [prefilled(manager, ids, **rest) for ids in tokens]


def test_rows_of_one_system_prompt() -> None:
    manager = make_manager(4, 32)
    rows = prompts(manager, *([*range(10), 50 + n, 60 + n] for n in range(3)))
    assert shared(manager, rows) == [((0, 1, 2), 8)]
    assert shared(manager, rows[1:]) == [((0, 1), 8)]
    assert shared(manager, rows[:1]) == []
    assert shared(manager, []) == []


def test_groups_are_nested_and_the_longest_comes_first() -> None:
    manager = make_manager(4, 64)
    system, user = list(range(8)), list(range(20, 32))
    rows = prompts(
        manager,
        [*system, *user, 1, 2],
        [*range(90, 99)],
        [*system, 3, 4],
        [*system, *user, 5, 6],
        [*system, *user[:4], 7, 8, 9, 10],
    )
    assert shared(manager, rows) == [((0, 3), 20), ((0, 3, 4), 12), ((0, 2, 3, 4), 8)]
    assert shared(manager, rows[::-1]) == [((1, 4), 20), ((0, 1, 4), 12), ((0, 1, 2, 4), 8)]


def test_rows_that_end_in_the_middle_of_another_ones_prefix() -> None:
    manager = make_manager(4, 32)
    rows = prompts(manager, list(range(16)), list(range(9)), list(range(16)))
    assert shared(manager, rows) == [((0, 2), 16), ((0, 1, 2), 8)]


def test_equal_tokens_in_different_pages_are_not_shared() -> None:
    manager = make_manager(4, 32, caching=False)
    assert shared(manager, prompts(manager, list(range(8)), list(range(8)))) == []
    manager = make_manager(4, 32)
    salted = [prefilled(manager, range(8), cache_salt=salt) for salt in (None, "", "a")]
    assert shared(manager, salted) == []


def test_part_of_a_page_is_shared_only_by_forks() -> None:
    manager = make_manager(4, 32)
    rows = prompts(manager, [*range(4), 5, 6], [*range(4), 5, 6])
    assert shared(manager, rows) == [((0, 1), 4)]
    rows += forks(manager, rows[0])
    assert shared(manager, rows) == [((0, 2), 6), ((0, 1, 2), 4)]


@pytest.mark.parametrize("caching", [True, False])
def test_forks_share_until_they_write(caching: bool) -> None:
    manager, pool, rows = family(32, count=3, caching=caching)
    assert shared(manager, rows) == [((0, 1, 2, 3), 6)]
    pool.run([rows[2]])
    assert shared(manager, rows) == [((0, 1, 3), 6), ((0, 1, 2, 3), 4)]
    rows += forks(manager, rows[2])
    assert shared(manager, rows) == [((2, 4), 7), ((0, 1, 3), 6), ((0, 1, 2, 3, 4), 4)]
    for row in (rows[1], rows[4]):
        manager.release(row.request_id)
    rows = [rows[0], *rows[2:4]]
    pool.run(rows)
    assert shared(manager, rows) == [((0, 1, 2), 4)]


def test_only_written_tokens_count() -> None:
    manager, _, rows = family(32, count=2)
    rows[0].extend([8, 9])
    manager.fetch([rows[0]])
    assert shared(manager, rows[1:]) == [((0, 1), 6)]
    rows[1].rewind(6)  # its last token must run again
    assert shared(manager, rows[1:]) == [((0, 1), 5)]
    rows[1].rewind(5)
    assert shared(manager, rows) == [((0, 1, 2), 4)]


def test_row_set_back_does_not_hide_what_the_others_share() -> None:
    manager = make_manager(4, 32)
    rows = prompts(manager, *[list(range(20))] * 3)
    rows[1].rewind(7)
    assert shared(manager, rows) == [((0, 2), 20), ((0, 1, 2), 6)]
    assert manager.maybe_reserve(rows[1])
    assert shared(manager, rows) == [((0, 2), 20), ((0, 1, 2), 4)]


@pytest.mark.parametrize("n", range(9))
def test_truncated_row_shares_what_is_left(n: int) -> None:
    manager = make_manager(4, 32)
    rows = prompts(manager, list(range(8)), list(range(8)))
    manager.truncate(rows[0].request_id, n)
    assert shared(manager, rows) == ([((0, 1), n)] if n else [])


def test_rows_are_counted_in_their_replica() -> None:
    manager = make_manager(4, 32, replicas=2)
    replicas = [0, 1, 1, 0, 1]
    rows = [prefilled(manager, [*range(8), n], replica_idx=r) for n, r in enumerate(replicas)]
    groups = manager.shared_prefixes(rows)
    assert sorted((group.replica, group.rows, group.num_tokens) for group in groups) == [
        (0, (0, 1), 8),
        (1, (0, 1, 2), 8),
    ]


def test_reserved_hits_are_shared_before_anything_runs() -> None:
    manager = make_manager(4, 32)
    (first,) = prompts(manager, list(range(8)))
    second = claimed(manager, [*range(8), 70])
    assert shared(manager, [first, second]) == []
    assert manager.maybe_reserve(second)
    assert shared(manager, [first, second]) == [((0, 1), 8)]


def test_foreign_contexts_share_and_nothing_changes() -> None:
    manager = make_manager(4, 32)
    (own,) = prompts(manager, list(range(8)))
    foreign = Context("foreign", range(8))
    manager.external_claim("foreign")
    manager.fetch([foreign])
    foreign.update(1)
    manager.step([foreign])
    before = manager.num_free_blocks, manager.metrics
    assert shared(manager, [own, foreign]) == [((0, 1), 8)]
    assert (manager.num_free_blocks, manager.metrics) == before
    assert shared(manager, (row for row in (own, foreign))) == [((0, 1), 8)]  # type: ignore[arg-type]


def test_answer_is_frozen() -> None:
    manager, _, rows = family(16)
    (group,) = manager.shared_prefixes(rows)
    assert group == kvcore.SharedPrefix(rows=(0, 1), num_tokens=6, replica=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.num_tokens = 5  # type: ignore[misc]


def test_many_rows_of_a_deep_tree() -> None:
    """Row n shares n pages with all longer rows."""
    manager = make_manager(1, 4000, max_batch_size=64, enable_runtime_checks=False)
    rows = [prefilled(manager, [*range(n), 1000 + n]) for n in range(1, 60)]
    groups = shared(manager, rows)
    assert groups == [(tuple(range(n - 1, 59)), n) for n in range(58, 0, -1)]
