# SPDX-License-Identifier: Apache-2.0
"""Single elements and small arrays, read and written wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.selection import backend_of, place_of
from kvcore.device import Device

__all__ = ["host_copy", "on_device", "read_element", "write_element"]


def host_copy(array: Any) -> NDArray[Any]:
    """Return a numpy array as it is, one on a GPU as a copy, waiting for its current stream."""
    return place_of(None, {"the array": array}).to_host(array)


def read_element(array: Any, index: tuple[int, ...]) -> Any:
    """Return one element as a numpy scalar; on a GPU the host waits for the current stream."""
    found = array[index]
    return found if isinstance(array, np.ndarray) else host_copy(found)[()]


def write_element(array: Any, index: tuple[int, ...], value: Any) -> None:
    """Write one element, on a GPU in the order of its current stream."""
    if isinstance(array, np.ndarray):
        array[index] = value
        return
    place_of(None, {"the array": array}).copy_into(array[index], np.asarray(value, array.dtype))


def on_device(device: Device, arrays: tuple[NDArray[Any], ...]) -> tuple[Any, ...]:
    """Return arrays of the host's, copied where a device is a GPU, on its current stream."""
    place = backend_of(device.kind).current_place(device.index)
    return tuple(place.from_host(array) for array in arrays)
