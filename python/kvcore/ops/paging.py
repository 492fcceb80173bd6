# SPDX-License-Identifier: Apache-2.0
"""Tokens into pages, and out of them."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore._hotpath import RaggedKVCacheInputs
from kvcore.arrays import host_array
from kvcore.dtypes import numpy_dtype
from kvcore.ops.batch import LayerPools, PagedBatch, layer_pools
from kvcore.ops.quantization import dequantize, quantize

__all__ = ["append", "gather"]

_NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
_WIDE = ("float32", "float16", "bfloat16")


def append(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    k: Any,
    v: Any,
    row_offsets: Any,
    *,
    scale: Any = None,
    threads: int = 1,
) -> None:
    """Write the K and V of this step's tokens into their pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        What ``fetch`` handed out, or the caller's own pools.
    layer : int
    k : array [tokens, heads, head_dim]
        In host memory, any library with DLPack; axes but the last may be strided, as those of a
        fused QKV are. Of the pool's dtype; a float8 or int8 pool also takes float32, float16 and
        bfloat16 and quantises them.
    v : array [tokens, heads, v_head_dim], or None
        Likewise; None for pools of latent rows (MLA).
    row_offsets : uint32 [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``.
    scale : float or array float32 [heads], or a pair of them for K and V, optional
        For a float8 or int8 pool without scales of its own: a stored code times it is the value.
    threads : int
        Threads to use, the caller's included.

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page.
    ValueError
        Shapes that do not fit, a `v` that is missing or too many, a bad `scale`.
    TypeError
        Another dtype, or an array on a GPU.

    Notes
    -----
    Token j of row b goes to position ``cache_lengths[b] + j``. Everything is checked before
    anything is written. Costs copying the bytes, and for quantised pools reading them once more.
    """
    pools = layer_pools(inputs, layer)
    offsets = host_array(row_offsets, "row_offsets")
    sources = _sources(pools, k, v)
    factors = _pair(scale, len(sources))
    codes, scales = [], []
    for i, (name, source) in enumerate(sources):
        stored, scale_of_token = _stored(name, source, pools, i, factors[i], threads)
        codes.append(stored)
        if scale_of_token is not None:
            scales.append(scale_of_token)
    targets = [*pools.pools, *(pools.scales or [])]
    table, lengths = pools.lookup_table, pools.cache_lengths
    _core.append_tokens(targets, table, lengths, offsets, [*codes, *scales], threads)


def gather(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    *,
    lengths: Any = None,
    out: Any = None,
    threads: int = 1,
) -> tuple[Any, Any, NDArray[np.uint32]]:
    """Read the K and V of a batch out of their pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
    layer : int
    lengths : uint32 [B], optional
        Tokens of each row; ``cache_lengths`` by default.
    out : (array, array or None), optional
        Where K [tokens, heads, head_dim] and V go: of the pool's dtype, or of float32, float16 or
        bfloat16 for a pool with scales.
    threads : int
        Threads to use, the caller's included.

    Returns
    -------
    k : array [tokens, heads, head_dim]
        One row behind the other; of the pool's dtype, float32 where there are scales.
    v : array [tokens, heads, v_head_dim], or None
        None for latent rows (MLA).
    row_offsets : uint32 [B + 1]

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page.
    ValueError, TypeError
        Arrays that do not fit.
    """
    pools = layer_pools(inputs, layer)
    taken = pools.cache_lengths if lengths is None else host_array(lengths, "lengths")
    if taken.shape != pools.cache_lengths.shape:
        raise ValueError(
            f"lengths has shape {taken.shape}, must be {pools.cache_lengths.shape}: one per row"
        )
    offsets = np.zeros(len(taken) + 1, np.uint32)
    np.cumsum(taken, out=offsets[1:])
    results = _pair(out, len(pools.pools))
    read = [_read(pools, i, offsets, results[i], threads) for i in range(len(pools.pools))]
    return read[0], read[1] if len(read) == 2 else None, offsets


def _sources(pools: LayerPools, k: Any, v: Any) -> list[tuple[str, NDArray[Any]]]:
    given = [("k", k)] if len(pools.pools) == 1 else [("k", k), ("v", v)]
    if len(given) == 1 and v is not None:
        raise ValueError("v is given for a pool of latent rows, which has no values; pass None")
    return [(name, host_array(array, name)) for name, array in given]


def _pair(given: Any, count: int) -> list[Any]:
    """Answer one entry per pool of an argument that may be a pair."""
    if isinstance(given, tuple):
        if len(given) < count:
            raise ValueError(f"a tuple of {len(given)} is given for {count} pools")
        return list(given)
    return [given] * count


def _stored(
    name: str, source: NDArray[Any], pools: LayerPools, i: int, scale: Any, threads: int
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Answer the tokens in the pool's dtype, and their scales where the pool holds those."""
    dtype = pools.pools[i].dtype
    if dtype.name not in _NARROW or source.dtype == dtype:
        if scale is not None:
            raise ValueError(f"scale is given for {name} of dtype {source.dtype}, pool {dtype}")
        if pools.scales is not None:
            raise TypeError(
                f"{name} has dtype {source.dtype}; a pool with scales takes {', '.join(_WIDE)}"
            )
        return source, None
    if pools.scales is not None and scale is None:
        group = pools.pools[i].shape[3] // pools.scales[i].shape[3]
        return quantize(source, dtype.name, group, threads=threads)
    if pools.scales is not None:
        raise ValueError("scale is given for a pool that holds a scale per token and head")
    return _quantized_by(name, source, dtype.name, 1.0 if scale is None else scale, threads), None


def _quantized_by(
    name: str, source: NDArray[Any], narrow: str, scale: Any, threads: int
) -> NDArray[Any]:
    if source.dtype.name not in _WIDE or source.ndim != 3:
        raise TypeError(
            f"{name} has dtype {source.dtype} and {source.ndim} axes, must be one of "
            f"{', '.join(_WIDE)} with 3"
        )
    rows, heads, dim = source.shape
    factors = np.asarray(scale, np.float32)
    if (
        factors.shape not in ((), (1,), (heads,))
        or not (np.isfinite(factors) & (factors > 0)).all()
    ):
        raise ValueError(f"scale is {scale!r}, must be positive and finite, one or one per head")
    factors = np.ascontiguousarray(np.broadcast_to(factors, (heads,)))
    codes = np.empty(source.shape, numpy_dtype(narrow))
    dense = np.ascontiguousarray(source)
    _core.quantize_by(rows, heads, dim, dense, source.dtype.name, codes, narrow, factors, threads)
    return codes


def _read(pools: LayerPools, i: int, offsets: NDArray[np.uint32], out: Any, threads: int) -> Any:
    pool = pools.pools[i]
    shape = (int(offsets[-1]), *pool.shape[2:])
    if pools.scales is None:
        codes = np.empty(shape, pool.dtype) if out is None else host_array(out, "out")
        _core.gather_tokens([pool], pools.lookup_table, offsets, [codes], threads)
        return codes if out is None else out
    codes = np.empty(shape, pool.dtype)
    scales = np.empty((*shape[:2], pools.scales[i].shape[3]), np.float32)
    _core.gather_tokens(
        [pool, pools.scales[i]], pools.lookup_table, offsets, [codes, scales], threads
    )
    if out is None:
        return dequantize(codes, scales, "float32", threads=threads)
    dequantize(codes, scales, host_array(out, "out").dtype.name, out=out, threads=threads)
    return out
