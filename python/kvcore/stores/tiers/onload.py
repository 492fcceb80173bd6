# SPDX-License-Identifier: Apache-2.0
"""Requests that go on while pages for them are brought, and prefixes that are brought ahead."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any, Protocol

from kvcore.stores.tiers.reader import FillSearch, StoreReader
from kvcore.stores.tiers.workers import Job, Workers

__all__ = ["Arrival", "Onload", "RequestSearch"]

_THREADS = 32


class RequestSearch(FillSearch, Protocol):
    """Say what is asked of the search of a request beside."""

    @property
    def max_hit(self) -> int | None:
        """Tokens that its hit may have, where it said so."""


@dataclass
class Arrival:
    """Hold what a request waits for.

    Parameters
    ----------
    context : context
    job : Job
    max_hit : int or None
        As of the reservation that waits.
    """

    context: Any
    job: Job
    max_hit: int | None = None


class Onload:
    """Bring pages in threads, and know which requests wait for them.

    Parameters
    ----------
    reader : StoreReader

    Attributes
    ----------
    waiting : dict of request id to Arrival
        Empty mostly: then a fetch asks nothing more.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._workers = Workers("kvcore onload", _THREADS, queues=True)
        self.waiting: dict[Hashable, Arrival] = {}
        self._asked: set[Hashable] = set()  # of claimed requests: once for each claim
        self._lock = Lock()

    def begin(self, search: RequestSearch, context: Any) -> None:
        """Bring what a request can use; not a second time."""
        name = context.request_id
        with self._lock:
            if name in self._asked:
                self._wait_as(name, context)
                return
            job = self._workers.start(lambda: self._reader.bring(search))
            if job is None:
                return
            self._asked.add(name)
            self.waiting[name] = Arrival(context, job, search.max_hit)
            _mark(context, is_pending=True)

    def prefetch(self, search: FillSearch) -> None:
        """Bring what is found of a prefix."""
        self._workers.start(lambda: self._reader.bring(search))

    def take(self) -> list[tuple[Hashable, Arrival]]:
        """Return the requests whose pages have arrived, which wait no longer."""
        with self._lock:
            names = [name for name, each in self.waiting.items() if each.job.done()]
            return [(name, self._pop(name)) for name in names]

    def take_one(self, name: Hashable, timeout: float | None) -> Arrival | bool:
        """Wait for the pages of a request.

        Returns
        -------
        Arrival or bool
            True where it does not wait for any; False where they have not arrived in time.
        """
        with self._lock:
            arrival = self.waiting.get(name)
        if arrival is None:
            return True
        if not arrival.job.wait(timeout):
            return False
        with self._lock:
            return self._pop(name) if self.waiting.get(name) is arrival else True

    def put_back(self, arrival: Arrival) -> None:
        """Have a request that was taken wait again, unless it was released since."""
        name = arrival.context.request_id
        with self._lock:
            if name in self._asked and name not in self.waiting:
                self.waiting[name] = arrival
                _mark(arrival.context, is_pending=True)

    def drop(self, name: Hashable) -> None:
        """Forget a request that was released; what is brought for it stays in the host tier."""
        with self._lock:
            self._asked.discard(name)
            if name in self.waiting:
                self._pop(name)

    def give_up(self) -> None:
        """Let no request wait any longer: nobody brings anything."""
        self._lock = Lock()  # somebody of the parent's may have had the other
        for arrival in self.waiting.values():
            _mark(arrival.context, is_pending=False)
        self.waiting.clear()

    def close(self, timeout: float | None) -> bool:
        """End the threads; return whether they have ended after so many seconds."""
        ends = None if timeout is None else monotonic() + timeout
        with self._lock:
            for name in [*self.waiting]:
                self._pop(name)
        return self._workers.close(None if ends is None else ends - monotonic())

    def _wait_as(self, name: Hashable, context: Any) -> None:
        """Let the context that was reserved last stand for a request that waits."""
        arrival = self.waiting.get(name)
        if arrival is not None and arrival.context is not context:
            _mark(arrival.context, is_pending=False)
            arrival.context = context
            _mark(context, is_pending=True)

    def _pop(self, name: Hashable) -> Arrival:
        arrival = self.waiting.pop(name)
        _mark(arrival.context, is_pending=False)
        return arrival


def _mark(context: Any, *, is_pending: bool) -> None:
    """Set ``pending``, on contexts that have one."""
    with suppress(AttributeError):
        context._set_pending(is_pending)  # noqa: SLF001 - kvcore's own
