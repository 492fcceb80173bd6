# SPDX-License-Identifier: Apache-2.0
"""The arrays of a view: checked once, taken as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.selection import any_array
from kvcore.params import KVCacheParams, require_params
from kvcore.pools import shard_shapes
from kvcore.support.dtypes import numpy_dtype

__all__ = ["PoolPart", "pool_parts", "require_array"]


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Hold one array of a pool, 6-D, and its scales."""

    blocks: NDArray[Any]
    scales: NDArray[np.float32] | None


def require_array(name: str, value: Any, rank: int, dtype: type[np.generic]) -> NDArray[Any]:
    """See an array as numpy's or cupy's; ValueError for another rank or dtype."""
    array: NDArray[Any] = any_array(value, name)
    if array.ndim != rank or array.dtype != dtype:
        raise ValueError(
            f"{name} has {array.ndim} dimensions and dtype {array.dtype}, must have {rank} and "
            f"{np.dtype(dtype)}"
        )
    return array


def pool_parts(
    blocks: Any, scales: Any, params: KVCacheParams | None
) -> tuple[KVCacheParams, tuple[PoolPart, ...]]:
    """Check a pool and its scales; return them with the params that describe them.

    Parameters
    ----------
    blocks : array [num_blocks, kv_dim, layers, block_size, heads, head_dim], or pair of K and V
    scales : float32 [num_blocks, kv_dim, layers, block_size, heads, groups], or pair, or None
    params : KVCacheParams or None
        Read off the arrays where None. Layers and block size are always the arrays'.

    Raises
    ------
    ValueError
        Another rank, dtype or shape than each other's and the params'.
    TypeError
        No arrays.
    """
    if blocks is None:
        raise ValueError("blocks is None: a view needs a pool, this manager hands out page ids")
    arrays = [_pool_array(each) for each in (blocks if isinstance(blocks, tuple) else (blocks,))]
    given = scales if isinstance(scales, tuple) else (scales,) * len(arrays)
    if len(arrays) > 2 or len(given) != len(arrays):
        raise ValueError(
            f"blocks holds {len(arrays)} arrays and scales {len(given)}, must both hold one, or "
            f"two where K and V have widths of their own"
        )
    if params is None:
        params = _described(arrays, given)
    require_params(params)
    if params.groups is None and params.shared is None:
        params = replace(params, num_layers=arrays[0].shape[2], page_size=arrays[0].shape[3])
    _require_shapes(params, arrays)
    typed = [_as_dtype(array, params) for array in arrays]
    return params, tuple(
        PoolPart(array, _checked_scales(scale, array))
        for array, scale in zip(typed, given, strict=True)
    )


def _pool_array(value: Any) -> NDArray[Any]:
    array: NDArray[Any] = any_array(value, "blocks")
    if array.ndim != 6:
        raise ValueError(
            f"blocks has shape {array.shape}, must have 6 dimensions: "
            f"[num_blocks, kv_dim, layers, block_size, heads, head_dim]"
        )
    return array


def _described(arrays: list[NDArray[Any]], scales: tuple[Any, ...]) -> KVCacheParams:
    _, kv_dim, layers, size, heads, width = arrays[0].shape
    granularity = None
    if scales[0] is not None:
        groups = require_array("scales", scales[0], 6, np.float32).shape[5]
        granularity = width // max(1, groups)
    return KVCacheParams(
        dtype=arrays[0].dtype.name,
        n_kv_heads=heads,
        head_dim=width,
        num_layers=layers,
        page_size=size,
        is_mla=kv_dim == 1 and len(arrays) == 1,
        kv_scale_granularity=granularity,
        v_head_dim=arrays[1].shape[-1] if len(arrays) == 2 else None,
    )


def _require_shapes(params: KVCacheParams, arrays: list[NDArray[Any]]) -> None:
    shapes = [array.shape for array in arrays]
    expected = shard_shapes(params, shapes[0][0])
    if shapes != expected:
        raise ValueError(
            f"blocks has shape {shapes}, must be {expected}: "
            f"kv_dim, heads and head_dim are those of the params"
        )


def _as_dtype(array: NDArray[Any], params: KVCacheParams) -> NDArray[Any]:
    dtype = numpy_dtype(params.dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "uV" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)  # a caller's pool may hold the bits alone
    raise ValueError(f"blocks has dtype {array.dtype}, must be {dtype} as the params say")


def _checked_scales(value: Any, blocks: NDArray[Any]) -> NDArray[np.float32] | None:
    if value is None:
        return None
    scales = require_array("scales", value, 6, np.float32)
    groups = scales.shape[5]
    if scales.shape[:5] != blocks.shape[:5] or groups == 0 or blocks.shape[5] % groups != 0:
        raise ValueError(
            f"scales has shape {scales.shape}, must be {blocks.shape[:5]} and a number of groups "
            f"that divides {blocks.shape[5]}"
        )
    return scales
