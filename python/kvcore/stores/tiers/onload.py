# SPDX-License-Identifier: Apache-2.0
"""Load pages of requests in the background, and prefetch prefixes."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any

from kvcore.native.engine import LowerSearch, StoreReader
from kvcore.stores.tiers.workers import Job, Workers

__all__ = ["Arrival", "Onload"]

_THREADS = 32


@dataclass
class Arrival:
    """The load that a request waits for.

    Parameters
    ----------
    context : context
    job : Job
    max_hit : int or None
        The longest hit that the waiting reservation accepts, in tokens.
    """

    context: Any
    job: Job
    max_hit: int | None = None


class Onload:
    """Load pages in threads, and list the requests that wait for them.

    Parameters
    ----------
    reader : StoreReader

    Attributes
    ----------
    waiting : dict of request id to Arrival
        Usually empty; if it is empty, a fetch does no other work.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._workers = Workers("kvcore onload", _THREADS, queues=True)
        self.waiting: dict[Hashable, Arrival] = {}
        self._asked: set[Hashable] = set()  # claimed requests: one load per claim
        self._lock = Lock()

    def begin(self, search: LowerSearch, context: Any) -> None:
        """Load pages for a request, once per claim."""
        name = context.request_id
        with self._lock:
            if name in self._asked:
                self._wait_as(name, context)
                return
            job = self._workers.start(lambda: self._reader.load(search))
            if job is None:
                return
            self._asked.add(name)
            self.waiting[name] = Arrival(context, job, search.max_hit)
            _mark(context, is_pending=True)

    def prefetch(self, search: LowerSearch) -> None:
        """Load the pages of a prefix that stores have."""
        self._workers.start(lambda: self._reader.load(search))

    def take(self) -> list[tuple[Hashable, Arrival]]:
        """Return the requests whose pages have arrived, and remove them from `waiting`."""
        with self._lock:
            names = [name for name, each in self.waiting.items() if each.job.done()]
            return [(name, self._pop(name)) for name in names]

    def take_one(self, name: Hashable, timeout: float | None) -> Arrival | bool:
        """Wait for the pages of a request.

        Returns
        -------
        Arrival or bool
            True if the request does not wait; False if its pages have not arrived in time.
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
        """Put a taken request back into `waiting`, unless it was released meanwhile."""
        name = arrival.context.request_id
        with self._lock:
            if name in self._asked and name not in self.waiting:
                self.waiting[name] = arrival
                _mark(arrival.context, is_pending=True)

    def drop(self, name: Hashable) -> None:
        """Remove a released request; its loaded pages stay in the host tier."""
        with self._lock:
            self._asked.discard(name)
            if name in self.waiting:
                self._pop(name)

    def give_up(self) -> None:
        """End the wait of all requests, in a child of fork, which has no threads."""
        self._lock = Lock()  # a thread of the parent may have held the old lock
        for arrival in self.waiting.values():
            _mark(arrival.context, is_pending=False)
        self.waiting.clear()

    def close(self, timeout: float | None) -> bool:
        """End the threads; return whether all of them ended within `timeout` seconds."""
        ends = None if timeout is None else monotonic() + timeout
        with self._lock:
            for name in [*self.waiting]:
                self._pop(name)
        return self._workers.close(None if ends is None else ends - monotonic())

    def _wait_as(self, name: Hashable, context: Any) -> None:
        """Replace the context of a waiting request by the context that was reserved last."""
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
    """Set ``pending`` of a context that has this attribute."""
    with suppress(AttributeError):
        context._set_pending(is_pending)  # noqa: SLF001 - kvcore's own
