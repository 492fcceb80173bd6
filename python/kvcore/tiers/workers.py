# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may take for ever: who waits for one does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

__all__ = ["Job", "Workers"]


class Job:
    """A call that another thread makes.

    Parameters
    ----------
    work : callable
        Takes nothing. Let go once it is over: what it refers to lives until then.
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
        """Tell that it is over."""
        self._over.set()

    def done(self) -> bool:
        """Return whether it is over."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for so many seconds, or without end; return whether it is over."""
        return self._over.wait(timeout)

    def result(self) -> Any:
        """Return what the call has returned, or raise what it has raised; it is over."""
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Make calls in threads, which begin when they are needed.

    Parameters
    ----------
    name : str
        Of the threads.
    most : int
        Of them.
    queues : bool
        A call for which there is no thread waits for one; else it is not made.
    """

    def __init__(self, name: str, most: int, *, queues: bool = False) -> None:
        self._name, self._most, self._queues = name, most, queues
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._idle = 0
        self._closed = False
        self._lock = Lock()

    def start(self, work: Callable[[], Any]) -> Job | None:
        """Begin a call; None where no thread makes it: all are at work, or after ``close``."""
        job = Job(work)
        with self._lock:
            has_thread = self._idle > 0 or len(self._threads) < self._most
            if self._closed or not (has_thread or self._queues):
                return None
            if self._idle:
                self._idle -= 1
            elif has_thread and not self._begin_thread():
                return None
            self._jobs.put(job)
        return job

    def _begin_thread(self) -> bool:
        thread = Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more of them
            return False
        self._threads.append(thread)
        return True

    def close(self, timeout: float | None = None) -> bool:
        """End the threads; return whether they have ended after so many seconds.

        Calls that wait for a thread are not made any more.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_queued()
                for _ in self._threads:
                    self._jobs.put(None)
        ends = None if timeout is None else monotonic() + timeout
        for thread in self._threads:
            thread.join(None if ends is None else max(0.0, ends - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

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
                return
            job.run()
            with self._lock:
                self._idle += 1  # first: who waits for the job may bring the next one at once
            job.end()
            del job
