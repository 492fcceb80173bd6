# SPDX-License-Identifier: Apache-2.0
"""Copy pages between caches of different layouts, and the first tokens of pages within a pool."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import Place, Tensor
from kvcore.ops.layouts import PACKED, PoolLayout, tensors_of
from kvcore.ops.options import Options, documents_options
from kvcore.ops.pages import integer_array
from kvcore.support.arguments import integer

__all__ = ["copy_partial", "transfer"]


@documents_options
def transfer(
    source: PoolLayout,
    destination: PoolLayout,
    source_ids: Any,
    destination_ids: Any,
    *,
    layers: SupportsIndex | range | None = None,
    max_blocks: SupportsIndex = 0,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Copy pages from one cache to another, between any two layouts.

    Parameters
    ----------
    source, destination : PoolLayout
        Caches of the same sizes and dtype, which share no memory; only the number of pages may
        differ. A cache of unsigned integers also fits a dtype of the same width.
    source_ids, destination_ids : integers [n]
        Page ``source_ids[i]`` is copied to page ``destination_ids[i]``; no destination occurs
        twice. A pair with a negative id is padding and is not copied.
    layers : int or range, optional
        One layer, or a range of step 1; all by default.
    max_blocks : int
        The most thread blocks of a GPU that the copy uses, so that a model can run at the same
        time; 0 chooses the largest useful number.

    Raises
    ------
    IndexError
        A page or layer that a cache does not have.
    ValueError
        Sizes that differ, a destination twice, shared memory, read-only or strided rows, a
        destination whose elements share memory. Nothing has been copied.
    TypeError
        Dtypes that differ, or ids that are not integers.

    Notes
    -----
    The call copies the bytes. If elements have the same order on both sides, they move in the
    longest possible runs: rows of a head, tokens, pages, neighbouring pages. From and to "vllm",
    pages are transposed. On a GPU this is fast if page size and head size are multiples of 8 (of 4
    for elements of four bytes), and addresses and strides are multiples of 16 bytes. Otherwise V is
    copied element by element, which is several times slower.

    On a GPU the call enqueues its work and does not wait. One of the caches may be in pinned host
    memory, which the caller keeps until the copy is done. Ids on the GPU are int64 and are not
    checked: a pair with a page outside its cache is skipped.
    """
    for name, given in (("source", source), ("destination", destination)):
        if not isinstance(given, PoolLayout):
            raise TypeError(f"{name} is a {type(given).__name__}, must be a PoolLayout")
    _check_dtypes(source, destination)
    layer_range = _layer_range(layers, source.layers)
    options = Options(stream, threads)
    place = _common_place(source, destination, options, source_ids, destination_ids)
    pairs = _pairs(place, source_ids, destination_ids)
    limit = min(integer("max_blocks", max_blocks, 0), 2**31 - 1)
    caches = _cache(source), _cache(destination)
    place.transfer(*caches, pairs, layer_range, limit, options.threads)


@documents_options
def copy_partial(blocks: Any, copies: Any, *, stream: Any = None, threads: int = 1) -> None:
    """Copy the first tokens of pages within a pool, in all layers.

    Parameters
    ----------
    blocks : array [pages, kv, layers, page_size, heads, head_dim], pair of arrays, or PoolLayout
        The pool; any layout but "vllm".
    copies : integers [n, 3]
        Source page, destination page and number of tokens of each copy, with the result of copies
        in this order: the columns of ``take_copies`` after its first column. For a pool on a GPU
        they may come from the host, or be int64 on the GPU. Copies on the GPU are not checked and
        run in any order; a copy with a page outside the pool is skipped, and at most one page of
        tokens is copied.

    Raises
    ------
    IndexError
        A page outside the pool.
    ValueError
        More tokens than a page has, a page copied to itself, a read-only pool, strided rows, or
        elements that share memory. Nothing has been copied.
    TypeError
        Copies that are not integers; `blocks` that is not an array.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> pool = np.arange(8).reshape(2, 1, 1, 4, 1, 1)  # 2 pages of 4 tokens
    >>> ops.copy_partial(pool, [(0, 1, 3)])
    >>> pool.ravel().tolist()
    [0, 1, 2, 3, 0, 1, 2, 7]
    """
    pool = blocks if isinstance(blocks, PoolLayout) else PoolLayout(blocks, "max")
    if pool.layout == PACKED:
        raise ValueError("the pool has the layout 'vllm'; transfer its pages to another pool first")
    tensors = tensors_of(pool)
    options = Options(stream, threads)
    place = options.place({"blocks": [array for tensor in tensors for array in tensor]}, copies)
    wanted = place.index_array(integer_array("copies", copies, 3), "copies")
    place.copy_partial(tensors, wanted, options.threads)


# ---- inside --------------------------------------------------------------------------------------


def _cache(pool: PoolLayout) -> tuple[list[Tensor], bool]:
    """Return a cache's tensors, and whether K is packed."""
    return tensors_of(pool), pool.layout == PACKED


def _common_place(
    source: PoolLayout, destination: PoolLayout, options: Options, *ids: Any
) -> Place:
    """Return the device of both caches; pinned host memory of one counts as the GPU's."""
    named = {
        name: [array for tensor in tensors_of(pool) for array in tensor]
        for name, pool in (("source", source), ("destination", destination))
    }
    on_gpu = {n: given for n, given in named.items() if not isinstance(given[0], np.ndarray)}
    place = options.place(on_gpu or named, *ids)
    for name, given in named.items():
        if on_gpu and name not in on_gpu:
            _check_pinned(place, given, name)
    return place


def _check_pinned(place: Place, arrays: list[NDArray[Any]], name: str) -> None:
    """Raise ValueError unless a GPU can read and write the host's arrays."""
    if not all(map(place.reaches, arrays)):
        raise ValueError(
            f"the {name} is in host memory that is not pinned, the other cache on a GPU; allocate "
            f"it with device='pinned'"
        )


def _pairs(place: Place, source_ids: Any, destination_ids: Any) -> Any:
    """Return source and destination pages, int64 [n, 2]."""
    sources = integer_array("source_ids", source_ids, 1)
    destinations = integer_array("destination_ids", destination_ids, 1)
    for name, ids in (("source_ids", sources), ("destination_ids", destinations)):
        if ids.ndim != 1:
            raise ValueError(f"{name} has shape {ids.shape}, must be (n,)")
    if len(sources) != len(destinations):
        raise ValueError(
            f"source_ids has {len(sources)} entries and destination_ids {len(destinations)}, "
            f"must be the same number"
        )
    return place.page_pairs(sources, destinations)


def _check_dtypes(source: PoolLayout, destination: PoolLayout) -> None:
    mine, theirs = source.dtype, destination.dtype
    is_raw = "u" in (mine.kind, theirs.kind) and mine.itemsize == theirs.itemsize
    if mine != theirs and not is_raw:
        raise TypeError(
            f"the source has dtype {mine}, the destination {theirs}; must be equal, or one of "
            f"them unsigned integers of the same width"
        )


def _layer_range(layers: SupportsIndex | range | None, count: int) -> tuple[int, int]:
    if layers is None:
        return 0, count
    if isinstance(layers, range):
        if not layers:
            return 0, 0
        if layers.step != 1:
            raise ValueError(f"layers are {layers}, must be a range of step 1")
        first, end = layers.start, layers.stop
    else:
        first = integer("layers", layers)
        end = first + 1
    if not 0 <= first < end <= count:
        raise IndexError(f"layers {first} .. {end - 1} are asked for, the caches have {count}")
    return first, end - first
