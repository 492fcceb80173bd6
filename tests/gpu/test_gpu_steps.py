# SPDX-License-Identifier: Apache-2.0
"""Slot mappings, block tables and lengths of a step on a GPU: equal to the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both, on_gpu, to_host
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import numpy_dtype
from random_arrays import random_bytes

gpu_arrays.require_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.reduced]

DTYPES = ("float32", "bfloat16", "int8")


@pytest.mark.parametrize("slot", [np.int32, np.int64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page", "dim"), [(16, 128), (1, 59), (3, 80)])
def test_slots_have_the_host_s_bytes(
    page: int, dim: int, dtype: str, layout: str, slot: type
) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        pages, heads, kind = 7, 3, numpy_dtype(dtype)
        inner = (page, heads) if layout == "NHD" else (heads, page)
        pools = [put(random_bytes(rng, (pages, *inner, dim), kind)) for _ in range(2)]
        none = put(np.zeros((0, 0), np.uint32)), put(np.zeros(0, np.uint32))
        slots = np.concatenate([rng.permutation(pages * page)[: 4 * page], [-1, -7]])
        slots = np.concatenate([slots, pages * page + np.arange(3)]).astype(slot)
        k, v = (put(random_bytes(rng, (len(slots) + 2, heads + 2, dim), kind)) for _ in range(2))
        batch = PagedBatch(pools[0], pools[1], none[0], none[1], layout=layout)
        bad = ops.append_slots(batch, 0, k[:, 1:-1], v[:, 1:-1], put(slots))
        return [*pools, np.asarray(to_host(bad), np.int64).reshape(())]

    check_both(work)


@pytest.mark.parametrize("slot", [np.int32, np.int64])
@pytest.mark.parametrize("page", [1, 3, 16, 48])
def test_slots_are_built_as_on_the_host(page: int, slot: type) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        rows = 9
        lengths = rng.integers(0, 2 * page, rows).astype(np.uint32)
        new = rng.integers(0, 2 * page, rows)
        table = rng.integers(0, 40, (rows, 4)).astype(np.uint32)
        ends = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
        pool = put(np.zeros((40, page, 1, 8), np.float16))
        out = put(np.full(int(ends[-1]) + 11, 5, slot))
        batch = PagedBatch(pool, None, put(table), put(lengths))
        return [ops.build_slots(batch, put(ends), out=out)]

    check_both(work)


@pytest.mark.parametrize("has_active", [False, True])
def test_lengths_advance_as_on_the_host(has_active: bool) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        lengths = put(rng.integers(0, 1000, 300).astype(np.uint32))
        ends = np.cumsum(rng.integers(0, 9, 301)).astype(np.uint32)
        active = put(rng.integers(0, 2, 300).astype(np.bool_)) if has_active else None
        fresh = ops.advance_lengths(lengths, put(ends), active=active)
        ops.advance_lengths(lengths, put(ends), active=active, out=lengths)
        return [fresh, lengths]

    check_both(work)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (9, 1), (257, 300), (64, 4097)])
def test_rows_that_stay_are_the_host_s(rows: int, columns: int, share: float) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        table = put(rng.integers(0, 2**32, (rows, columns)).astype(np.uint32))
        lengths = put(rng.integers(0, 2**32, rows).astype(np.uint32))
        offsets = put(np.cumsum([0, *rng.integers(0, 4, rows)]).astype(np.uint32))
        kept = np.flatnonzero(rng.random(rows) < share).astype(np.uint32)
        ops.compact_table(table, lengths, put(kept), row_offsets=offsets)
        return [table, lengths, offsets]

    check_both(work)


@pytest.mark.parametrize(
    ("kept", "good"), [([1, 2, 2, 3], 2), ([2, 99, 3], 1), ([0, 3, 1], 2), ([-1, 2], 0)]
)
def test_rows_on_the_gpu_that_are_wrong_end_the_list(kept: list[int], good: int) -> None:
    table = np.arange(300, dtype=np.int32).reshape(6, 50)
    device = on_gpu(table)
    ops.compact_table(device[1:-1], None, on_gpu(np.array(kept, np.int32)))
    expected = table.copy()
    expected[1:-1] = -1
    expected[1 : 1 + good] = table[1:-1][kept[:good]]
    assert np.array_equal(to_host(device), expected)


def test_a_slot_that_is_padding_does_not_touch_slot_zero() -> None:
    pool = on_gpu(np.full((2, 2, 1, 8), 7, np.float32))
    none = on_gpu(np.zeros((0, 0), np.uint32)), on_gpu(np.zeros(0, np.uint32))
    k = on_gpu(np.ones((3, 1, 8), np.float32))
    ops.append_slots(
        PagedBatch(pool, None, none[0], none[1]), 0, k, None, on_gpu(np.full(3, -1, np.int64))
    )
    assert (to_host(pool) == 7).all()
