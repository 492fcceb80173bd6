# SPDX-License-Identifier: Apache-2.0
"""Stores to the host tier that are in flight when their pages get new owners."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcore.backends.cuda.availability import kernels

__all__ = ["LateStores"]


class LateStores:
    """Track the stores of a device that may be in flight, so that streams wait only if they must.

    Parameters
    ----------
    device : int
    late_reads : callable () -> int, or None
        Returns the highest mark of stores whose pages were reallocated since. None if pages may be
        written again without a new allocation: every stream waits for all stores.

    Notes
    -----
    Thread-safe. One stream runs all stores of a device, so a wait for a store also covers all
    earlier stores. Marks rise in the order of that stream. No call makes the host wait.
    """

    def __init__(self, device: int, late_reads: Callable[[], int] | None) -> None:
        self._device = device
        self._late_reads = late_reads
        self._lock = threading.Lock()
        self._given: deque[tuple[int, Any]] = deque()  # marks, and the events after their stores
        self._last = 0  # the latest mark
        self._done = 0  # the highest mark of completed stores
        self._passed = 0  # every later stream is after the stores up to this mark

    def add(self, mark: int, stream: int) -> None:
        """Assign a mark to the stores that are enqueued on a stream now."""
        event = kernels().Event(self._device)
        kernels().record(event.ptr, self._device, stream)
        with self._lock:
            self._drop_done()
            self._given.append((mark, event))
            self._last = mark

    def put_behind(self, mark: int, stream: int) -> None:
        """Make a stream wait for the stores up to a mark, unless they are done."""
        with self._lock:
            self._put_behind(mark, stream)

    def order(self, stream: int) -> None:
        """Make an entering stream wait for the stores of reallocated pages.

        Streams enter one at a time, and each stream waits for the streams before it. So this wait
        also covers all later streams.
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
        """Remove the events of completed stores."""
        while self._given and kernels().query(self._given[0][1].ptr, self._device):
            self._done = self._given.popleft()[0]
