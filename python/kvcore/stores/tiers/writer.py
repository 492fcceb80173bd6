# SPDX-License-Identifier: Apache-2.0
"""Write pages that arrive in the host tier to the lower stores, in the background."""

from __future__ import annotations

import logging
from threading import Condition
from time import monotonic

from kvcore.native.engine import StoreSide, StoreWriter, StoreWrites
from kvcore.stores.tiers.memory import HostMemory
from kvcore.support.threads import Threads

__all__ = ["WriterThread"]

log = logging.getLogger("kvcore")


class WriterThread:
    """Write in one thread, which starts with the first page and ends with ``close``.

    Parameters
    ----------
    queue : StoreSide
        Queue of the columns to write.
    writer : StoreWriter
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
        queue: StoreSide,
        writer: StoreWriter,
        memory: HostMemory,
        *,
        batch: int,
        most_waiting: int,
        seconds: float,
    ) -> None:
        self._queue, self._writer, self._memory = queue, writer, memory
        self._batch, self._most_waiting, self._seconds = batch, most_waiting, seconds
        self._changed = Condition()
        self._threads = Threads("kvcore writer")  # at most one thread
        self._is_asked = False
        self._is_closing = False
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
            writes = self._writer.take(self._batch)
            if writes is None:
                return
            self._write(writes)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_asked or self._is_closing)
            self._is_asked = False
            return not self._is_closing

    def _write(self, writes: StoreWrites) -> None:
        lost = len(writes)
        try:
            self._memory.settle(writes.replica)
            lost = writes.write()
        except Exception:  # every failure loses the batch
            log.exception("pages could not be written to the stores below the host tier")
        finally:
            with self._changed:
                writes.finish()
                self._finished += len(writes)
                self._lost += lost
                self._changed.notify_all()


#: The most seconds that a load waits for room in the host tier.
_ROOM_SECONDS = 0.1

#: Seconds between the checks of a flush for dropped pages.
_LOOK_AGAIN = 0.05
