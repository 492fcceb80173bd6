# SPDX-License-Identifier: Apache-2.0
"""Copies of host arrays to a GPU; the call reads the host array before it returns, with no wait."""

from __future__ import annotations

import threading
from collections import deque
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda.availability import kernels
from kvcore.backends.cuda.last_wait import LastWait

__all__ = ["staging_of"]

# Up to this size, the driver reads unpinned memory during the call. For larger copies, the host
# waits for the stream.
_SHORT = 64 << 10

_BUFFER = 1 << 20  # bytes
_MOST_BUFFERS = 64


class _Buffer:
    """Hold pinned memory, and the event of the copy that reads it."""

    def __init__(self, device: int) -> None:
        self.owner = kernels().PinnedMemory(device, _BUFFER)
        self.memory = np.frombuffer(self.owner, np.uint8)
        self.event = kernels().Event(device)


class Staging:
    """Copy host bytes to a device through pinned memory that is reused.

    Parameters
    ----------
    device : int

    Notes
    -----
    Thread-safe. The source may change as soon as a call returns. The host waits if 64 MiB are
    already in flight.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._busy: deque[_Buffer] = deque()
        self._last_wait = LastWait()

    def __del__(self) -> None:
        """Wait until copies of pinned memory are done, before the memory is freed."""
        self._last_wait.for_events(buffer.event for buffer in self._busy)

    def copy(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        """Copy bytes to an address of the device, in the order of a stream."""
        if source.nbytes <= _SHORT:
            # Copy `source`: if it is pinned, the driver would read it after the call returns.
            self._enqueue(address, source.copy(), stream)
            return
        for begin in range(0, source.nbytes, _BUFFER):
            piece = source[begin : begin + _BUFFER]
            buffer = self._take()
            try:
                buffer.memory[: piece.nbytes] = piece
                self._enqueue(address + begin, buffer.memory[: piece.nbytes], stream)
                kernels().record(buffer.event.ptr, self._device, stream)
            finally:
                with self._lock:
                    self._busy.append(buffer)

    def _enqueue(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        begin = source.__array_interface__["data"][0]
        kernels().copy(address, begin, source.nbytes, self._device, stream)

    def _take(self) -> _Buffer:
        """Return a buffer that no copy reads."""
        with self._lock:
            for buffer in self._busy:
                if kernels().query(buffer.event.ptr, self._device):
                    self._busy.remove(buffer)
                    return buffer
            if len(self._busy) < _MOST_BUFFERS:
                return _Buffer(self._device)
            oldest = self._busy.popleft()
        kernels().synchronize_event(oldest.event.ptr, self._device)
        return oldest


@cache
def staging_of(device: int) -> Staging:
    """Return the only ``Staging`` object of a device."""
    return Staging(device)
