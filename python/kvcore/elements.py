# SPDX-License-Identifier: Apache-2.0
"""Single elements and small arrays, read and written wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.device import Device

__all__ = ["host_copy", "on_device", "read_element", "write_element"]


def _place(array: Any) -> Any:
    from kvcore.cuda.place import device_place

    return device_place(None, [("the array", array)])


def host_copy(array: Any) -> NDArray[Any]:
    """Answer a numpy array as it is, one on a GPU as a copy, waiting for its current stream."""
    if isinstance(array, np.ndarray):
        return array
    copy: NDArray[Any] = _place(array).here(array)
    return copy


def read_element(array: Any, place: tuple[int, ...]) -> Any:
    """Answer one element as a numpy scalar; on a GPU the host waits for the current stream."""
    found = array[place]
    return found if isinstance(array, np.ndarray) else _place(array).here(found)[()]


def write_element(array: Any, place: tuple[int, ...], value: Any) -> None:
    """Write one element, on a GPU in the order of its current stream."""
    if isinstance(array, np.ndarray):
        array[place] = value
        return
    on_gpu = _place(array)
    source, target = np.asarray(value, array.dtype), array[place]
    address = source.__array_interface__["data"][0]
    last = on_gpu.last(1)
    on_gpu.kernels.copy(target.data.ptr, address, source.nbytes, *last)


def on_device(device: Device, arrays: tuple[NDArray[Any], ...]) -> tuple[Any, ...]:
    """Answer arrays of the host's, copied where a device is a GPU, on its current stream."""
    if device.kind == "cpu":
        return arrays
    from kvcore.cuda import driver
    from kvcore.cuda.place import DevicePlace

    place = DevicePlace(device.index, driver.current_stream(device.index))
    return tuple(place.there(array) for array in arrays)
