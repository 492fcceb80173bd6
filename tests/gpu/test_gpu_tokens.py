# SPDX-License-Identifier: Apache-2.0
"""Writes and reads of tokens in pages of a GPU: the same bytes as in host memory.

Pools start as random bytes and are compared whole, so a test fails if a call changes any other byte
or reads a NaN by mistake.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both, normal, on_gpu, on_host, to_host
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from random_arrays import random_bytes
from same_arrays import same_bytes

gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

DTYPES = (*WIDE, *NARROW)
NARROW = DTYPES[3:]
#: Page size, heads, head_dim of K and of V.
SHAPES = [(16, 8, 128, 128), (1, 3, 59, 59), (3, 2, 80, 112), (48, 1, 96, 1), (24, 5, 64, 64)]


def reduced(shape: tuple[int, ...]) -> Any:
    """Mark the first shape, which the sanitizers run."""
    return pytest.param(*shape, marks=pytest.mark.reduced) if shape == SHAPES[0] else shape


class Scene:
    """Rows of a batch, with pages anywhere in the pools, and tokens as slices of a fused QKV."""

    def __init__(
        self, put: Put, rng: np.random.Generator, shape: tuple[int, ...], layout: str, dtype: str
    ) -> None:
        page, heads, *dims = shape
        rows = 5
        self.lengths = rng.integers(0, 2 * page + 1, rows).astype(np.uint32)
        new = rng.integers(0, 3 * page + 1, rows)
        columns = -(-(self.lengths + new) // page)
        pages = int(columns.sum()) + 2
        table = np.full((rows, int(columns.max()) + 1), pages, np.uint32)
        ids = iter(rng.permutation(pages))
        for row, count in enumerate(columns):
            table[row, :count] = [next(ids) for _ in range(count)]
        inner = (page, heads) if layout == "NHD" else (heads, page)
        self.put, self.layout, self.shape = put, layout, (page, heads)
        self.pools = [put(random_bytes(rng, (pages, *inner, d), numpy_dtype(dtype))) for d in dims]
        self.step = put(table), put(self.lengths)
        self.dims = dims
        self.ends = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
        self.offsets = put(self.ends)

    def batch(self, **scales: Any) -> PagedBatch:
        k, v = self.pools
        table, lengths = self.step
        return PagedBatch(k, v, table, lengths, layout=self.layout, **scales)

    def tokens(self, values: Any, count: int) -> list[Any]:
        """K and V as slices of one array [tokens, 3 * heads + 1, widest]."""
        heads = self.shape[1]
        whole = self.put(values((count, 3 * heads + 1, max(self.dims))))
        return [
            whole[:, heads * (i + 1) : heads * (i + 2), : self.dims[i]]
            for i in range(len(self.dims))
        ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page", "heads", "k", "v"), [reduced(shape) for shape in SHAPES])
def test_moves_have_the_host_s_bytes(
    page: int, heads: int, k: int, v: int, layout: str, dtype: str
) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        scene = Scene(put, rng, (page, heads, k, v), layout, dtype)
        count = int(scene.ends[-1])
        tokens = scene.tokens(lambda size: random_bytes(rng, size, numpy_dtype(dtype)), count)
        ops.append(scene.batch(), 0, tokens[0], tokens[1], scene.offsets)
        cached = np.concatenate([[0], np.cumsum(scene.lengths)]).astype(np.uint32)
        filled = scene.tokens(
            lambda size: random_bytes(rng, size, numpy_dtype(dtype)), int(cached[-1])
        )
        ops.scatter(scene.batch(), 0, filled[0], filled[1], put(cached))
        read = ops.gather(scene.batch(), 0, lengths=scene.lengths)
        return [*scene.pools, *read]

    check_both(work)


@pytest.mark.parametrize("wide", DTYPES[:3])
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("kind", ["groups", "rows", "heads", "scale", "none"])
@pytest.mark.parametrize(("page", "heads", "k", "v"), [reduced(shape) for shape in SHAPES])
def test_quantised_pools_have_the_host_s_bytes(
    page: int, heads: int, k: int, v: int, kind: str, narrow: str, wide: str
) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        scene = Scene(put, rng, (page, heads, k, v), "NHD", narrow)
        scales: dict[str, Any] = {}
        found = []
        if kind in ("groups", "rows"):
            count = 4 if kind == "groups" and k % 4 == 0 and v % 4 == 0 else 1
            found = [put(np.full((*pool.shape[:3], count), 3, np.float32)) for pool in scene.pools]
            scales = {"key_scales": found[0], "value_scales": found[1]}
        elif kind == "heads":
            given = np.linspace(0.01, 0.5, heads, dtype=np.float32)
            scales = {"key_scales": put(given), "value_scales": put(given)}
        batch = scene.batch(**scales)
        tokens = scene.tokens(
            lambda size: normal(rng, size, numpy_dtype(wide)), int(scene.ends[-1])
        )
        factor = 0.03 if kind == "scale" else None
        ops.append(batch, 0, tokens[0], tokens[1], scene.offsets, scale=factor)
        ends = (scene.lengths + np.diff(scene.ends)).astype(np.uint32)
        return [*scene.pools, *found, *ops.gather(batch, 0, lengths=ends, dtype="float32")]

    check_both(work)


@pytest.mark.parametrize("layout", ["MLA", "MLA_FP8"])
@pytest.mark.parametrize("page", [1, 16, 24])
@pytest.mark.reduced
def test_latent_rows_have_the_host_s_bytes(layout: str, page: int) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        rows, width = 3, 4
        table = rng.permutation(rows * width).astype(np.uint32).reshape(rows, width)
        kind = np.dtype(np.uint8) if layout == "MLA_FP8" else numpy_dtype("bfloat16")
        elements = 656 if layout == "MLA_FP8" else 576
        pool = put(random_bytes(rng, (rows * width, page, elements), kind))
        lengths = np.array([0, page, 2 * page - 1], np.uint32)
        ends = np.array([0, 2 * page, 2 * page, 3 * page + 1], np.uint32)
        tokens = put(normal(rng, (int(ends[-1]), 1, 600), numpy_dtype("bfloat16")))[:, :, 8:584]
        batch = PagedBatch(pool, None, put(table), put(lengths), layout=layout)
        ops.append(batch, 0, tokens, None, put(ends))
        return [pool]

    check_both(work)


@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_pools_of_another_wide_dtype_have_the_host_s_bytes(wide: str) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        scene = Scene(put, rng, SHAPES[0], "NHD", "float16")
        read = ops.gather(scene.batch(), 0, lengths=scene.lengths, dtype=wide)
        return list(read)

    check_both(work)


@pytest.mark.reduced
def test_padding_is_skipped_and_what_has_no_page_as_well() -> None:
    """K has more rows than offsets[B], as in a captured graph; one page id is past the pool."""
    rng = np.random.default_rng(3)
    before = random_bytes(rng, (4, 2, 1, 64), np.float16)
    pool = on_gpu(before)
    k = normal(rng, (9, 1, 64), np.float16)
    table = on_gpu(np.array([[1, 99]], np.uint32))
    batch = PagedBatch(pool, None, table, on_gpu(np.array([1], np.uint32)))
    ops.append(batch, 0, on_gpu(k), None, on_gpu(np.array([0, 3], np.uint32)))
    expected = on_host(before)
    expected[1, 1] = k[0]  # tokens 1 and 2 are in page 99
    assert np.array_equal(to_host(pool).view(np.uint16), expected.view(np.uint16))


def test_every_shape_of_an_empty_batch_is_nothing() -> None:
    for rows, tokens in product((0, 3), (0,)):
        before = random_bytes(np.random.default_rng(4), (4, 2, 1, 64), np.float16)
        pool = on_gpu(before)
        step = on_gpu(np.zeros((rows, 2), np.uint32)), on_gpu(np.zeros(rows, np.uint32))
        k = on_gpu(np.zeros((tokens, 1, 64), np.float16))
        ops.append(
            PagedBatch(pool, None, step[0], step[1]),
            0,
            k,
            None,
            on_gpu(np.zeros(rows + 1, np.uint32)),
        )
        assert same_bytes(before, to_host(pool))
