# SPDX-License-Identifier: Apache-2.0
"""Compute a step's slots once for all layers; advance and compact the rows of a batch."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import PagedBatch, layer_pools
from kvcore.ops.layer_pools import latent_transfers, place_of_layer
from kvcore.ops.nvfp4_calls import nvfp4_transfers
from kvcore.ops.options import Options, documents_options, offsets_at
from kvcore.support.arguments import MOST_UINT32, integers

__all__ = ["advance_lengths", "append_slots", "build_slots", "compact_table"]


@documents_options
def build_slots(
    inputs: RaggedKVCacheInputs | PagedBatch,
    row_offsets: Any,
    *,
    layer: SupportsIndex = 0,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Return the slot of each of this step's tokens: page * page_size + offset in the page.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        The inputs that ``fetch`` returned, or the caller's own pools.
    row_offsets : integers [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``.
    layer : int
        Any of the layers that use the slots. All layers of a bundle have the same slots, so without
        groups all layers of the cache have the same slots.
    out : int64 or int32 array [at least tokens], optional
        Array for the slots; elements after the last token become -1, which ``append_slots`` skips.

    Returns
    -------
    int64 [tokens], or `out`
        Token j of row b has position ``cache_lengths[b] + j`` in its sequence.

    Raises
    ------
    IndexError
        A position without a page.
    ValueError
        Shapes that do not fit, int32 for a pool with more slots than int32 can hold.
    TypeError
        A wrong dtype.

    Notes
    -----
    O(tokens). Build the slots once per step for each bundle of layers. On a GPU a position without
    a page does not raise: its slot is -1. Offsets on a GPU need an `out`, because the number of
    slots is not read back.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.zeros((4, 2, 1, 3), np.float32)  # pages of 2 tokens
    >>> table, lengths = np.array([[3, 0]], np.uint32), np.array([1], np.uint32)
    >>> batch = PagedBatch(pool, pool.copy(), table, lengths)
    >>> ops.build_slots(batch, np.array([0, 2], np.uint32)).tolist()
    [7, 0]
    """
    pools = layer_pools(inputs, layer)
    slots = None if out is None else _writable(out, "out")
    place = place_of_layer(pools, stream, [("out", slots)], [row_offsets])
    offsets = offsets_at(place, row_offsets)
    tables = pools.lookup_table, pools.cache_lengths
    built = place.build_slots(pools.pools[0], *tables, offsets, slots)
    return built if out is None else out


@documents_options
def append_slots(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    k: Any,
    v: Any,
    slots: Any,
    *,
    out: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> Any:
    """Write the K and V of tokens to their slots; return the number of slots beyond the pool.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        The table and the lengths are not read.
    layer : int
    k : array [at least len(slots), heads, head_dim]
        An array of the pool's dtype, or for a pool in nvfp4 of float32, float16 or bfloat16. It may
        come from any DLPack library, on the pool's device. All axes but the last may be strided, as
        in a fused QKV. Latent rows (MLA) that the pool stores in two arrays are given as one array.
    v : array [at least len(slots), heads, v_head_dim], or None
        Likewise; None for latent rows.
    slots : int64 or int32 [n]
        Slots of the first n tokens, as ``build_slots`` returns them. They may come from the host,
        also for a pool on a GPU. A negative slot is padding: its token is not written.
    out : int32 array [1], optional
        Array for the returned number, for calls that are captured into a graph.

    Returns
    -------
    int, or int32 [1] on the GPU that the pool is on, or `out`
        Number of tokens that were skipped because their slots are not below pages * page_size.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Shapes that do not fit, a slot twice, a float8 or int8 pool with scales, a layer that reads
        the K and V of another layer.
    TypeError
        A wrong dtype.

    Notes
    -----
    All arguments are checked before anything is written. The call copies the bytes. Slots on a GPU
    are not checked: if a slot occurs twice, the bytes of either token remain.
    """
    pools = layer_pools(inputs, layer, is_written=True)
    is_nvfp4 = pools.global_scales is not None
    if not is_nvfp4 and (pools.scales is not None or pools.factors is not None):
        raise ValueError("the pool has scales, which append_slots does not write; use ops.append")
    if pools.is_latent:
        tokens = [each[-1] for each in latent_transfers(pools, k, v)]
    else:
        tokens = [any_array(k, "k"), any_array(v, "v")]
    count = None if out is None else _counter(out)
    place = place_of_layer(
        pools, stream, [("k", tokens[0]), ("v", tokens[1:]), ("out", count)], [slots]
    )
    given = any_array(slots, "slots")
    if is_nvfp4:
        transfers = nvfp4_transfers(pools, place, list(zip("kv", tokens, strict=True)))
        found = place.append_slots_nvfp4(transfers, given, count, threads)
    else:
        found = place.append_slots(pools.pools, given, tokens, count, threads)
    return found if out is None else out


@documents_options
def advance_lengths(
    lengths: Any, row_offsets: Any, *, active: Any = None, out: Any = None, stream: Any = None
) -> Any:
    """Add a step's new tokens to the lengths of a batch.

    Parameters
    ----------
    lengths : uint32 [B]
    row_offsets : integers [B + 1]
        Row b has ``row_offsets[b + 1] - row_offsets[b]`` new tokens.
    active : bool [B], optional
        Rows that grow; all by default.
    out : uint32 array [B], optional
        Array for the new lengths; pass `lengths` itself to update in place.

    Returns
    -------
    uint32 [B], or `out`

    Raises
    ------
    ValueError
        Shapes that do not fit, offsets that descend, a length beyond uint32. Nothing has changed.
        For arrays on a GPU only the shapes are checked.
    TypeError
        A wrong dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> lengths, offsets = np.array([5, 9], np.uint32), np.array([0, 3, 4], np.uint32)
    >>> ops.advance_lengths(lengths, offsets).tolist()
    [8, 10]
    """
    before = any_array(lengths, "lengths")
    flags = None if active is None else any_array(active, "active")
    target = None if out is None else _writable(out, "out")
    named = {"lengths": before, "active": flags, "out": target}
    place = Options(stream).place(named, row_offsets)
    offsets = offsets_at(place, row_offsets)
    if target is None:
        target = place.empty(before.shape, before.dtype, "the lengths")
    place.advance_lengths(before, offsets, flags, target)
    return target if out is None else out


@documents_options
def compact_table(
    lookup_table: Any,
    cache_lengths: Any,
    kept: Any,
    *,
    row_offsets: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Move the remaining rows of a batch to the front, in place.

    Parameters
    ----------
    lookup_table : uint32 or int32 array [B, columns]
        Rows may be strided. A table of ``fetch`` in host memory is read-only and cannot be passed.
    cache_lengths : uint32 or int32 array [B], or None
    kept : integers [at most B]
        The remaining rows, ascending; the first -1 (or 2^32 - 1) ends the list. For a batch on a
        GPU they may come from the host, or be int32 or uint32 on the GPU.
    row_offsets : uint32 or int32 array [B + 1], optional
        Offsets of the rows' new tokens, starting at 0, on the batch's device: each row keeps its
        number of new tokens.

    Raises
    ------
    IndexError
        A row that does not exist.
    ValueError
        Rows that do not ascend, shapes that do not fit, arrays that are read-only or share memory.
        Nothing has changed.
    TypeError
        A wrong dtype.

    Notes
    -----
    The rows after the remaining rows become empty: no page (2^32 - 1, or -1) in any column, length
    0, no new tokens. The call copies the bytes. On a GPU the call is one launch, which a graph can
    capture. Row indices on the GPU are not read back: the first index that does not ascend or does
    not exist ends the list.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> table, lengths = np.array([[3, 4], [7, 8], [5, 9]], np.int32), np.array([5, 6, 8], np.int32)
    >>> ops.compact_table(table, lengths, [0, 2])
    >>> table.tolist(), lengths.tolist()
    ([[3, 4], [5, 9], [-1, -1]], [5, 8, 0])
    """
    named = {"lookup_table": _as_uint32(_writable(lookup_table, "lookup_table"))}
    for name, given in {"cache_lengths": cache_lengths, "row_offsets": row_offsets}.items():
        if given is not None:
            named[name] = _as_uint32(_writable(given, name))
    options = Options(stream, threads)
    place = options.place(named, kept)
    beside = named.get("cache_lengths"), named.get("row_offsets")
    rows = _kept_at(place, kept)
    last = place.launch_args(options.threads)
    place.kernels.compact_table(named["lookup_table"], *beside, rows, *last)


def _kept_at(place: Place, given: Any) -> Any:
    """Return the remaining rows as uint32 on the call's device; unchecked on a GPU."""
    array = given if isinstance(given, list | tuple) else any_array(given, "kept")
    if isinstance(array, list | tuple | np.ndarray):
        array = integers("kept", array, -1, MOST_UINT32).astype(np.uint32)
    return place.index_array(_as_uint32(array), "kept")


def _as_uint32(array: Any) -> Any:
    """View int32 as uint32, and -1 as 2^32 - 1; return other dtypes unchanged."""
    return array.view(np.uint32) if array.dtype == np.int32 else array


def _writable(given: Any, name: str) -> Any:
    array = any_array(given, name)
    if not is_writable(array):
        raise ValueError(f"{name} is read-only, must be writable")
    return array


def _counter(given: Any) -> Any:
    array = _writable(given, "out")
    if array.shape != (1,) or array.dtype != np.int32:
        raise ValueError(
            f"out has shape {array.shape} and dtype {array.dtype}, must be int32 (1,): the number "
            f"of tokens that were skipped"
        )
    return array
