# SPDX-License-Identifier: Apache-2.0
"""Streams of other libraries by CUDA's handles."""

from __future__ import annotations

import operator
from typing import Any

from kvcore.backends.cuda import driver

__all__ = ["event_handle", "stream_device", "stream_handle"]


def stream_handle(stream: Any, device: int) -> int:
    """Return the handle of the stream that a call is enqueued on.

    Parameters
    ----------
    stream : stream, int or None
        A cupy, torch or numba stream, an object with ``__cuda_stream__``, a handle; None for cupy's
        current stream of the device.
    device : int
        Where the arrays of the call are.

    Returns
    -------
    int
        CUDA's handle; 0 is the device's legacy default stream.

    Raises
    ------
    ValueError
        A stream of another device.
    TypeError
        Something that is no stream.
    """
    if stream is None:
        return driver.current_stream(device)
    home = stream_device(stream)
    if home is not None and home != device:
        raise ValueError(
            f"the stream is one of cuda:{home}, the arrays are on cuda:{device}; "
            f"pass a stream of their device"
        )
    return _handle(stream)


def event_handle(given: Any) -> int | None:
    """Return the handle of an event of cupy, torch or kvcore; None for what is no event."""
    if hasattr(given, "cuda_event"):  # torch
        return int(given.cuda_event)
    is_event = type(given).__name__ == "Event" and hasattr(given, "ptr")
    return int(given.ptr) if is_event else None


def stream_device(stream: Any) -> int | None:
    """Return the device that a stream names; legacy streams and handles name none."""
    place = getattr(stream, "device_id", None)  # cupy; -1 for streams of every device
    if place is None:
        place = getattr(stream, "device_index", None)  # torch
    if place is None:
        place = getattr(stream, "device", None)  # kvcore
    return place if isinstance(place, int) and place >= 0 else None


def _handle(stream: Any) -> int:
    for name in ("ptr", "cuda_stream"):
        if hasattr(stream, name):
            return operator.index(getattr(stream, name))
    if hasattr(stream, "__cuda_stream__"):
        version, handle, *_ = stream.__cuda_stream__()
        if version != 0:
            raise TypeError(f"stream speaks version {version} of __cuda_stream__, must be 0")
        return operator.index(handle)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return _checked(stream)
    raise TypeError(
        f"stream is a {type(stream).__name__}, must be a stream of cupy or torch, one with "
        f"__cuda_stream__, or CUDA's handle as an int"
    )


def _checked(handle: int) -> int:
    if handle < 0:
        raise ValueError(f"stream is {handle}, must be a handle: at least 0")
    return handle
