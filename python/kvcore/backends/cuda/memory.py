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
    """Allocate zeros on a GPU, at exactly their size; the memory is freed with the array.

    The function is for pools, which live long. It does not use cupy's memory pool, which keeps
    freed memory. The host waits until the zeros are written, so any stream may use them.

    Raises
    ------
    MemoryError
        Not enough memory; the text has the requested and the free bytes.
    ValueError
        The machine has no GPU of this number.
    KVCacheError
        No GPU can be used: "CUDA unavailable: " and the reason.
    """
    count = require_devices()
    if not 0 <= device < count:
        raise ValueError(f"device is cuda:{device}, this machine has {count}")
    loans_of(device).wait()  # the held arrays may occupy the memory that is missing
    memory = kernels().DeviceMemory(device, math.prod(shape) * dtype.itemsize)
    array = pool_array(over_memory(memory.ptr, shape, dtype, device, memory))
    _fill_with_zeros(memory)
    return array


def _fill_with_zeros(memory: Any) -> None:
    stream = kernels().Stream(memory.device)
    kernels().fill(memory.ptr, 0, memory.bytes, memory.device, stream.ptr)
    kernels().synchronize(memory.device, stream.ptr)
