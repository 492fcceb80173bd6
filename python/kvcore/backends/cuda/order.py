# SPDX-License-Identifier: Apache-2.0
"""The order of the streams that work on a manager's pools."""

from __future__ import annotations

import threading
from typing import Any

from kvcore.backends.cuda.availability import kernels
from kvcore.backends.cuda.streams import (
    CurrentStream,
    event_handle,
    manager_stream,
    stream_device,
    stream_handle,
)

__all__ = ["StreamOrder"]


class StreamOrder:
    """Put each stream that a manager is called from behind those it was called from before.

    A page that a request gives back may still be read by kernels that were enqueued for it. They
    were enqueued on the stream that its batch was fetched on, or on one that ``release(after=)``
    named: whoever is handed the page next runs behind both.

    Parameters
    ----------
    device : int

    Notes
    -----
    Thread-safe. No call makes the host wait.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._last: CurrentStream | None = None  # the stream entered last
        self._turn = kernels().Event(device)
        self._before: list[tuple[int, Any]] = []  # events nobody has waited for, and their owners

    def enter(self) -> int:
        """Order the current stream behind everything that may use the pools; return its handle."""
        stream = manager_stream(self._device)
        handle = stream.handle
        if kernels().is_capturing(self._device, handle):
            raise ValueError(
                f"the current stream of cuda:{self._device} is captured into a graph, which calls "
                f"of a manager cannot be part of; call it before the capture"
            )
        with self._lock:
            if self._last is not None and self._last.handle != handle:
                kernels().record(self._turn.ptr, self._device, self._last.handle)
                kernels().wait(self._turn.ptr, self._device, handle)
            for event, _ in self._before:
                kernels().wait(event, self._device, handle)
            self._before.clear()
            self._last = stream
        return handle

    def put_after(self, event: int, owner: Any) -> None:
        """Order every stream that enters from now on behind a recorded event, by its handle."""
        with self._lock:
            self._before.append((event, owner))

    def put_after_work(self, given: Any) -> None:
        """Do so with the event that is given, or with what a stream has to do now.

        Raises
        ------
        TypeError
            Neither a stream nor an event.
        """
        handle = event_handle(given)
        if handle is not None:
            return self.put_after(handle, given)
        home = stream_device(given)
        device = self._device if home is None else home
        event = kernels().Event(device)
        kernels().record(event.ptr, device, stream_handle(given, device))
        return self.put_after(event.ptr, event)
