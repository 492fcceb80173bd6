# SPDX-License-Identifier: Apache-2.0
"""Threads of an owner, in a complete list even if an interrupt hits the start of a thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread, current_thread
from time import monotonic

__all__ = ["Threads"]


class Threads:
    """Start daemon threads, and wait for their end.

    ``Thread.start`` waits until the new thread runs. A KeyboardInterrupt during this wait is raised
    although the thread runs, so a list that is written after the start misses the thread. This
    class writes the list first. If the start raises, the starter and the thread compete for one
    lock: the thread works if it takes the lock first, and never works otherwise.

    Parameters
    ----------
    name : str
        Name of each thread.

    Notes
    -----
    Any number of threads may call the methods. ``concurrent.futures.ThreadPoolExecutor`` is not
    suitable: it writes its list of threads after the start, and the interpreter waits for its
    threads at exit, so a store that hangs would keep the program from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._threads: list[_Thread] = []

    def __len__(self) -> int:
        """Return the number of threads that have been started and have not ended."""
        with self._lock:
            self._threads = [thread for thread in self._threads if not thread.is_over()]
            return len(self._threads)

    def start(self, work: Callable[[], None]) -> None:
        """Start a thread that calls `work`.

        Raises
        ------
        RuntimeError
            The system cannot start a thread; `work` is not called.
        BaseException
            An interrupt. If the thread works despite the interrupt, ``len()`` counts the thread and
            ``join`` waits for it. Otherwise `work` is not called.
        """
        thread = _Thread(work, self._name)
        try:
            with self._lock:
                self._threads.append(thread)
            thread.start()
        except BaseException:
            thread.cancel()
            raise

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return true if every thread but the caller has ended."""
        ends = None if timeout is None else monotonic() + timeout
        with self._lock:
            threads = [thread for thread in self._threads if thread is not current_thread()]
        return all(thread.wait(ends) for thread in threads)


class _Thread(Thread):
    """A thread that does its work unless its starter cancels it first."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._turn = Lock()  # taken once: by the thread for its work, or by ``cancel``
        self._over = Event()

    def run(self) -> None:
        work, self._work = self._work, None
        if not self._turn.acquire(blocking=False) or work is None:
            return
        try:
            work()
        finally:
            self._over.set()

    def cancel(self) -> None:
        """Cancel the work, unless the thread has begun it."""
        if self._turn.acquire(blocking=False):
            self._work = None  # also releases the references of the work
            self._over.set()

    def is_over(self) -> bool:
        """Return true if the thread has ended, or will never work."""
        return self._over.is_set() and not self.is_alive()

    def wait(self, ends: float | None) -> bool:
        """Wait until the work is over and the thread has ended; return true if it has ended."""
        if not self._over.wait(_left(ends)):
            return False
        if self.is_alive():  # also False if the thread was never started
            self.join(_left(ends))
        return not self.is_alive()


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(0.0, ends - monotonic())
