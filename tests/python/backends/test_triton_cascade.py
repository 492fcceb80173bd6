# SPDX-License-Identifier: Apache-2.0
"""Rows that share leading pages, with queries stacked by the GPU's kernels (interpreted)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore
from attention_oracle import assert_close, assert_lse
from attention_scenes import Scene
from kvcore.backends.cuda.attention.cascade import Group, checked_groups, make_stack
from triton_interpreter import attend_on_host, require_interpreter

require_interpreter()

# Rows, and the number of pages that they share, the longest last.
GROUPS: list[list[tuple[list[int], int]]] = [
    [([0, 1, 2, 3, 4], 3)],
    [([0, 2], 1), ([1, 3, 4], 2)],
    [([0, 1, 2, 3, 4], 1), ([0, 2, 4], 2), ([2, 4], 3)],
]


def scene_of(shared: Any, new: list[int], page: int = 3, **options: Any) -> Scene:
    cached = [3 * page, 4 * page - 1, 3 * page + 2, 5 * page, 3 * page]
    return Scene(cached=cached, new=new, page=page, shared=shared, heads=1, **options)


@pytest.mark.parametrize("shared", GROUPS)
@pytest.mark.parametrize(("new", "splits"), [([1, 1, 1, 1, 1], 2), ([4, 0, 1, 2, 7], 1)])
def test_agrees_with_the_oracle(shared: Any, new: list[int], splits: int) -> None:
    scene = scene_of(shared, new, dtype="float16", q_dtype="bfloat16" if splits > 1 else "float32")
    rules: list[dict[str, Any]] = [
        {},
        {"causal": False, "soft_cap": 5.0, "sinks": np.array([0.5, 2], np.float32)},
    ]
    for rule in rules:
        expected, sums = scene.expected(**rule)
        o, lse = attend_on_host(
            scene.batch, scene.q, scene.offsets, shared=scene.groups(), splits=splits, **rule
        )
        assert_close(o, expected, scene.q_dtype)
        assert_lse(lse, sums)


def test_shared_pages_are_read_through_one_row_only() -> None:
    """The kernel does not read the other rows' tables, which have no page in these columns."""
    scene = scene_of(GROUPS[0], [1] * 5)
    expected, _ = scene.expected()
    groups = scene.groups()
    scene.table[1:, :3] = 2**32 - 1
    o, _ = attend_on_host(scene.batch, scene.q, scene.offsets, shared=groups)
    assert_close(o, expected, "float32")
    alone, _ = attend_on_host(scene.batch, scene.q, scene.offsets)
    assert np.abs(alone - expected).max() > 0.1


@pytest.mark.parametrize("rule", [{"window": 7}, {"chunk": 5}])
def test_with_windows_rows_read_for_themselves(rule: Any) -> None:
    scene = scene_of(GROUPS[0], [1] * 5)
    expected, _ = scene.expected(**rule)
    scene.table[0, :3] = 2**32 - 1  # the first row's window has left these pages
    groups = scene.groups()
    o, _ = attend_on_host(scene.batch, scene.q, scene.offsets, shared=groups, **rule)
    assert_close(o[1:], expected[1:], "float32")


def test_stacked_rows_and_the_states_of_tokens() -> None:
    groups = [Group((0, 2), 4), Group((0, 1, 2), 2)]
    stack = make_stack(sorted(groups, key=lambda g: g.tokens), np.array([0, 1, 3, 3], np.uint32))
    n, rows = stack.states, stack.rows
    assert (n, rows, stack.depth) == (3 + 1 + 3, 5, 3)
    token, own, ahead = stack.numbers[: 3 * n].reshape(3, n).tolist()
    assert token == [0, 1, 2, 0, 0, 1, 2]
    assert own == [0, 1, 1, 0, 0, 1, 1]
    assert ahead == [0, 0, 1, 0, 0, 0, 1]
    row, begin, end = stack.numbers[3 * n : stack.offsets_at].reshape(3, rows).tolist()
    assert row == [0, 0, 0, 1, 2]
    assert begin == [0, 2, 4, 2, 4]
    assert end == [2, 4, *[2**31 - 1] * 3]
    assert stack.numbers[stack.offsets_at : stack.chains_at].tolist() == [0, 3, 4, 5, 7, 7]
    assert stack.numbers[stack.chains_at :].tolist() == [0, 3, 4, 1, 5, -1, 2, 6, -1]


def prefix(rows: list[int], tokens: int, replica: int = 0) -> kvcore.SharedPrefix:
    return kvcore.SharedPrefix(tuple(rows), tokens, replica)


def test_groups_of_other_replicas_are_left_out() -> None:
    given = [prefix([0, 9], 4, replica=1), prefix([0, 1], 2)]
    assert checked_groups(given, 0, 5) == [Group((0, 1), 2)]


@pytest.mark.parametrize(
    ("shared", "error", "match"),
    [
        ([prefix([0, 5], 8)], IndexError, r"shared\[0\].rows holds 5, .* below the 5 rows"),
        ([prefix([-1, 2], 8)], IndexError, r"shared\[0\].rows holds -1"),
        ([prefix([2, 0], 8)], IndexError, "must be ascending"),
        ([prefix([0, 0], 8)], IndexError, "must be ascending"),
        ([prefix([0, 2], 0)], ValueError, "num_tokens is 0, must be at least 1"),
        ([prefix([1, 3, 4], 32), prefix([3, 4], 16)], ValueError, "must be nested or disjoint"),
        ([prefix([1, 3], 32), prefix([3, 4], 16)], ValueError, "must be nested or disjoint"),
        ([((0, 2), 16)], TypeError, r"shared\[0\] is a tuple, must be a SharedPrefix"),
        ([SimpleNamespace(rows=(0, 1.5), num_tokens=1, replica=0)], TypeError, "is a float"),
        (None, TypeError, "not iterable"),
    ],
)
def test_wrong_groups_are_refused(shared: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        checked_groups(shared, 0, 5)
