# SPDX-License-Identifier: Apache-2.0
"""Lists of pages for other attention kernels, on the CPU and on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import KVCacheParams, PagedBatch, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import FullAttention, SlidingWindow


def batch_of(table: Any, lengths: Any, page: int = 4, pages: int = 9) -> PagedBatch:
    pool = np.zeros((pages, page, 1, 8), np.float16)
    return PagedBatch(pool, pool, np.array(table, np.uint32), np.array(lengths, np.uint32))


def drawn(seed: int) -> tuple[PagedBatch, Any, list[list[int]], list[int]]:
    """Return a batch of random rows, its offsets, and the expected pages and lengths."""
    rng = np.random.default_rng(seed)
    rows, page, pages = int(rng.integers(0, 600 if seed == 0 else 6)), int(rng.integers(1, 20)), 50
    new = rng.integers(0, 3, rows)
    cached = rng.integers(0, 70, rows)
    columns = max([-(-int(n) // page) for n in cached + new], default=0) + int(rng.integers(0, 3))
    table = rng.integers(0, pages + 3, (rows, columns + 2)).astype(np.uint32)
    batch = PagedBatch(
        np.zeros((pages, page, 1, 8), np.float16), None, table[:, 1:-1], cached.astype(np.uint32)
    )
    lengths = (cached + new).tolist()
    lists = [
        [int(p) if p < pages else 0 for p in row[: -(-n // page)]]
        for row, n in zip(table[:, 1:-1], lengths, strict=True)
    ]
    return batch, np.concatenate([[0], np.cumsum(new)]).astype(np.uint32), lists, lengths


def check(found: Any, batch: PagedBatch, lists: list[list[int]], lengths: list[int]) -> None:
    indptr, indices, last, kv_lengths = found
    size = batch.key_pool.shape[1]
    assert {array.dtype.name for array in found} == {"int32"}
    assert indptr.tolist() == np.cumsum([0, *map(len, lists)]).tolist()
    assert indices[: indptr[-1]].tolist() == [page for pages in lists for page in pages]
    assert kv_lengths.tolist() == lengths
    assert last.tolist() == [(n - 1) % size + 1 if n else 0 for n in lengths]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_listed_one_behind_the_other(seed: int) -> None:
    batch, offsets, lists, lengths = drawn(seed)
    found = ops.page_indices(batch, offsets)
    check(found, batch, lists, lengths)
    room = [np.full(n + (i == 1) * 9, 7, np.int32) for i, n in enumerate(map(len, found))]
    again = ops.page_indices(batch, offsets.tolist(), out=room)
    assert all(a is b for a, b in zip(again, room, strict=True))
    check(again, batch, lists, lengths)
    assert (again.indices[again.indptr[-1] :] == 7).all()


def test_layers_list_their_own_pages() -> None:
    """Entries that the window left are page 0, which is a valid page."""
    groups = FullAttention([0]), SlidingWindow([1], 4)
    params = KVCacheParams("float16", 1, 8, num_layers=2, page_size=2, groups=groups)
    manager = PagedKVCacheManager(params, 1, 64, num_pages=40)
    manager.claim("a")
    context = TextGenerationContext("a", list(range(11)))
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    (inputs,) = manager.fetch([context])
    for layer in range(2):
        found = ops.page_indices(inputs, inputs.row_offsets, layer=layer)
        pages = np.array(manager.get_req_blocks("a", bundle=layer))
        assert found.kv_lengths.tolist() == [12]
        assert found.indices[:6].tolist() == np.where(pages < 40, pages, 0).tolist()
    assert (pages == 40).sum() >= 3


def u32(*values: int) -> Any:
    return np.array(values, np.uint32)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"row_offsets": u32(0, 1)}, ValueError, r"row_offsets has shape \(2,\), must be \(3,\)"),
    ({"row_offsets": u32(0, 2, 1)}, ValueError, "no entry below the one before"),
    ({"row_offsets": u32(1, 2, 3)}, ValueError, "must begin at 0"),
    ({"row_offsets": u32(0, 6, 6)}, IndexError, "row 0 has 10 tokens, its 2 columns are pages of"),
    ({"layer": 1}, IndexError, "layer is 1"),
    ({"out": np.zeros(3, np.int32)}, TypeError, "out is a ndarray, must be four arrays"),
    ({"out": [np.zeros(3, np.int32)]}, ValueError, "out holds 1 items, must hold 4"),
    ({"sizes": (3, 3, 2, 2)}, ValueError, r"out\[1\] has shape \(3,\), must be \(4,\)"),
    ({"sizes": (4, 4, 2, 2)}, ValueError, r"out\[0\] has shape \(4,\), must be \(3,\)"),
    ({"dtype": np.int64}, TypeError, r"out\[0\] has dtype int64, must be int32"),
]


@pytest.mark.parametrize(("change", "error", "match"), BAD)
def test_refused_calls_write_nothing(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    sizes, dtype = change.pop("sizes", (3, 4, 2, 2)), change.pop("dtype", np.int32)
    out = [np.full(n, 7, dtype) for n in sizes]
    arguments = {"row_offsets": u32(0, 1, 2), "out": out} | change
    with pytest.raises(error, match=match):
        ops.page_indices(batch_of([[7, 2], [5, 9]], [4, 2]), **arguments)
    assert all((array == 7).all() for array in out)


def test_batches_that_are_none_are_refused() -> None:
    strided = batch_of([[7, 2, 1, 1]], [4])
    strided = strided.with_tables(strided.lookup_table[:, ::2], strided.cache_lengths)
    with pytest.raises(ValueError, match="lookup_table is strided along its last axis"):
        ops.page_indices(strided, u32(0, 1))
    with pytest.raises(ValueError, match=r"cache_lengths has shape \(2,\), the table \(1, 2\)"):
        ops.page_indices(batch_of([[7, 2]], [4, 4]), u32(0, 1))
    wide = strided.with_tables(np.zeros((1, 1), int), u32(1))
    with pytest.raises(TypeError, match="lookup_table has dtype int64, must be uint32"):
        ops.page_indices(wide, u32(0, 1))
