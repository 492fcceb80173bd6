# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may never return, so that the caller can stop waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any

from kvcore.support.threads import Threads

__all__ = ["Job", "Workers"]


class Job:
    """A call that another thread makes.

    Parameters
    ----------
    work : callable
        Takes no arguments. The job holds `work`, and all that `work` refers to, until the call is
        over.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = Event()

    def run(self) -> None:
        """Make the call."""
        work, self._work = self._work, None
        try:
            self._result = work() if work is not None else None
        except BaseException as error:  # noqa: BLE001 - the caller's thread gets it
            self._error = error

    def end(self) -> None:
        """Mark the call as over, and wake the waiting threads."""
        self._over.set()

    def done(self) -> bool:
        """Return whether the call is over."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds, or without limit; return whether the call is over."""
        return self._over.wait(timeout)

    def result(self) -> Any:
        """Return the result of the call, which is over, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Make calls in threads, which start when they are needed.

    Parameters
    ----------
    name : str
        Name of the threads.
    most : int
        The most threads.
    queues : bool
        If true, a call waits when all threads are in use; otherwise the call is not made.
    """

    def __init__(self, name: str, most: int, *, queues: bool = False) -> None:
        self._most, self._queues = most, queues
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = Threads(name)
        self._unfinished = 0  # calls that wait for a thread or are being made
        self._closed = False
        self._lock = Lock()

    def start(self, work: Callable[[], Any]) -> Job | None:
        """Start a call; return None if no thread can make it, or after ``close``."""
        job = Job(work)
        with self._lock:
            if self._closed or not (self._has_thread() or self._may_queue()):
                return None
            self._unfinished += 1
            self._jobs.put(job)
        return job

    def _has_thread(self) -> bool:
        """Return whether a thread is free for one more call; start a thread if necessary."""
        threads = len(self._threads)
        if self._unfinished < threads:
            return True
        if threads == self._most:
            return False
        try:
            self._threads.start(self._run)
        except RuntimeError:  # the system cannot start more threads
            return False
        return True

    def _may_queue(self) -> bool:
        """Return whether a call may wait until a thread has finished another call."""
        return self._queues and len(self._threads) > 0

    def close(self, timeout: float | None = None) -> bool:
        """End the threads; return whether all of them ended within `timeout` seconds.

        Calls that wait for a thread are not made.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_queued()
                self._jobs.put(None)
        return self._threads.join(timeout)

    def _drop_queued(self) -> None:
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.end()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # for the next thread, so that all threads end
                return
            job.run()
            with self._lock:
                self._unfinished -= 1  # before `end`: its waiter may start the next call at once
            job.end()
            del job
