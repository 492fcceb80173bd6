# SPDX-License-Identifier: Apache-2.0
"""Write what arrives in the host tier to the stores below it, in the background."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Condition
from time import monotonic
from typing import Protocol

from kvcore.stores.tiers.adapters import StoreAdapter
from kvcore.stores.tiers.memory import HostMemory
from kvcore.support.threads import Threads

__all__ = ["StoreWriter", "WriteQueue", "Writes"]

log = logging.getLogger("kvcore")


class Writes(Protocol):
    """Say what is asked of a `kvcore.native.engine.StoreWrites`."""

    @property
    def replica(self) -> int:
        """Of the pages."""

    @property
    def keys(self) -> list[bytes]:
        """Of the columns."""

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """Of each column (part, page of the host tier or slot)."""

    def note_stored(self) -> None:
        """Tell who listens to events that a store has them."""

    def finish(self) -> None:
        """They are written, or never will be."""


class WriteQueue(Protocol):
    """Say what is asked of a `kvcore.native.engine.StoreSide`."""

    @property
    def waiting(self) -> int:
        """Columns that wait or are being written."""

    @property
    def dropped(self) -> int:
        """Columns that were forgotten while they waited."""

    def take_writes(self, most: int) -> Writes | None:
        """Take some to write them; None where none waits."""


class StoreWriter:
    """Write in one thread, which begins with the first page and ends with ``close``.

    Parameters
    ----------
    queue : StoreSide
        What waits.
    stores : sequence of StoreAdapter
        Each gets what it lacks.
    memory : HostMemory
    batch : int
        Pages that are held at a time.
    most_waiting : int
        Pages that may wait before `arrived` waits for them.
    seconds : float
        That it waits, at most.
    """

    def __init__(
        self,
        queue: WriteQueue,
        stores: Sequence[StoreAdapter],
        memory: HostMemory,
        *,
        batch: int,
        most_waiting: int,
        seconds: float,
    ) -> None:
        self._queue, self._stores, self._memory = queue, tuple(stores), memory
        self._batch, self._most_waiting, self._seconds = batch, most_waiting, seconds
        self._changed = Condition()
        self._threads = Threads("kvcore writer")  # one at most
        self._is_asked = False
        self._is_closing = False
        self._epoch = 0
        self._finished = 0  # pages, in the order in which they arrived
        self._lost = 0  # of those, pages that some store did not take
        self._lost_before = 0
        self._dropped_before = 0
        self._waited_in_vain_at = -1  # pages finished by then

    def arrived(self) -> None:
        """Write what has arrived in the host tier; wait a bounded time where much does."""
        waiting = self._queue.waiting
        if not waiting or self._is_closing:
            return
        with self._changed:
            self._ask()
            is_much = waiting > self._most_waiting and len(self._threads) > 0
            if is_much and self._finished != self._waited_in_vain_at:
                before = self._finished
                self._changed.wait_for(
                    lambda: self._queue.waiting <= self._most_waiting, self._seconds
                )
                # Not every step waits for a store that hangs: once, until something moves.
                if self._finished == before:
                    self._waited_in_vain_at = before

    def drain(self) -> bool:
        """Wait a bounded time until nothing waits; return whether anything did."""
        if not self._queue.waiting or self._is_closing:
            return False
        with self._changed:
            self._ask()
            seconds = min(self._seconds, _ROOM_SECONDS)
            self._changed.wait_for(lambda: not self._queue.waiting, seconds)
        return True

    def flush(self, timeout: float | None) -> bool:
        """Wait until what waits now is written; return whether all since the last time is."""
        ends = None if timeout is None else monotonic() + timeout
        with self._changed:
            last = self._queue.waiting + self._over()  # what is dropped in between counts twice
            while self._over() < last and self._queue.waiting and not self._is_closing:
                left = None if ends is None else ends - monotonic()
                if left is not None and left <= 0:
                    return False
                self._ask()
                # Pages that are dropped wake nobody.
                self._changed.wait(_LOOK_AGAIN if left is None else min(left, _LOOK_AGAIN))
            lost = self._lost - self._lost_before + self._queue.dropped - self._dropped_before
            self._begin_counting()
            return lost == 0

    def forget(self) -> None:
        """Let nothing stay in a store that is on its way there now."""
        with self._changed:
            self._epoch += 1

    def forgotten(self) -> None:
        """Do not count what was dropped by a reset as lost."""
        with self._changed:
            self._begin_counting()

    def stop(self) -> None:
        """Have the thread end when it has written what it has taken."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout: float | None) -> bool:
        """End the thread; return whether it has ended after so many seconds."""
        self.stop()
        return self._threads.join(timeout)

    def _over(self) -> int:
        return self._finished + self._queue.dropped

    def _begin_counting(self) -> None:
        self._lost_before, self._dropped_before = self._lost, self._queue.dropped

    def _ask(self) -> None:
        """Wake the thread, or begin it; under the lock."""
        if not self._is_closing and len(self._threads) == 0:
            try:
                self._threads.start(self._run)
            except RuntimeError:  # the system has no more of them; the next call tries again
                log.exception("pages cannot be written to the stores below the host tier")
                return
        self._is_asked = True
        self._changed.notify_all()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._write_all()
            except Exception:  # no memory: what waits goes on waiting
                log.exception("pages could not be written to the stores below the host tier")

    def _write_all(self) -> None:
        while not self._is_closing:
            epoch = self._epoch  # first: a reset from now on is about what is taken
            writes = self._queue.take_writes(self._batch)
            if writes is None:
                return
            self._write(writes, epoch)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_asked or self._is_closing)
            self._is_asked = False
            return not self._is_closing

    def _write(self, writes: Writes, epoch: int) -> None:
        lost = len(writes.keys)
        try:
            lost = self._put(writes, epoch)
        except Exception:  # lost, whatever it is
            log.exception("pages could not be written to the stores below the host tier")
        finally:
            with self._changed:
                writes.finish()
                self._finished += len(writes.keys)
                self._lost += lost
                self._changed.notify_all()

    def _put(self, writes: Writes, epoch: int) -> int:
        """Write to all stores; return how many pages some of them did not take."""
        self._memory.settle(writes.replica)
        # A page to which something was added while it waited is there twice.
        pages = {
            key: self._memory.parts(writes.replica, parts)
            for key, parts in zip(writes.keys, writes.parts, strict=True)
        }
        keys, parts = [*pages], [*pages.values()]
        waits = [store.write(keys, parts) for store in self._stores]
        counts = [wait() for wait in waits]
        if epoch != self._epoch:  # a reset came in between, and each store was emptied since
            for store in self._stores:
                store.remove(keys)
        elif max(counts) == len(keys):
            writes.note_stored()
        return len(keys) - min(counts)


#: Seconds to wait for room in the host tier, for pages that stores have.
_ROOM_SECONDS = 0.1

#: Seconds after which a flush looks for pages that were dropped.
_LOOK_AGAIN = 0.05
