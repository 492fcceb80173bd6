# SPDX-License-Identifier: Apache-2.0
"""Strided arrays, lists in GPU memory, and lists in host memory that change, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both, normal, on_gpu, to_host
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import numpy_dtype
from random_arrays import random_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_strided_codes_are_dequantised(dtype: str) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        codes = put(random_bytes(rng, (7, 5, 3, 48), numpy_dtype(dtype)))
        scales = put(normal(rng, (3, 5, 7, 6), np.float32))
        turned = codes.transpose(2, 1, 0, 3), scales[..., ::2]
        return [ops.dequantize(*turned, "float32")]

    check_both(work)


@pytest.mark.parametrize("rows", [0, 1, 31, 1000])
def test_offsets_are_sums_of_lengths(rows: int) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        lengths = rng.integers(0, 9, rows).astype(np.uint32)
        pool = put(normal(rng, (rows + 1, 8, 2, 16), np.float16))
        table = put(rng.permutation(rows + 1)[:rows].astype(np.uint32).reshape(rows, 1))
        k, _, ends = ops.gather(PagedBatch(pool, None, table, put(lengths)), 0)
        return [k, ends]

    check_both(work)


@pytest.mark.parametrize("layers", [1, 2, 60])
def test_pages_of_lists_of_layers_move_by_ids_on_the_gpu(layers: int) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        shape = (9, 2, 16, 4, 32)
        sides = [
            [put(random_bytes(rng, shape[:1] + shape[2:], np.uint16)) for _ in range(layers)]
            for _ in range(2)
        ]
        pools = [ops.PoolLayout(arrays, "max") for arrays in sides]
        ids = put(np.array([3, 8, -1, 0])), put(np.array([0, 1, 2, 5]))
        ops.transfer(pools[0], pools[1], ids[0], ids[1])
        return sides[1]

    check_both(work)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("count", [10, 200_000])
def test_ids_of_the_host_may_change_right_after_the_call(count: int, is_pinned: bool) -> None:
    pages = 300_000
    ids = np.random.default_rng(1).permutation(pages)[:count].astype(np.int64)
    given = ids.copy()
    if is_pinned:
        memory = cupy.cuda.alloc_pinned_memory(ids.nbytes)
        given = np.frombuffer(memory, np.int64, count)
        given[:] = ids
    pool = on_gpu(np.zeros((pages, 16), np.uint8))
    load = cupy.ones((4096, 4096), cupy.float32)
    for _ in range(10):  # the copy must wait for some milliseconds
        load = load @ load
    ops.fill_pages(pool, given, 7)
    given[:] = 0
    expected = np.zeros((pages, 16), np.uint8)
    expected[ids] = 7
    assert np.array_equal(to_host(pool), expected)
