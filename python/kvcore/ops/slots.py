# SPDX-License-Identifier: Apache-2.0
"""Slots: the places of a step's tokens, computed once and used for every layer; rows of a batch."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import LayerPools, PagedBatch, layer_pools, own_pools
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
    """Return the slot of each of this step's tokens: page * page_size + place in the page.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        What ``fetch`` handed out, or the caller's own pools.
    row_offsets : integers [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``.
    layer : int
        Any one of the layers that the slots are for: those of a bundle have the same, so all have
        where the cache has no groups.
    out : int64 or int32 array [at least tokens], optional
        Where the slots go; what is behind the last token becomes -1, which ``append_slots`` skips.

    Returns
    -------
    int64 [tokens], or `out`
        Token j of row b stands at position ``cache_lengths[b] + j`` of its sequence.

    Raises
    ------
    IndexError
        A position without a page.
    ValueError
        Shapes that do not fit, int32 for a pool with more slots than that.
    TypeError
        Another dtype.

    Notes
    -----
    O(tokens). Build them once per step for each bundle of layers. On a GPU a position without a
    page does not raise, its slot is -1; offsets that lie there need an `out`, since how many slots
    there are is not read back.

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
    place = pools.place(Options(stream), [("out", slots)], [row_offsets])
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
    """Write the K and V of tokens to their slots, and return how many were beyond the pool.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        Its table and lengths are not read.
    layer : int
    k : array [at least len(slots), heads, head_dim]
        Of the pool's dtype, for one in nvfp4 float32, float16 or bfloat16; any library with DLPack,
        where the pool is; axes but the last may be strided, as those of a fused QKV are. Latent
        rows (MLA) that the pool keeps in two arrays come as one.
    v : array [at least len(slots), heads, v_head_dim], or None
        Likewise; None for latent rows.
    slots : int64 or int32 [n]
        From the host also for a pool on a GPU. Of the first n tokens, as ``build_slots`` returns
        them. Negative ones are padding: their tokens are not written.
    out : int32 array [1], optional
        Where the number goes; for calls that are captured into a graph.

    Returns
    -------
    int, or int32 [1] on the GPU that the pool is on, or `out`
        Tokens that were skipped because their slots are not below pages * page_size.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Shapes that do not fit, a slot twice, a float8 or int8 pool with scales, a layer
        that reads the K and V of another one.
    TypeError
        Another dtype.

    Notes
    -----
    Everything is checked before anything is written. Costs copying the bytes. On a GPU slots that
    lie there are not looked at: of one that is named twice, either token's bytes stay.
    """
    pools = own_pools(inputs, layer)
    is_nvfp4 = pools.global_scales is not None
    if not is_nvfp4 and (pools.scales is not None or pools.factors is not None):
        raise ValueError("the pool has scales, which append_slots does not write; use ops.append")
    tokens = _tokens(pools, k, v)
    options = Options(stream, threads)
    count = None if out is None else _counter(out)
    place = pools.place(options, [("k", tokens[0]), ("v", tokens[1:]), ("out", count)], [slots])
    given = any_array(slots, "slots")
    if is_nvfp4:
        transfers = nvfp4_transfers(pools, place, list(zip("kv", tokens, strict=True)))
        found = place.append_slots_nvfp4(transfers, given, count, options.threads)
    else:
        found = place.append_slots(pools.pools, given, tokens, count, options.threads)
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
        Where the new lengths go; `lengths` itself for in place.

    Returns
    -------
    uint32 [B], or `out`

    Raises
    ------
    ValueError
        Shapes that do not fit, offsets that descend, a length beyond uint32. Nothing has changed.
        Of arrays on a GPU only the shapes are looked at.
    TypeError
        Another dtype.

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
    """Move the rows of a batch that stay to the front, in place.

    Parameters
    ----------
    lookup_table : uint32 or int32 array [B, columns]
        Rows may be strided. Not one of ``fetch`` in host memory, which is read-only.
    cache_lengths : uint32 or int32 array [B], or None
    kept : integers [at most B]
        The rows that stay, ascending; a -1 (or 2^32 - 1) ends them. For a batch on a GPU they may
        come from the host, or be int32 or uint32 there.
    row_offsets : uint32 or int32 array [B + 1], optional
        Of the rows' new tokens, from 0 on, in memory of the batch's: each row keeps as many.

    Raises
    ------
    IndexError
        A row that does not exist.
    ValueError
        Rows that do not ascend, shapes that do not fit, arrays that are read-only or share memory.
        Nothing has changed.
    TypeError
        Another dtype.

    Notes
    -----
    Rows behind those that stay become empty: no page (2^32 - 1, or -1) in any column, length 0, no
    new tokens. Costs copying the bytes. On a GPU it is one launch, which a graph can capture, and
    rows that lie there are not read back: the first that does not ascend or does not exist ends
    them.

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
    """See the rows that stay as uint32 where the call runs; what lies on a GPU is not looked at."""
    array = given if isinstance(given, list | tuple) else any_array(given, "kept")
    if isinstance(array, list | tuple | np.ndarray):
        array = integers("kept", array, -1, MOST_UINT32).astype(np.uint32)
    return place.index_array(_as_uint32(array), "kept")


def _as_uint32(array: Any) -> Any:
    """See int32 as uint32, and -1 as 2^32 - 1; others as they are."""
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


def _tokens(pools: LayerPools, k: Any, v: Any) -> list[NDArray[Any]]:
    """Return the tokens of each pool."""
    keys = any_array(k, "k")
    if not pools.is_latent:
        return [keys, any_array(v, "v")]
    if v is not None:
        raise ValueError("v is given for a pool of latent rows, which has no values; pass None")
    if len(pools.pools) == 1:
        return [keys]
    rank = pools.pools[0].shape[3]
    return [keys[..., :rank], keys[..., rank:]]
