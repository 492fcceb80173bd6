# SPDX-License-Identifier: Apache-2.0
"""Streams of other libraries by CUDA's handles."""

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

_DEFAULTS = (0, 1, 2)  # handles that every device has: the legacy ones, and the thread's


class CurrentStream(NamedTuple):
    """Hold the handle of a stream, and what keeps it alive."""

    handle: int
    owner: Any

    @property
    def is_chosen(self) -> bool:
        """Tell whether somebody chose it: it is none that is there by default."""
        return self.handle not in _DEFAULTS


def current_stream(device: int, libraries: Iterable[str]) -> CurrentStream:
    """Return the stream of a call that names none: the current one of its arrays' library.

    Parameters
    ----------
    device : int
    libraries : iterable of {"cupy", "torch", "kvcore"}
        Of the call's arrays. Those that kvcore made are of all libraries.

    Raises
    ------
    ValueError
        Arrays of two libraries, which have chosen different streams.

    Notes
    -----
    Of several libraries the one that has chosen a stream decides. Default streams are in order with
    each other, so that the legacy one, which waits for the others, does for all.
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
            f"{both}; pass stream= to say which one the call runs on"
        )
    return min((chosen or found).values(), key=lambda stream: stream.handle)


def library_stream(device: int, library: str) -> CurrentStream:
    """Return the current stream of "cupy" or "torch", and for "kvcore" that of a manager."""
    return manager_stream(device) if library == "kvcore" else _CURRENT[library](device)


def manager_stream(device: int) -> CurrentStream:
    """Return the stream that a manager's work runs on: cupy's, or torch's if it alone chose one."""
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
        return _of_cupy(device).handle
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
