# SPDX-License-Identifier: Apache-2.0
"""Pools in the memory of a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore.backends.cuda.arrays import over_memory
from kvcore.backends.cuda.availability import kernels, require_devices

__all__ = ["device_zeros"]


def device_zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
    """Allocate zeros on a GPU, exactly their size, given back with the array.

    For pools, which live long: not out of cupy's pool, which keeps what it was given back. The host
    waits until the zeros are there, so any stream may go on with them.

    Raises
    ------
    MemoryError
        Not enough memory: asked for and free, in bytes.
    KVCacheError
        No such GPU here: "CUDA unavailable: " and why.
    """
    count = require_devices()
    if not 0 <= device < count:
        raise ValueError(f"device is cuda:{device}, this machine has {count}")
    memory = kernels().DeviceMemory(device, math.prod(shape) * dtype.itemsize)
    array = over_memory(memory.ptr, shape, dtype, device, memory)
    _fill_with_zeros(memory)
    return array


def _fill_with_zeros(memory: Any) -> None:
    """Write zeros by the kernel that fills pages: all of the memory as one page of bytes."""
    if not memory.bytes:
        return
    stream = kernels().Stream(memory.device)
    page = over_memory(memory.ptr, (1, memory.bytes), np.dtype(np.uint8), memory.device, memory)
    ids = np.zeros(1, np.int64)
    index = kernels().DeviceMemory(memory.device, ids.nbytes)
    address = ids.__array_interface__["data"][0]
    kernels().copy(index.ptr, address, ids.nbytes, memory.device, stream.ptr)
    on_device = over_memory(index.ptr, (1,), ids.dtype, memory.device, index)
    kernels().fill_pages([page], (ids, on_device), 0, memory.device, stream.ptr)
    kernels().synchronize(memory.device, stream.ptr)
