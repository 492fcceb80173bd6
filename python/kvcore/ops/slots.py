# SPDX-License-Identifier: Apache-2.0
"""Slots: the places of a step's tokens, computed once and used for every layer."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore._hotpath import RaggedKVCacheInputs
from kvcore.arrays import host_array
from kvcore.ops.batch import LayerPools, PagedBatch, layer_pools

__all__ = ["advance_lengths", "append_slots", "build_slots"]


def build_slots(
    inputs: RaggedKVCacheInputs | PagedBatch, row_offsets: Any, *, out: Any = None
) -> Any:
    """Answer the slot of each of this step's tokens: page * page_size + place in the page.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        What ``fetch`` handed out, or the caller's own pools.
    row_offsets : uint32 [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``.
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
        Another dtype, or an array on a GPU.

    Notes
    -----
    O(tokens). The same for all layers: build them once per step.

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
    pools = layer_pools(inputs, 0)
    offsets = host_array(row_offsets, "row_offsets")
    slots = None if out is None else _writable(out, "out")
    tables = pools.lookup_table, pools.cache_lengths
    built = _core.build_slots(pools.pools[0], *tables, offsets, slots)
    return built if out is None else out


def append_slots(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    k: Any,
    v: Any,
    slots: Any,
    *,
    threads: int = 1,
) -> int:
    """Write the K and V of tokens to their slots, and answer how many were beyond the pool.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        Its table and lengths are not read.
    layer : int
    k : array [at least len(slots), heads, head_dim]
        Of the pool's dtype, in host memory, any library with DLPack; axes but the last may be
        strided, as those of a fused QKV are. Latent rows (MLA) that the pool keeps in two arrays
        come as one.
    v : array [at least len(slots), heads, v_head_dim], or None
        Likewise; None for latent rows.
    slots : int64 or int32 [n]
        Of the first n tokens, as ``build_slots`` answers them. Negative ones are padding: their
        tokens are not written.
    threads : int
        Threads to use, the caller's included.

    Returns
    -------
    int
        Tokens that were skipped because their slots are not below pages * page_size.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Shapes that do not fit, a slot twice, a pool with scales.
    TypeError
        Another dtype, or an array on a GPU.

    Notes
    -----
    Everything is checked before anything is written. Costs copying the bytes.
    """
    pools = layer_pools(inputs, layer)
    if pools.scales is not None or pools.factors is not None:
        raise ValueError("the pool has scales, which append_slots does not write; use ops.append")
    tokens = _tokens(pools, k, v)
    return _core.append_slots(pools.pools, host_array(slots, "slots"), tokens, threads)


def advance_lengths(lengths: Any, row_offsets: Any, *, active: Any = None, out: Any = None) -> Any:
    """Add a step's new tokens to the lengths of a batch.

    Parameters
    ----------
    lengths : uint32 [B]
    row_offsets : uint32 [B + 1]
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
    TypeError
        Another dtype, or an array on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> lengths, offsets = np.array([5, 9], np.uint32), np.array([0, 3, 4], np.uint32)
    >>> ops.advance_lengths(lengths, offsets).tolist()
    [8, 10]
    """
    before = host_array(lengths, "lengths")
    if out is None:
        out = np.empty_like(before)
    flags = None if active is None else host_array(active, "active")
    offsets = host_array(row_offsets, "row_offsets")
    _core.advance_lengths(before, offsets, flags, _writable(out, "out"))
    return out


def _writable(given: Any, name: str) -> NDArray[Any]:
    array = host_array(given, name)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, must be writable")
    return array


def _tokens(pools: LayerPools, k: Any, v: Any) -> list[NDArray[Any]]:
    """Answer the tokens of each pool."""
    keys = host_array(k, "k")
    if not pools.is_latent:
        return [keys, host_array(v, "v")]
    if v is not None:
        raise ValueError("v is given for a pool of latent rows, which has no values; pass None")
    if len(pools.pools) == 1:
        return [keys]
    rank = pools.pools[0].shape[3]
    return [keys[..., :rank], keys[..., rank:]]
