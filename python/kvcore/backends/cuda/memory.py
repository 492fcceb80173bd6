# SPDX-License-Identifier: Apache-2.0
"""Pools in the memory of a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore.backends.cuda.arrays import over_memory, pool_array
from kvcore.backends.cuda.availability import kernels, require_devices
from kvcore.backends.cuda.loans import loans_of

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
    loans_of(device).wait()  # what arrays of others are held for, may be what is missing
    memory = kernels().DeviceMemory(device, math.prod(shape) * dtype.itemsize)
    array = pool_array(over_memory(memory.ptr, shape, dtype, device, memory))
    _fill_with_zeros(memory)
    return array


def _fill_with_zeros(memory: Any) -> None:
    stream = kernels().Stream(memory.device)
    kernels().fill(memory.ptr, 0, memory.bytes, memory.device, stream.ptr)
    kernels().synchronize(memory.device, stream.ptr)
