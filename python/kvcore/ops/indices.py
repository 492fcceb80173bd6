# SPDX-License-Identifier: Apache-2.0
"""List the pages of a batch for the attention kernels of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import IndexRequest, Place
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import PagedBatch, layer_pools
from kvcore.ops.layer_pools import place_of_layer
from kvcore.ops.options import array_at, documents_options, offsets_at

__all__ = ["PageIndices", "page_indices"]

_INT32 = np.dtype(np.int32)


class PageIndices(NamedTuple):
    """Hold the page ids of a batch, row after row, as int32.

    Attributes
    ----------
    indptr : int32 [B + 1]
        Row b has the pages ``indices[indptr[b] : indptr[b + 1]]``.
    indices : int32 [B * columns]
        Page ids. An entry without a page, as before a window, is 0: page 0 exists, but no kernel
        reads the entry. Entries after the last row have no meaning.
    last_page_len : int32 [B]
        Tokens in the last page of each row, 1 to page_size; 0 for a row without tokens.
    kv_lengths : int32 [B]
        Tokens of each row, the new ones included.
    """

    indptr: Any
    indices: Any
    last_page_len: Any
    kv_lengths: Any


@documents_options
def page_indices(
    inputs: RaggedKVCacheInputs | PagedBatch,
    row_offsets: Any,
    *,
    layer: SupportsIndex = 0,
    out: Sequence[Any] | None = None,
    stream: Any = None,
) -> PageIndices:
    """List the pages of a batch for FlashInfer, FlashAttention, FlashMLA and others.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
    row_offsets : integers [B + 1]
        Offsets of this step's new tokens, which are counted: their K and V are in their pages when
        the kernels read the lists.
    layer : int
        One of the layers that share the pages; any layer of a model without groups.
    out : four int32 arrays, optional
        Arrays for the results, in C order; the array of page ids may be longer than necessary.

    Returns
    -------
    PageIndices
        In the library of the batch's table, or `out`.

    Raises
    ------
    IndexError
        A layer that does not exist; a row with more tokens than its table columns can hold.
    ValueError
        Shapes that do not fit, an `out` that is read-only or strided.
    TypeError
        A wrong dtype.

    Notes
    -----
    Costs O(B + pages). On a GPU nothing is read back, so a captured call can run with other
    lengths; rows that exceed the table are cut at its last column. docs/gpu.md shows how to pass
    the lists to attention kernels.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.zeros((9, 4, 1, 8), np.float16)
    >>> table = np.array([[7, 2], [5, 9]], np.uint32)
    >>> batch = PagedBatch(pool, pool, table, np.array([4, 2], np.uint32))
    >>> found = ops.page_indices(batch, [0, 1, 2])
    >>> found.indptr.tolist(), found.indices[:3].tolist(), found.last_page_len.tolist()
    ([0, 2, 3], [7, 2, 5], [1, 3])
    """
    pools = layer_pools(inputs, layer)
    key = pools.pools[0]
    place = place_of_layer(pools, stream, (), (row_offsets, out))
    table, lengths = pools.lookup_table, pools.cache_lengths
    _check(table, lengths)
    offsets = offsets_at(place, row_offsets)
    rows = table.shape[0]
    for array in offsets if isinstance(offsets, tuple) else (offsets,):
        if array.shape != (rows + 1,):
            raise ValueError(f"row_offsets has shape {array.shape}, must be ({rows + 1},)")
    targets = _targets(place, out, rows, table.size)
    place.page_indices(IndexRequest(table, lengths, key.shape[1], key.shape[0]), offsets, targets)
    if out is not None:
        return PageIndices(*out)
    return PageIndices(*(place.in_library_of(inputs.lookup_table, array) for array in targets))


def _check(table: Any, lengths: Any) -> None:
    for name, array, rank in (("lookup_table", table, 2), ("cache_lengths", lengths, 1)):
        if array.dtype != np.uint32:
            raise TypeError(f"{name} has dtype {array.dtype}, must be uint32")
        if array.ndim != rank or array.shape[0] != table.shape[0]:
            raise ValueError(f"{name} has shape {array.shape}, the table {table.shape}")
    if table.size and table.strides[1] != table.itemsize:
        raise ValueError("lookup_table is strided along its last axis, must be contiguous there")


def _targets(place: Place, out: Sequence[Any] | None, rows: int, entries: int) -> list[Any]:
    sizes = rows + 1, entries, rows, rows
    if out is None:
        return [place.empty((size,), _INT32) for size in sizes]
    if not isinstance(out, tuple | list):
        raise TypeError(f"out is a {type(out).__name__}, must be four arrays")
    if len(out) != len(sizes):
        raise ValueError(f"out holds {len(out)} items, must hold 4")
    found = [array_at(place, given, f"out[{i}]") for i, given in enumerate(out)]
    for i, (array, size) in enumerate(zip(found, sizes, strict=True)):
        if array.dtype != _INT32:
            raise TypeError(f"out[{i}] has dtype {array.dtype}, must be int32")
        fits = array.ndim == 1 and (array.size == size or (i == 1 and array.size > size))
        if not (fits and array.flags.c_contiguous and is_writable(array)):
            raise ValueError(
                f"out[{i}] has shape {array.shape}, must be ({size},), writable and in C order"
            )
    return found
