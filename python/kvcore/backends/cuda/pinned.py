# SPDX-License-Identifier: Apache-2.0
"""Host memory that GPUs read and write."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda import driver
from kvcore.backends.cuda.availability import kernels, require_devices

__all__ = ["is_pinned", "pinned_zeros"]


def pinned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Allocate zeros in pinned host memory, at exactly their size, freed with the array.

    Raises
    ------
    KVCacheError
        No GPU can be used, or the memory cannot be pinned.
    MemoryError
        Not enough memory.
    """
    require_devices()
    size = math.prod(shape) * dtype.itemsize
    memory = kernels().PinnedMemory(driver.current_device(), max(size, 1))
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def is_pinned(array: Any) -> bool:
    """Return true if an array is in memory of ``pinned_zeros``."""
    kind = kernels().PinnedMemory
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, kind)
