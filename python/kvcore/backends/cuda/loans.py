# SPDX-License-Identifier: Apache-2.0
"""References to arrays that queued work reads, held until the work is done."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

from kvcore.backends.cuda.availability import kernels
from kvcore.errors import KVCacheError

__all__ = ["Loan", "loans_of"]


class Loans:
    """Hold arrays of a device until the work that reads them is done.

    Parameters
    ----------
    device : int

    Notes
    -----
    Thread-safe without a lock, because a garbage collection may end a call in the middle of another
    call of the same thread. A thread removes an entry while it checks the entry. The host waits in
    ``wait``, and in ``hold`` if the stream was destroyed.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._held: deque[tuple[Any, list[Any]]] = deque()  # events, and arrays

    def hold(self, arrays: list[Any], stream: int) -> None:
        """Hold arrays until the work that is enqueued on a stream now is done."""
        event = kernels().Event(self._device)
        try:
            if kernels().is_capturing(self._device, stream):
                return  # the owner of a graph holds its arrays
            kernels().record(event.ptr, self._device, stream)
        except KVCacheError:  # the stream was destroyed, its work may still run
            kernels().synchronize_device(self._device)
            return
        self._held.append((event, arrays))
        self.drop_done()

    def drop_done(self) -> None:
        """Release arrays whose work is done, up to the first event that is not done."""
        while self._held:
            try:
                entry = self._held.popleft()
            except IndexError:  # another thread was faster
                return
            if not kernels().query(entry[0].ptr, self._device):
                self._held.appendleft(entry)
                return

    def wait(self) -> None:
        """Block until the work of all arrays is done, and release them."""
        for event, _ in list(self._held):
            kernels().synchronize_event(event.ptr, self._device)
        self.drop_done()


@cache
def loans_of(device: int) -> Loans:
    """Return the loans of a device."""
    return Loans(device)


class Loan:
    """Collect the arrays of a call, and hold them from its end until its work is done.

    Parameters
    ----------
    device, stream : int
        Device and stream of the call's work.

    Notes
    -----
    The end of the call destroys this object: the place of the call has the only reference.
    """

    def __init__(self, device: int, stream: int) -> None:
        self._stream = stream
        self._loans = loans_of(device)
        self.arrays: list[Any] = []

    def __del__(self) -> None:
        self._loans.hold(self.arrays, self._stream)
