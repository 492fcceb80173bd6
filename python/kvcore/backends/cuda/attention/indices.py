# SPDX-License-Identifier: Apache-2.0
"""Page lists of a batch from a page table on a device, row after row, with no read-back."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvcore.backends.cuda.attention.launch import launch
from kvcore.backends.cuda.attention.pointers import pointer_to, strides_of
from kvcore.backends.protocol import IndexRequest, Place

__all__ = ["write_page_indices"]

_BLOCK = 256


@triton.jit(
    do_not_specialize=["num_rows", "columns", "page_size"],
    do_not_specialize_on_alignment=["lengths", "offsets", "indptr", "last", "kv_lengths"],
)
def _count(
    lengths,  # uint32 [rows]
    lengths_stride,
    offsets,  # uint32 [rows + 1]
    indptr,  # int32 [rows + 1]
    last,  # int32 [rows]
    kv_lengths,  # int32 [rows]
    num_rows,
    columns,
    page_size,
    block: tl.constexpr,
):
    """Write the offset of each row's pages; a single program sums over all rows."""
    carried = 0
    tl.store(indptr, 0)
    for begin in range(0, num_rows, block):
        row = begin + tl.arange(0, block)
        is_row = row < num_rows
        new = tl.load(offsets + row + 1, mask=is_row, other=0).to(tl.int32)
        new -= tl.load(offsets + row, mask=is_row, other=0).to(tl.int32)
        length = tl.load(lengths + row * lengths_stride, mask=is_row, other=0).to(tl.int32) + new
        count = tl.minimum((length + page_size - 1) // page_size, columns)
        length = tl.minimum(length, columns * page_size)
        ends = carried + tl.cumsum(count, 0)
        tl.store(indptr + row + 1, ends, mask=is_row)
        tl.store(kv_lengths + row, length, mask=is_row)
        tl.store(last + row, length - tl.maximum(count - 1, 0) * page_size, mask=is_row)
        carried += tl.sum(count, 0)


@triton.jit(
    do_not_specialize=["table_stride", "num_pages"],
    do_not_specialize_on_alignment=["table", "indptr", "indices"],
)
def _list(
    table,  # uint32 [rows, columns]
    table_stride,
    indptr,  # int32 [rows + 1]
    indices,  # int32 [rows * columns]
    num_pages,
    block: tl.constexpr,
):
    """Write a block of a row's pages."""
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    column = tl.program_id(1) * block + tl.arange(0, block)
    entry = table + row.to(tl.int64) * table_stride + column
    page = tl.load(entry, mask=column < count, other=0).to(tl.int64)
    page = tl.where(page < num_pages, page, 0)
    tl.store(indices + begin + column, page.to(tl.int32), mask=column < count)


def write_page_indices(request: IndexRequest, offsets: Any, out: Any, place: Place) -> None:
    """Write the page lists of a batch; see ``ops.page_indices``."""
    table = request.table
    rows, columns = table.shape
    indptr, indices, last, kv_lengths = map(pointer_to, out)
    counted = (
        pointer_to(request.lengths),
        strides_of(request.lengths, 1)[0],
        pointer_to(offsets),
        indptr,
        last,
        kv_lengths,
        rows,
        columns,
        request.page_size,
        _BLOCK,
    )
    launch(_count, (1, 1, 1), counted, place, num_warps=4)
    if table.size:
        listed = pointer_to(table), strides_of(table, 1)[0], indptr, indices, request.num_pages
        grid = rows, -(-columns // _BLOCK), 1
        launch(_list, grid, (*listed, _BLOCK), place, num_warps=4)
