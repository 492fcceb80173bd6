# SPDX-License-Identifier: Apache-2.0
"""Write pages that arrive in the host tier to the lower stores, in the background."""

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
    """The attributes of `kvcore.native.engine.StoreWrites` that `StoreWriter` uses."""

    @property
    def replica(self) -> int:
        """The replica of the pages."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of the columns."""

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """The parts of each column, as (part, page of the host tier or slot)."""

    def note_stored(self) -> None:
        """Report in the events that a store has all these columns."""

    def finish(self) -> None:
        """End the batch, whether its columns were written or not; they may be evicted again."""


class WriteQueue(Protocol):
    """The attributes of `kvcore.native.engine.StoreSide` that `StoreWriter` uses."""

    @property
    def waiting(self) -> int:
        """The number of columns that wait or are being written."""

    @property
    def dropped(self) -> int:
        """The number of columns that were dropped while they waited."""

    def take_writes(self, most: int) -> Writes | None:
        """Take at most `most` columns to write them; return None if no column waits."""


class StoreWriter:
    """Write in one thread, which starts with the first page and ends with ``close``.

    Parameters
    ----------
    queue : StoreSide
        Queue of the columns to write.
    stores : sequence of StoreAdapter
        Each store gets the pages that it lacks.
    memory : HostMemory
    batch : int
        The most pages of a batch.
    most_waiting : int
        `arrived` waits for the stores if more pages than this are queued.
    seconds : float
        The most seconds that `arrived` waits.
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
        self._threads = Threads("kvcore writer")  # at most one thread
        self._is_asked = False
        self._is_closing = False
        self._epoch = 0
        self._finished = 0  # pages that the thread has written or lost, in the order of arrival
        self._lost = 0  # finished pages that some store did not take
        self._lost_before = 0
        self._dropped_before = 0
        self._waited_in_vain_at = -1  # `_finished` at the last wait without progress

    def arrived(self) -> None:
        """Write the pages that arrived in the host tier; wait a limited time if many are queued."""
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
                # While a store hangs, only one step waits for it, until a page is finished.
                if self._finished == before:
                    self._waited_in_vain_at = before

    def drain(self) -> bool:
        """Wait a limited time until the queue is empty; return whether it had pages."""
        if not self._queue.waiting or self._is_closing:
            return False
        with self._changed:
            self._ask()
            seconds = min(self._seconds, _ROOM_SECONDS)
            self._changed.wait_for(lambda: not self._queue.waiting, seconds)
        return True

    def flush(self, timeout: float | None) -> bool:
        """Wait until the queue is written; return whether all pages since the last flush are."""
        ends = None if timeout is None else monotonic() + timeout
        with self._changed:
            last = self._queue.waiting + self._over()  # a page dropped meanwhile counts twice
            while self._over() < last and self._queue.waiting and not self._is_closing:
                left = None if ends is None else ends - monotonic()
                if left is not None and left <= 0:
                    return False
                self._ask()
                # A dropped page does not wake this thread.
                self._changed.wait(_LOOK_AGAIN if left is None else min(left, _LOOK_AGAIN))
            lost = self._lost - self._lost_before + self._queue.dropped - self._dropped_before
            self._begin_counting()
            return lost == 0

    def forget(self) -> None:
        """Let pages in flight be removed from the stores after they are written."""
        with self._changed:
            self._epoch += 1

    def forgotten(self) -> None:
        """Do not count the pages that a reset dropped as lost."""
        with self._changed:
            self._begin_counting()

    def stop(self) -> None:
        """End the thread after its current batch, without waiting for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, timeout: float | None) -> bool:
        """End the thread; return whether it ended within `timeout` seconds."""
        self.stop()
        return self._threads.join(timeout)

    def _over(self) -> int:
        return self._finished + self._queue.dropped

    def _begin_counting(self) -> None:
        self._lost_before, self._dropped_before = self._lost, self._queue.dropped

    def _ask(self) -> None:
        """Wake the thread, or start it; the caller holds the lock."""
        if not self._is_closing and len(self._threads) == 0:
            try:
                self._threads.start(self._run)
            except RuntimeError:  # the system cannot start a thread; the next call tries again
                log.exception("pages cannot be written to the stores below the host tier")
                return
        self._is_asked = True
        self._changed.notify_all()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._write_all()
            except Exception:  # such as no memory: the queued pages stay queued
                log.exception("pages could not be written to the stores below the host tier")

    def _write_all(self) -> None:
        while not self._is_closing:
            epoch = self._epoch  # read first: a later reset applies to the batch
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
        except Exception:  # every failure loses the batch
            log.exception("pages could not be written to the stores below the host tier")
        finally:
            with self._changed:
                writes.finish()
                self._finished += len(writes.keys)
                self._lost += lost
                self._changed.notify_all()

    def _put(self, writes: Writes, epoch: int) -> int:
        """Write to all stores; return the number of pages that some store did not take."""
        self._memory.settle(writes.replica)
        # A page is in the batch twice if parts were added to it while it waited.
        pages = {
            key: self._memory.parts(writes.replica, parts)
            for key, parts in zip(writes.keys, writes.parts, strict=True)
        }
        keys, parts = [*pages], [*pages.values()]
        waits = [store.write(keys, parts) for store in self._stores]
        counts = [wait() for wait in waits]
        if epoch != self._epoch:  # a reset came meanwhile: the pages may be newer than its clear
            for store in self._stores:
                store.remove(keys)
        elif max(counts) == len(keys):
            writes.note_stored()
        return len(keys) - min(counts)


#: The most seconds that a load waits for room in the host tier.
_ROOM_SECONDS = 0.1

#: Seconds between the checks of a flush for dropped pages.
_LOOK_AGAIN = 0.05
