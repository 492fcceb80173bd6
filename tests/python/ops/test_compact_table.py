# SPDX-License-Identifier: Apache-2.0
"""compact_table against numpy: the kept rows come first, and the rows after them are empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
from compacted import NOTHING, compacted
from kvcore import ops
from same_arrays import read_only
from tables import table

U32 = np.uint32


@st.composite
def batches(draw: st.DrawFn) -> Any:
    rows, columns = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 2, 7, 64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.int32, np.uint32]))
    memory = rng.integers(0, 2**31, (rows, columns + draw(st.integers(0, 3)))).astype(dtype)
    lengths = rng.integers(0, 2**31, rows).astype(dtype)
    offsets = np.cumsum([0, *rng.integers(0, 5, rows)]).astype(dtype)
    kept = draw(st.lists(st.integers(0, rows - 1), unique=True)) if rows else []
    return memory, columns, lengths, offsets, sorted(kept)


@given(batches(), st.integers(1, 3), st.booleans())
def test_rows_that_stay_move_to_the_front(case: Any, threads: int, has_offsets: bool) -> None:
    memory, columns, lengths, offsets, kept = case
    table, beside = memory[:, :columns], memory[:, columns:].copy()
    expected = compacted(table, lengths, offsets, kept)
    given_offsets = offsets if has_offsets else None
    ops.compact_table(table, lengths, kept, row_offsets=given_offsets, threads=threads)
    assert np.array_equal(table, expected[0])
    assert np.array_equal(lengths, expected[1])
    if has_offsets:
        assert np.array_equal(offsets, expected[2])
    assert np.array_equal(memory[:, columns:], beside)  # the gaps between strided rows


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_from_the_last_to_the_first_in_memory_and_wide_ones(threads: int) -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 99, (40, 9000)).astype(U32)
    table = memory[::-1]
    expected = compacted(table, np.zeros(40, U32), np.zeros(41, U32), range(1, 40, 3))[0]
    ops.compact_table(table, None, np.arange(1, 40, 3), threads=threads)
    assert np.array_equal(table, expected)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, list, tuple])
def test_the_end_of_the_rows(kind: Any) -> None:
    end = NOTHING if kind is np.uint32 else -1
    kept = [1, 2, end, 7]
    lengths = np.array([4, 5, 6, 7], U32)
    table = np.arange(8, dtype=np.int32).reshape(4, 2)
    ops.compact_table(table, lengths, kind(kept) if kind in (list, tuple) else np.array(kept, kind))
    assert lengths.tolist() == [5, 6, 0, 0]
    assert table.tolist() == [[2, 3], [4, 5], [-1, -1], [-1, -1]]


def test_torch_tensors_are_compacted_in_place() -> None:
    torch = conftest.require("torch")
    table = torch.arange(6, dtype=torch.int32).reshape(3, 2)
    lengths, offsets = torch.tensor([3, 4, 5]).int(), torch.tensor([0, 2, 3, 7]).int()
    ops.compact_table(table, lengths, torch.tensor([2]), row_offsets=offsets)
    assert table.tolist() == [[4, 5], [-1, -1], [-1, -1]]
    assert lengths.tolist() == [5, 0, 0]
    assert offsets.tolist() == [0, 4, 4, 4]


# -- refusals ------------------------------------------------------------------------------------
@table(
    ("call", "error", "match"),
    [
        (
            lambda t, n: ops.compact_table(t, n, [0, 3]),
            IndexError,
            r"kept\[1\] is 3, the",
        ),
        (
            lambda t, n: ops.compact_table(t, n, [1, 1]),
            ValueError,
            r"kept\[1\] is 1, must be",
        ),
        (lambda t, n: ops.compact_table(t, n, [2, 0]), ValueError, "sort the rows that stay"),
        (lambda t, n: ops.compact_table(t, n, [0, 1, 2, -1]), ValueError, "kept names 4 rows"),
        (lambda t, n: ops.compact_table(t, n, [-2]), ValueError, "kept holds -2"),
        (lambda t, n: ops.compact_table(t, n, [[0]]), ValueError, r"kept .*must be \(rows,\)"),
        (lambda t, n: ops.compact_table(t, n, [0.5]), TypeError, "kept has dtype float64"),
        (lambda t, n: ops.compact_table(t, n, 0), TypeError, "kept is a int"),
        (lambda t, n: ops.compact_table(t, n[:2], [0]), ValueError, "cache_lengths has 2 entries"),
        (
            lambda t, n: ops.compact_table(t, n.astype(int), [0]),
            TypeError,
            "cache_lengths has d",
        ),
        (
            lambda t, n: ops.compact_table(t, n, [0], row_offsets=np.zeros(3, U32)),
            ValueError,
            "row_offsets has 3 entries, must have 4",
        ),
        (lambda t, n: ops.compact_table(t, t[:, 0], [0]), ValueError, "cache_lengths is strided"),
        (lambda t, n: ops.compact_table(t, t[0, :3], [0]), ValueError, "memory"),
        (
            lambda t, n: ops.compact_table(t, n, [0], row_offsets=t.reshape(-1)[:4]),
            ValueError,
            "memory",
        ),
        (lambda t, n: ops.compact_table(t[0], n, [0]), ValueError, "lookup_table"),
        (lambda t, n: ops.compact_table(t[:, ::2], n, [0]), ValueError, "lookup_table is strided"),
        (lambda t, n: ops.compact_table(t * 1.0, n, [0]), TypeError, "lookup_table has dtype fl"),
        (lambda t, n: ops.compact_table(None, n, [0]), TypeError, "lookup_table is a NoneType"),
        (
            lambda t, n: ops.compact_table(np.broadcast_to(t[:1], (3, 4)), n, [0]),
            ValueError,
            "lookup_table is read-only",
        ),
        (
            lambda t, n: ops.compact_table(
                np.lib.stride_tricks.as_strided(t, (3, 4), (0, 4)), n, [0]
            ),
            ValueError,
            "elements share memory",
        ),
        (lambda t, n: ops.compact_table(t, read_only(n.copy()), [0]), ValueError, "is read-only"),
        (lambda t, n: ops.compact_table(t, n, [0], threads=0), ValueError, "threads is 0"),
        (lambda t, n: ops.compact_table(t, n, [0], stream=1), ValueError, "stream is given"),
    ],
)
def test_refused_calls_change_nothing(
    call: Callable[[Any, Any], object], error: type[Exception], match: str
) -> None:
    table, lengths = np.arange(12, dtype=U32).reshape(3, 4), np.array([0, 1, 2], U32)
    with pytest.raises(error, match=match):
        call(table, lengths)
    assert table.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert lengths.tolist() == [0, 1, 2]
