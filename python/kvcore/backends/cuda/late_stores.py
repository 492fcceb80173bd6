# SPDX-License-Identifier: Apache-2.0
"""Stores to the host tier that are on their way when their pages get new owners."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcore.backends.cuda.availability import kernels

__all__ = ["LateStores"]


class LateStores:
    """Know of a device which of its stores may not be done, so that only who must waits for them.

    Parameters
    ----------
    device : int
    late_reads : callable () -> int, or None
        Tells the highest mark of stores whose pages were handed out since. None where pages may be
        written again without being handed out: then everybody waits for all stores.

    Notes
    -----
    Thread-safe. One stream makes all stores of a device, so who waits for one is behind all up to
    it. Their marks rise in the order of that stream. No call makes the host wait.
    """

    def __init__(self, device: int, late_reads: Callable[[], int] | None) -> None:
        self._device = device
        self._late_reads = late_reads
        self._lock = threading.Lock()
        self._given: deque[tuple[int, Any]] = deque()  # marks, and events that follow the stores
        self._last = 0  # mark given last
        self._done = 0  # of stores that are known to be done
        self._passed = 0  # that everybody who enters later is behind

    def add(self, mark: int, stream: int) -> None:
        """Have a mark stand for the stores that a stream has now."""
        event = kernels().Event(self._device)
        kernels().record(event.ptr, self._device, stream)
        with self._lock:
            self._drop_done()
            self._given.append((mark, event))
            self._last = mark

    def put_behind(self, mark: int, stream: int) -> None:
        """Have a stream wait for the stores up to a mark, as far as they are not done."""
        with self._lock:
            self._put_behind(mark, stream)

    def order(self, stream: int) -> None:
        """Put a stream that enters, and so all that enter later, behind the stores that it must.

        Streams enter one at a time, each behind those before it.
        """
        wanted = self._last if self._late_reads is None else self._late_reads()
        if wanted > self._passed:
            with self._lock:
                self._put_behind(wanted, stream)
            self._passed = wanted

    def _put_behind(self, mark: int, stream: int) -> None:
        self._drop_done()
        if mark <= self._done:
            return
        for given, event in self._given:
            if given >= mark:
                kernels().wait(event.ptr, self._device, stream)
                return

    def _drop_done(self) -> None:
        """Forget stores that are done."""
        while self._given and kernels().query(self._given[0][1].ptr, self._device):
            self._done = self._given.popleft()[0]
