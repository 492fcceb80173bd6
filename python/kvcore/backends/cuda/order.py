# SPDX-License-Identifier: Apache-2.0
"""The order of the streams that work on a manager's pools."""

from __future__ import annotations

import threading
from typing import Any

from kvcore.backends.cuda.availability import kernels
from kvcore.backends.cuda.late_stores import LateStores
from kvcore.backends.cuda.streams import (
    CurrentStream,
    event_handle,
    manager_stream,
    stream_device,
    stream_handle,
)
from kvcore.errors import KVCacheError

__all__ = ["StreamOrder"]

_LEGACY, _PER_THREAD = 0, 2  # handles of streams that every device has


class StreamOrder:
    """Order each stream that calls a manager after the streams that called it before.

    Kernels of a request may still read a page that the request has released. These kernels are on
    the stream that fetched its batch, or on a stream that ``release(after=)`` named. The next owner
    of the page runs after both streams.

    Parameters
    ----------
    device : int

    Notes
    -----
    Thread-safe. No call makes the host wait, with one exception: if the stream of the last call was
    destroyed, no handle names its work any more, and the host waits once for the device.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._last: tuple[CurrentStream, int] | None = None  # the last stream and its thread
        self._turn = kernels().Event(device)
        # A stream without work, which waits at once for each event that a caller passes. So an
        # invalid event raises in that call, and its owner may record it again or destroy it.
        self._gate = kernels().Stream(device)
        self._opens = kernels().Event(device)
        self._is_open = True
        self._loaded: Any = None  # the event of loads that no stream has waited for yet
        self._late: list[LateStores] = []

    def enter(self, *, by_layer: bool = False) -> int:
        """Order the current stream after all work that may use the pools; return its handle.

        With `by_layer`, the stream does not wait for loads here, but for each layer when it uses
        the layer.

        Raises
        ------
        ValueError
            The stream, or the stream that entered last, is captured into a graph.
        """
        stream = manager_stream(self._device)
        handle = stream.handle
        if kernels().is_capturing(self._device, handle):
            raise ValueError(
                f"the current stream of cuda:{self._device} is captured into a graph, which cannot "
                f"contain calls of a manager; call the manager before the capture"
            )
        thread = threading.get_ident()
        with self._lock:
            before = self._handle_of_last(handle, thread)
            if before is not None:
                self._put_after_stream(before, handle)
            if not self._is_open:
                kernels().record(self._opens.ptr, self._device, self._gate.ptr)
                kernels().wait(self._opens.ptr, self._device, handle)
                self._is_open = True
            if self._loaded is not None and not by_layer:
                kernels().wait(self._loaded.ptr, self._device, handle)
                self._loaded = None
            for stores in self._late:
                stores.order(handle)
            self._last = stream, thread
        return handle

    def follow(self, stores: LateStores) -> None:
        """Make later streams wait for these stores, as ``LateStores.order`` requires."""
        with self._lock:
            self._late.append(stores)

    def _handle_of_last(self, handle: int, thread: int) -> int | None:
        """Return the stream to wait for; None if it is the stream `handle` itself.

        The handle of the per-thread stream means a different stream in every thread. It cannot name
        the stream of another thread, but the legacy stream waits for that stream.
        """
        if self._last is None:
            return None
        last, owner = self._last
        if last.handle == _PER_THREAD and owner != thread:
            return _LEGACY
        return None if last.handle == handle else last.handle

    def _put_after_stream(self, before: int, handle: int) -> None:
        """Order a stream after the work of the stream `before`, which may be destroyed."""
        try:
            is_captured = kernels().is_capturing(self._device, before)
        except KVCacheError:  # the stream was destroyed, its work may still run
            kernels().synchronize_device(self._device)
            return
        if is_captured:
            raise ValueError(
                f"the stream of cuda:{self._device} that the manager was called on last is "
                f"captured into a graph, and no stream can wait for its earlier work until the "
                f"capture ends; call after the end of the capture"
            )
        kernels().record(self._turn.ptr, self._device, before)
        kernels().wait(self._turn.ptr, self._device, handle)

    def put_after(self, event: int) -> None:
        """Order every later stream after a recorded event, given by its handle.

        Raises
        ------
        KVCacheError
            The handle is not an event of this process.
        """
        with self._lock:
            kernels().wait(event, self._device, self._gate.ptr)
            self._is_open = False

    def put_after_loads(self, done: Any) -> None:
        """Order every later stream after loads, unless the stream waits layer by layer."""
        with self._lock:
            self._loaded = done

    def put_after_work(self, given: Any) -> None:
        """Order every later stream after an event, or after the work that a stream has now.

        Raises
        ------
        TypeError
            `given` is neither a stream nor an event.
        ValueError
            `given` is a stream that is captured into a graph.
        KVCacheError
            The driver has no such stream or event.
        """
        handle = event_handle(given)
        if handle is not None:
            return self.put_after(handle)
        given_device = stream_device(given)
        device = self._device if given_device is None else given_device
        stream = stream_handle(given, device)
        if kernels().is_capturing(device, stream):
            raise ValueError(
                "after is a stream that is captured into a graph, whose work runs only when the "
                "graph is launched; pass an event that is recorded after the launch"
            )
        event = kernels().Event(device)
        kernels().record(event.ptr, device, stream)
        return self.put_after(event.ptr)
