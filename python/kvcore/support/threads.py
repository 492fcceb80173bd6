# SPDX-License-Identifier: Apache-2.0
"""Threads of an owner, which knows each of them, also where an interrupt meets their start."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread, current_thread
from time import monotonic

__all__ = ["Threads"]


class Threads:
    """Start daemon threads, and wait for their end.

    ``Thread.start`` waits until the new thread runs. A KeyboardInterrupt that comes meanwhile is
    raised there although the thread runs, so a list that is written after the start lacks the
    thread. Here the list is written first, and a start that raises decides with one lock, which
    the thread takes before its work, whether the thread works or never will.

    Parameters
    ----------
    name : str
        Name of each thread.

    Notes
    -----
    Any number of threads may call the methods. ``concurrent.futures.ThreadPoolExecutor`` does not
    serve: its list of threads is written after the start, and the interpreter waits for its threads
    at exit, so that a store that hangs would keep the program from ending.
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
            The system starts no more threads; `work` is not called.
        BaseException
            An interrupt. The thread may work all the same: then ``len()`` counts the thread and
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
        """Wait `timeout` seconds at most; return whether every thread but the caller has ended."""
        ends = None if timeout is None else monotonic() + timeout
        with self._lock:
            threads = [thread for thread in self._threads if thread is not current_thread()]
        return all(thread.wait(ends) for thread in threads)


class _Thread(Thread):
    """A thread that works once its starter has not given it up."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._turn = Lock()  # taken once: by the thread that works, or by who cancels the work
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
        """Keep the thread from working, unless it has begun."""
        if self._turn.acquire(blocking=False):
            self._work = None  # and what the work holds
            self._over.set()

    def is_over(self) -> bool:
        """Return whether the thread has ended, or never works."""
        return self._over.is_set() and not self.is_alive()

    def wait(self, ends: float | None) -> bool:
        """Wait until the work is over and the thread has ended; return whether it has."""
        if not self._over.wait(_left(ends)):
            return False
        if self.is_alive():  # False as well where the thread was never started
            self.join(_left(ends))
        return not self.is_alive()


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(0.0, ends - monotonic())
