# SPDX-License-Identifier: Apache-2.0
"""The memory behind the page ids: allocation, checks of the caller's own, page copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.arrays import (
    host_array,
    is_writable,
    present_zeros,
    require_apart,
    require_own_memory,
)
from kvcore.device import Device
from kvcore.dtypes import numpy_dtype
from kvcore.ops.layouts import PoolLayout, Tensor, tensors_of
from kvcore.params import KVCacheParams

__all__ = [
    "Shard",
    "adopt_shard",
    "allocate_shard",
    "make_shards",
    "pools_on_gpus",
    "shard_shapes",
    "tensors_of_shards",
]

#: One device's part of a replica: ``(blocks, kv_scales)`` as RaggedKVCacheInputs hands them out.
Shard = tuple[Any, Any]


def shard_shapes(params: KVCacheParams, num_pages: int) -> list[tuple[int, ...]]:
    """Answer the shape of each array of a device's pool: one, or two when V has its own width."""
    heads, page = params.n_kv_heads_per_device, params.page_size
    if params.v_head_dim is None:
        return [(num_pages, params.kv_dim, params.num_layers, page, heads, params.head_dim)]
    return [(num_pages, 1, params.num_layers, page, heads, width) for width in params.row_widths]


def _arrays_of(pool: Any) -> list[Any]:
    return list(pool) if isinstance(pool, tuple) else [pool]


def _one_or_pair(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _allocate_scales(params: KVCacheParams, num_pages: int, device: Device) -> Any:
    granularity = params.kv_scale_granularity
    if granularity is None:
        return None
    shapes = [(*shape[:-1], shape[-1] // granularity) for shape in shard_shapes(params, num_pages)]
    return _one_or_pair([_zeros(shape, np.dtype(np.float32), device) for shape in shapes])


def allocate_shard(params: KVCacheParams, num_pages: int, device: Device) -> Shard:
    """Allocate one device's zeroed, pre-faulted pool and scales.

    Raises
    ------
    MemoryError
        The device has less memory free; the text has both numbers.
    KVCacheError
        "CUDA unavailable: " and why.
    """
    dtype = numpy_dtype(params.dtype)
    arrays = [_zeros(shape, dtype, device) for shape in shard_shapes(params, num_pages)]
    return _one_or_pair(arrays), _allocate_scales(params, num_pages, device)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Any:
    if device.kind == "cpu":
        return present_zeros(shape, dtype)
    from kvcore.cuda.memory import device_zeros

    return device_zeros(shape, dtype, device.index)


def _adopt_array(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Any:
    seen = _on_device(array, device)
    if seen.shape != shape or seen.dtype.itemsize != dtype.itemsize:
        raise ValueError(
            f"blocks has shape {seen.shape} and dtype {seen.dtype}, must be {shape} and {dtype}"
        )
    if seen.dtype != dtype and seen.dtype.kind not in "uV":
        raise ValueError(
            f"blocks has dtype {seen.dtype}, must be {dtype} or unsigned integers of its width"
        )
    if not is_writable(seen):
        raise ValueError("blocks is read-only, must be writable: pages are copied in it")
    if seen.shape[-1] > 1 and seen.strides[-1] != seen.itemsize:
        raise ValueError("blocks is strided along its last axis, must be contiguous there")
    require_own_memory(seen, "blocks")
    return seen.view(dtype)


def _on_device(array: Any, device: Device) -> Any:
    """See an array of the caller's where its device is."""
    if device.kind == "cpu":
        return host_array(array, "an array of blocks")
    from kvcore.cuda import device_array

    seen = device_array(array, "an array of blocks")
    if seen.data.device_id != device.index:
        raise ValueError(
            f"an array of blocks is on cuda:{seen.data.device_id}, must be on {device} as devices "
            f"say"
        )
    return seen


def adopt_shard(params: KVCacheParams, num_pages: int, blocks: Any, device: Device) -> Shard:
    """Take the caller's array (or pair of arrays) as one device's pool, without a copy.

    Raises
    ------
    TypeError, ValueError
        Another shape or dtype, memory that is read-only or that elements share, or nothing that
        numpy can look into.
    """
    shapes = shard_shapes(params, num_pages)
    if len(shapes) == 2 and not isinstance(blocks, list | tuple):
        raise TypeError(f"blocks is a {type(blocks).__name__}, must be a pair of arrays: K and V")
    given = [blocks] if len(shapes) == 1 else list(blocks)
    if len(given) != len(shapes):
        raise ValueError(f"blocks holds {len(given)} arrays, must hold {len(shapes)}: K and V")
    dtype = numpy_dtype(params.dtype)
    arrays = [_adopt_array(a, shape, dtype, device) for a, shape in zip(given, shapes, strict=True)]
    return _one_or_pair(arrays), _allocate_scales(params, num_pages, device)


def make_shards(
    params: KVCacheParams, devices: tuple[Device, ...], num_pages: int, blocks: Any
) -> list[list[Shard]]:
    """Answer the pools by replica and device in it."""
    if blocks is None:
        shards: list[Shard] = [(None, None)] * len(devices)
    elif isinstance(blocks, str):
        if blocks != "allocate":
            raise ValueError(f"blocks is {blocks!r}, must be 'allocate', None or a list of arrays")
        shards = [allocate_shard(params, num_pages, device) for device in devices]
    else:
        if not isinstance(blocks, list | tuple):
            raise TypeError(
                f"blocks is a {type(blocks).__name__}, must be 'allocate', None or a list of arrays"
            )
        if len(blocks) != len(devices):
            raise ValueError(
                f"blocks holds {len(blocks)} pools, must hold {len(devices)}: one per device"
            )
        shards = [
            adopt_shard(params, num_pages, given, device)
            for given, device in zip(blocks, devices, strict=True)
        ]
        require_apart([array for pool, _ in shards for array in _arrays_of(pool)], "blocks")
    tp = params.tensor_parallel_degree
    return [shards[r * tp : (r + 1) * tp] for r in range(params.data_parallel_degree)]


def pools_on_gpus(devices: tuple[Device, ...], shards_per_replica: int) -> Any:
    """Answer the ``GpuPools`` of a manager with pools on GPUs, None for pools in host memory.

    Raises
    ------
    ValueError
        Devices of both kinds, or a GPU that the driver does not show.
    KVCacheError
        "CUDA unavailable: " and why.
    """
    kinds = {device.kind for device in devices}
    if kinds == {"cpu"}:
        return None
    if len(kinds) > 1:
        raise ValueError(
            f"devices are {', '.join(map(str, devices))}; pools of one manager are all in host "
            f"memory or all on GPUs"
        )
    from kvcore.gpu_pools import make_gpu_pools

    return make_gpu_pools(devices, shards_per_replica)


def tensors_of_shards(shards: list[Shard]) -> list[list[Tensor]]:
    """Answer every array of a replica, seen as K and V: those of all devices and their scales."""
    arrays = [array for shard in shards for array in shard if array is not None]
    flat = [part for each in arrays for part in (each if isinstance(each, tuple) else (each,))]
    # Bytes are moved as they are: the dtype does not matter, and the layout names the axes.
    return [tensors_of(PoolLayout(part.view(f"u{part.itemsize}"), "max")) for part in flat]
