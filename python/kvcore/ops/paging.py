# SPDX-License-Identifier: Apache-2.0
"""Write tokens into pages, and read them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array, call_array
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import LayerPools, PagedBatch, given_pool, layer_pools
from kvcore.ops.factors import head_factors
from kvcore.ops.layer_pools import (
    Transfer,
    latent_transfers,
    place_of_layer,
    plain_transfers,
)
from kvcore.ops.nvfp4_calls import nvfp4_transfers
from kvcore.ops.options import array_at, documents_options, offsets_at
from kvcore.support.arguments import MOST_UINT32, integers
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

__all__ = ["append", "gather", "scatter"]


@documents_options
def append(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    k: Any,
    v: Any,
    row_offsets: Any,
    *,
    scale: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Write the K and V of this step's tokens into their pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        The inputs that ``fetch`` returned, or the caller's own pools.
    layer : int
    k : array [tokens, heads, head_dim]
        An array of any DLPack library, on the pool's device. All axes but the last may be strided,
        as in a fused QKV. It has the pool's dtype. A float8 or int8 pool also takes float32,
        float16 and bfloat16, and ``append`` quantises them; a pool in nvfp4 takes only these three.
        Latent keys (MLA) have one head and all their elements.
    v : array [tokens, heads, v_head_dim], or None
        Likewise; None for pools of latent rows.
    row_offsets : integers [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``. Offsets may come from the
        host, also for a pool on a GPU. Offsets on a GPU may end before the tokens do; the remaining
        tokens are padding.
    scale : float or array float32 [heads], or a pair of them for K and V, optional
        For a float8 or int8 pool without scales of its own: a stored code times `scale` is the
        value.

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page.
    ValueError
        Shapes that do not fit, a `v` that is missing or must be omitted, a bad `scale`; a pool or
        scales that are read-only, whose elements share memory (as in broadcast arrays) or that
        share memory with each other; a layer that reads the K and V of another layer. Nothing has
        been written.
    TypeError
        A wrong dtype.

    Notes
    -----
    Token j of row b is written to position ``cache_lengths[b] + j``. A pool with scales gets a
    scale for each group of elements, as from ``quantize``; without scales, codes are the values
    themselves. A block in nvfp4 also gets its scale, in addition to the global scale of the
    PagedBatch. All arguments are checked before anything is written. The call reads the tokens once
    and writes their bytes, for every layout and dtype.

    On a GPU the call enqueues its work and does not wait. Arrays on the GPU are not read back, so
    positions without a page do not raise: their tokens are skipped.
    """
    pools = layer_pools(inputs, layer, is_written=True)
    _write(pools, pools.cache_lengths, k, v, row_offsets, scale, stream, threads)


def scatter(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    k: Any,
    v: Any,
    row_offsets: Any,
    *,
    scale: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Write K and V of whole sequences into their pages, from position 0: the inverse of gather.

    Parameters
    ----------
    inputs, layer, k, v, row_offsets, scale, stream, threads
        As for ``append``, but ``cache_lengths`` are not read.

    Raises
    ------
    IndexError, ValueError, TypeError
        As for ``append``.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool, x = np.zeros((2, 4, 1, 8), np.int8), np.ones((3, 1, 8), np.float32)
    >>> batch = PagedBatch(pool, pool.copy(), np.array([[1]], np.uint32), np.array([0], np.uint32))
    >>> ops.scatter(batch, 0, x, x, np.array([0, 3], np.uint32), scale=0.5)
    >>> pool[1, :, 0, 0].tolist()
    [2, 2, 2, 0]
    """
    pools = layer_pools(inputs, layer, is_written=True)
    _write(pools, None, k, v, row_offsets, scale, stream, threads)


@documents_options
def gather(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    *,
    lengths: Any = None,
    dtype: str | None = None,
    out: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> tuple[Any, Any, Any]:
    """Read the K and V of a batch out of their pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
    layer : int
    lengths : integers [B], optional
        Tokens of each row; ``cache_lengths`` by default. They may come from the host, also for a
        pool on a GPU; on the GPU they are uint32.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Dtype of the results. By default the pool's, or float32 if the pool has scales.
    out : (array, array or None[, array]), optional
        Arrays for K [tokens, heads, head_dim] and V, instead of `dtype`; all axes but the last may
        be strided. A third array receives the row offsets, uint32 [B + 1] in C order.

    Returns
    -------
    k : array [tokens, heads, head_dim]
        Row after row, in the library of a PagedBatch's pools; latent keys (MLA) are whole.
    v : array [tokens, heads, v_head_dim], or None
        None for latent rows.
    row_offsets : uint32 [B + 1]
        On the pool's GPU, if it has one.

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page.
    ValueError
        Arrays that do not fit, negative `lengths` or more than 2^32 - 1 tokens, `dtype` together
        with `out`, an `out` that is read-only, whose elements share memory or that overlaps an
        input. Nothing has been written.
    TypeError
        A wrong dtype; `lengths` that are not integers.

    Notes
    -----
    Codes are multiplied by their scales and rounded to the nearest value. The call reads the bytes
    once and writes the results.

    On a GPU the number of tokens must be known before the results are allocated. It is known if
    `lengths` come from the host, or if `out` is given, which may be longer than the tokens;
    otherwise the host waits for the stream once. Tokens without a page do not raise; their elements
    of the result stay unchanged.
    """
    pools = layer_pools(inputs, layer)
    place = place_of_layer(pools, stream, (), (lengths, out))
    taken = _lengths(pools, lengths)
    room = _room_for_offsets(place, out, len(taken))
    offsets, total = place.row_offsets(taken, has_room=out is not None, out=room)
    targets = _targets(pools, place, total, dtype, out)
    transfers = plain_transfers(pools, ("out[0]", "out[1]"), targets)
    if pools.scales is not None or pools.factors is not None:
        transfers = _conversions(pools, place, transfers, None)
    last = place.launch_args(threads)
    kernels = place.kernels
    move = kernels.gather_tokens if pools.global_scales is None else kernels.gather_nvfp4
    move(transfers, pools.lookup_table, offsets, *last)
    if out is None:
        pool = given_pool(inputs)
        results = [place.in_library_of(pool, target) for target in targets]
    else:
        results = _pair(out, len(targets))
    ends = offsets[-1] if isinstance(offsets, tuple) else offsets
    if room is not None:
        place.copy_over(room, ends)
        ends = out[2]
    return results[0], None if pools.is_latent else results[1], ends


def _room_for_offsets(place: Place, out: Any, rows: int) -> Any:
    """Return a caller's array for row offsets, or None if there is no array."""
    if not isinstance(out, tuple) or len(out) < 3 or out[2] is None:
        return None
    array = array_at(place, out[2], "out[2]")
    is_fit = array.shape == (rows + 1,) and array.dtype == np.uint32
    if not is_fit or not (array.flags.c_contiguous and is_writable(array)):
        raise ValueError(
            f"out[2] has shape {array.shape} and dtype {array.dtype}, must be ({rows + 1},) and "
            f"uint32, writable and in C order: the row offsets"
        )
    return array


def _lengths(pools: LayerPools, given: Any) -> Any:
    """Return the tokens of each row; lengths on the host are checked and become uint32."""
    taken = pools.cache_lengths if given is None else any_array(given, "lengths")
    if taken.shape != pools.cache_lengths.shape:
        raise ValueError(
            f"lengths has shape {taken.shape}, must be {pools.cache_lengths.shape}: one per row"
        )
    if not isinstance(taken, np.ndarray):
        if taken.dtype != np.uint32:
            raise TypeError(f"lengths has dtype {taken.dtype}, must be uint32 on a GPU")
        return taken
    checked = integers("lengths", taken, 0, MOST_UINT32)
    if taken.ndim != 1 or pools.lookup_table.ndim != 2:
        raise ValueError(f"lengths has shape {taken.shape}, must be (rows,) of the lookup_table")
    columns = pools.lookup_table.shape[1]
    held = columns * pools.pools[0].shape[1]
    if checked.size and checked.max() > held:
        row = int((checked > held).argmax())
        raise IndexError(
            f"position {held} of row {row} has no page: column {columns} of the lookup table does "
            f"not exist, it has {columns}; reserve the position first"
        )
    if checked.sum() > MOST_UINT32:
        raise ValueError(
            f"lengths are {checked.sum()} tokens together, must be at most {MOST_UINT32}; gather "
            f"fewer rows at a time"
        )
    return checked.astype(np.uint32)


def _write(
    pools: LayerPools,
    lengths: NDArray[np.uint32] | None,
    k: Any,
    v: Any,
    row_offsets: Any,
    scale: Any,
    stream: Any,
    threads: int,
) -> None:
    if pools.is_latent:
        transfers = latent_transfers(pools, k, v)
    else:
        keys, values = pools.pools
        transfers = [
            ("k", keys, None, None, call_array(k, "k")),
            ("v", values, None, None, call_array(v, "v")),
        ]
    for name, pool, _, _, tokens in transfers:
        if tokens.dtype != pool.dtype:
            _check_stored(name, tokens.dtype, pool.dtype, pools)
    place = place_of_layer(pools, stream, transfers, (row_offsets, scale))
    offsets = offsets_at(place, row_offsets)
    if scale is not None or pools.scales is not None or pools.factors is not None:
        transfers = _conversions(pools, place, transfers, scale)
    kernels = place.kernels
    move = kernels.append_tokens if pools.global_scales is None else kernels.append_nvfp4
    move(transfers, pools.lookup_table, lengths, offsets, *place.launch_args(threads))


def _check_stored(name: str, given: np.dtype[Any], pool: np.dtype[Any], pools: LayerPools) -> None:
    """Refuse a dtype that the pool cannot store unchanged; latent keys of a code pool may round."""
    is_beside_codes = pools.is_latent and pools.pools[0].dtype.name in NARROW
    if pool.name in NARROW or is_beside_codes or pools.global_scales is not None:
        return
    raise TypeError(f"{name} has dtype {given}, the pool has {pool}; convert it first")


def _conversions(
    pools: LayerPools, place: Place, copies: list[Transfer], scale: Any
) -> list[Transfer]:
    """Return transfers with the scales of the pools, or of the call."""
    if pools.global_scales is not None:
        if scale is not None:
            raise ValueError(
                "scale is given for pools in nvfp4; their global_scales take its place"
            )
        return nvfp4_transfers(pools, place, [(each[0], each[4]) for each in copies])
    given = _pair(scale, len(copies))
    return [_transfer(pools, place, i, each[0], each[4], given[i]) for i, each in enumerate(copies)]


def _transfer(
    pools: LayerPools, place: Place, i: int, name: str, tokens: NDArray[Any], scale: Any
) -> Transfer:
    pool, scales, factors = pools.pools[i], _at(pools.scales, i), _at(pools.factors, i)
    if scale is not None:
        if scales is not None or factors is not None:
            raise ValueError(f"scale is given for {name}, whose pool has scales of its own")
        if pool.dtype.name not in NARROW or tokens.dtype.name not in WIDE:
            raise ValueError(
                f"scale is given for {name} of dtype {tokens.dtype}, pool {pool.dtype}"
            )
        factors = head_factors(place, scale, pool.shape[2])
    return name, pool, scales, None if tokens.dtype == pool.dtype else factors, tokens


def _at(arrays: list[NDArray[np.float32]] | None, i: int) -> NDArray[np.float32] | None:
    return None if arrays is None or i >= len(arrays) else arrays[i]


def _pair(given: Any, count: int) -> list[Any]:
    """Return one entry per pool of an argument that may be a pair."""
    if isinstance(given, tuple):
        if len(given) < count:
            raise ValueError(f"a tuple of {len(given)} is given for {count} pools")
        return list(given)
    return [given] * count


def _targets(
    pools: LayerPools, place: Place, total: int, dtype: str | None, out: Any
) -> list[NDArray[Any]]:
    """Return the arrays for K and V, or for latent keys."""
    each = range(len(pools.pools))
    outputs = [[*each]] if pools.is_latent else [[i] for i in each]
    if out is not None:
        if dtype is not None:
            raise ValueError(f"dtype is {dtype!r} and out is given; pass only one of them")
        given = _pair(out, len(outputs))
        return [
            array_at(place, array, f"out[{i}]") for i, array in enumerate(given[: len(outputs)])
        ]
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype is a {type(dtype).__name__}, must be a str")
    if dtype is not None and dtype not in WIDE:
        raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(WIDE)}")
    return [_fresh(pools, place, indices, total, dtype) for indices in outputs]


def _fresh(
    pools: LayerPools,
    place: Place,
    indices: Sequence[int],
    total: int,
    dtype: str | None,
) -> Any:
    parts = [pools.pools[i] for i in indices]
    has_scales = pools.scales is not None or pools.factors is not None
    kinds = {part.dtype for part in parts}
    kind = np.dtype(np.float32) if has_scales or len(kinds) > 1 else parts[0].dtype
    width = sum(map(pools.width, indices))
    wanted = kind if dtype is None else numpy_dtype(dtype)
    return place.empty((total, parts[0].shape[2], width), wanted, "the tokens")
