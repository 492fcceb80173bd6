# SPDX-License-Identifier: Apache-2.0
"""Copies of whole pages and starts of pages on a GPU, also to pinned memory: the host's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both, on_gpu, to_host
from kvcore import ops
from kvcore.support.dtypes import numpy_dtype
from layout_caches import SHAPES as LAYOUTS
from random_arrays import random_bytes
from same_arrays import same_bytes

gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

PAIRS = [(3, 0), (3, 5), (8, 1), (2, 7)]


@pytest.mark.parametrize("page_bytes", [1, 3, 40, 4096, 4098, 65536])
@pytest.mark.reduced
def test_pages_are_copied_filled_and_digested_as_on_the_host(page_bytes: int) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        pool = put(random_bytes(rng, (9, page_bytes), np.uint8))
        ops.copy_pages(pool, PAIRS)
        ops.fill_pages(pool, [4], 0xFF)
        ops.zero_pages(pool, np.array([6, 0]))
        return [pool, ops.checksum(pool, np.arange(9)), ops.checksum(pool, [5, 3, 5])]

    check_both(work)


def test_a_pool_of_two_arrays_is_one() -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        pair = tuple(put(random_bytes(rng, (9, 2, 4, 3, dim), np.float16)) for dim in (64, 24))
        ops.copy_pages(pair, PAIRS)
        ops.copy_partial(pair, [(3, 4, 2), (8, 6, 4), (8, 2, 0)])
        return [*pair, ops.checksum(pair, np.arange(9))]

    check_both(work)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.reduced
def test_starts_of_pages_are_copied_as_on_the_host(name: str, page: int) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        counts = {"p": 9, "k": 2, "l": 3, "t": page, "h": 2}
        blocks = put(random_bytes(rng, (*(counts[a] for a in LAYOUTS[name]), 40), np.float16))
        copies = [(1, 0, page), (2, 3, page // 2), (4, 5, 1), (8, 7, 0)]
        ops.copy_partial(ops.PoolLayout(blocks, name), copies)
        return [blocks]

    check_both(work)


def cache(put: Put, rng: np.random.Generator, name: str, sizes: tuple[int, ...], dtype: str) -> Any:
    pages, layers, page, heads, dim = sizes
    counts = {"p": pages, "k": 2, "l": layers, "t": page, "h": heads}
    shape = (*(counts[axis] for axis in LAYOUTS[name]), dim)
    return ops.PoolLayout(put(random_bytes(rng, shape, numpy_dtype(dtype))), name)


@pytest.mark.parametrize("source", list(LAYOUTS))
@pytest.mark.parametrize("destination", list(LAYOUTS))
@pytest.mark.parametrize(("page", "dim", "dtype"), [(16, 128, "bfloat16"), (3, 59, "int8")])
def test_pages_move_between_layouts_as_on_the_host(
    source: str, destination: str, page: int, dim: int, dtype: str
) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        first = cache(put, rng, source, (11, 3, page, 2, dim), dtype)
        second = cache(put, rng, destination, (8, 3, page, 2, dim), dtype)
        ops.transfer(first, second, [0, 10, -1, 4], [3, 0, 5, 7])
        ops.transfer(first, second, [9], [1], layers=1, max_blocks=2)
        return [first.arrays, second.arrays]

    check_both(work)


def packed(put: Put, rng: np.random.Generator, sizes: tuple[int, ...], dtype: str) -> Any:
    pages, layers, page, heads, dim = sizes
    kind = numpy_dtype(dtype)
    x = 16 // kind.itemsize
    shapes = ((layers, pages, heads, dim // x, page, x), (layers, pages, heads, dim, page))
    return ops.PoolLayout(tuple(put(random_bytes(rng, shape, kind)) for shape in shapes), "vllm")


@pytest.mark.parametrize("is_source", [True, False])
@pytest.mark.parametrize("other", [*LAYOUTS, "vllm"])
@pytest.mark.parametrize(
    ("page", "dim", "dtype"),
    [
        (16, 128, "bfloat16"),
        (32, 64, "int8"),
        (16, 80, "float32"),
        (3, 16, "float16"),
        (1, 48, "int8"),
        (24, 24, "float16"),
    ],
)
@pytest.mark.reduced
def test_packed_pages_move_as_on_the_host(
    page: int, dim: int, dtype: str, other: str, is_source: bool
) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        first = packed(put, rng, (11, 3, page, 2, dim), dtype)
        sizes = (12, 3, page, 2, dim)
        is_packed = other == "vllm"
        second = (
            packed(put, rng, sizes, dtype) if is_packed else cache(put, rng, other, sizes, dtype)
        )
        pair = (first, second) if is_source else (second, first)
        ops.transfer(*pair, [0, 10, -1, 4], [3, 0, 5, 7])
        ops.transfer(*pair, [9], [1], layers=1, max_blocks=2)
        return [*first.arrays, *(second.arrays if is_packed else [second.arrays])]

    check_both(work)


@pytest.mark.parametrize("name", ["max", "page_first_direct", "page_first", "vllm"])
@pytest.mark.reduced
def test_pages_go_to_pinned_memory_and_come_back(name: str) -> None:
    rng = np.random.default_rng(7)
    sizes = {"pages": 6, "layers": 2, "page_size": 16, "heads": 2, "head_dim": 64}
    host = ops.PoolLayout.allocate(name, **sizes, dtype="bfloat16", device="pinned")
    pool = cache(on_gpu, rng, "max", (6, 2, 16, 2, 64), "bfloat16")
    before = to_host(pool.arrays)
    ops.transfer(pool, host, [0, 1, 2, 5], [3, 2, 1, 0])
    back = cache(on_gpu, rng, "max", (6, 2, 16, 2, 64), "bfloat16")
    untouched = to_host(back.arrays)[4:]
    ops.transfer(host, back, [3, 2, 1, 0], [0, 1, 2, 3])
    found = to_host(back.arrays)
    assert same_bytes(before[[0, 1, 2, 5]], found[:4])
    assert same_bytes(untouched, found[4:])
