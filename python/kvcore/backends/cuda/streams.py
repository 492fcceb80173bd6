# SPDX-License-Identifier: Apache-2.0
"""CUDA handles of the streams of other libraries."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvcore.backends.cuda import driver

__all__ = [
    "CurrentStream",
    "current_stream",
    "event_handle",
    "library_stream",
    "manager_stream",
    "stream_device",
    "stream_handle",
]

_DEFAULTS = (0, 1, 2)  # handles that every device has: 0 and 1 legacy, 2 per-thread


class CurrentStream(NamedTuple):
    """Hold the handle of a stream, and the object that keeps the stream alive."""

    handle: int
    owner: Any

    @property
    def is_chosen(self) -> bool:
        """True if a caller chose the stream: it is not a default stream."""
        return self.handle not in _DEFAULTS


def current_stream(device: int, libraries: Iterable[str]) -> CurrentStream:
    """Return the stream of a call without `stream`: the current stream of its arrays' library.

    Parameters
    ----------
    device : int
    libraries : iterable of {"cupy", "torch", "kvcore"}
        The libraries of the call's arrays. Arrays that kvcore made belong to all libraries.

    Raises
    ------
    ValueError
        The arrays are of two libraries, which have chosen different streams.

    Notes
    -----
    With several libraries, the call uses the stream of the library that has chosen a stream.
    Default streams are in order with each other: the call uses the legacy stream, which waits for
    the other default streams.
    """
    named = set(libraries)
    if named == {"kvcore"}:
        return manager_stream(device)
    found = _streams(device, _all_libraries() if "kvcore" in named else named)
    chosen = {name: stream for name, stream in found.items() if stream.is_chosen}
    if len({stream.handle for stream in chosen.values()}) > 1:
        both = " and ".join(f"{stream.handle:#x} of {name}" for name, stream in chosen.items())
        raise ValueError(
            f"the arrays are of several libraries, whose current streams on cuda:{device} are "
            f"{both}; pass stream= to select the stream of the call"
        )
    return min((chosen or found).values(), key=lambda stream: stream.handle)


def library_stream(device: int, library: str) -> CurrentStream:
    """Return the current stream of "cupy" or "torch"; for "kvcore", the stream of a manager."""
    return manager_stream(device) if library == "kvcore" else _CURRENT[library](device)


def manager_stream(device: int) -> CurrentStream:
    """Return the stream of a manager's work: cupy's, or torch's if only torch chose a stream."""
    found = _streams(device, _all_libraries())
    mine = found["cupy"]
    theirs = found.get("torch", mine)
    return theirs if theirs.is_chosen and not mine.is_chosen else mine


def _all_libraries() -> set[str]:
    """Return the libraries that have current streams: torch if it was imported and uses GPUs."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return {"cupy"} if cuda is None or not cuda.is_initialized() else {"cupy", "torch"}


def _streams(device: int, libraries: Iterable[str]) -> dict[str, CurrentStream]:
    return {name: _CURRENT[name](device) for name in sorted(libraries)}


def _of_cupy(device: int) -> CurrentStream:
    stream = driver.current(device)
    return CurrentStream(int(stream.ptr), stream)


def _of_torch(device: int) -> CurrentStream:
    stream = sys.modules["torch"].cuda.current_stream(device)
    return CurrentStream(int(stream.cuda_stream), stream)


_CURRENT = {"cupy": _of_cupy, "torch": _of_torch}


def stream_handle(stream: Any, device: int) -> int:
    """Return the handle of the stream that a call is enqueued on.

    Parameters
    ----------
    stream : stream, int or None
        A cupy, torch or numba stream, an object with ``__cuda_stream__``, or a handle; None for
        cupy's current stream of the device.
    device : int
        The device of the call's arrays.

    Returns
    -------
    int
        CUDA's handle; 0 is the device's legacy default stream.

    Raises
    ------
    ValueError
        The stream is on another device.
    TypeError
        `stream` is not a stream.
    """
    if stream is None:
        return _of_cupy(device).handle
    of_stream = stream_device(stream)
    if of_stream is not None and of_stream != device:
        raise ValueError(
            f"the stream is one of cuda:{of_stream}, the arrays are on cuda:{device}; "
            f"pass a stream of their device"
        )
    return _handle(stream)


def event_handle(given: Any) -> int | None:
    """Return the handle of an event of cupy, torch or kvcore; None if `given` is not an event."""
    if hasattr(given, "cuda_event"):  # torch
        return int(given.cuda_event)
    is_event = type(given).__name__ == "Event" and hasattr(given, "ptr")
    return int(given.ptr) if is_event else None


def stream_device(stream: Any) -> int | None:
    """Return the device of a stream; None for legacy streams and for handles."""
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
            raise TypeError(f"stream has version {version} of __cuda_stream__, must be 0")
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
