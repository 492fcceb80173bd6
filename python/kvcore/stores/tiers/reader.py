# SPDX-License-Identifier: Apache-2.0
"""Load pages from the lower stores into the host tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Event, Lock
from time import monotonic
from typing import Protocol

from kvcore.stores import StoreHandle
from kvcore.stores.tiers.adapters import StoreAdapter
from kvcore.stores.tiers.memory import HostMemory, Places
from kvcore.support.threads import Threads

__all__ = ["Fill", "FillSearch", "Flights", "Found", "Search", "StoreDepth", "StoreReader"]


class Flights:
    """Register the pages that are being read from stores, by replica and key."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, bytes], Event] = {}
        self._lock = Lock()

    def begin(self, replica: int, keys: Iterable[bytes]) -> Event | None:
        """Register pages as in flight and return None.

        If a page is already in flight, register no page, and return the event that is set when the
        read of that page ends.
        """
        names = [(replica, key) for key in keys]
        over = Event()
        with self._lock:
            for name in names:
                before = self._under_way.get(name)
                if before is not None:
                    return before
            self._under_way.update(dict.fromkeys(names, over))
        return None

    def end(self, replica: int, keys: Iterable[bytes]) -> None:
        """Remove pages whose read has ended, and set their events."""
        with self._lock:
            over = [self._under_way.pop((replica, key)) for key in keys]
        for each in over:
            each.set()


_FIRST_BATCH, _MOST_BATCH = 8, 256


class Search(Protocol):
    """The attributes of `kvcore.native.engine.BelowSearch` that `StoreDepth` uses."""

    @property
    def replica(self) -> int:
        """The replica of the pages."""

    @property
    def have(self) -> int:
        """The number of columns in the device or the host tier, whichever has more."""

    @property
    def most(self) -> int:
        """The number of columns of the longest possible hit."""

    @property
    def has_gaps(self) -> bool:
        """Whether a hit does not need all of its columns."""

    def keys(self, first: int, last: int) -> list[bytes]:
        """Return the keys of columns ``first .. last - 1``."""

    def needed(self, end: int) -> list[tuple[int, int]]:
        """Return the columns, and their parts as bits, that a hit of `end` columns lacks."""


#: The store that has a column, and the stored parts as bits.
Found = tuple[StoreAdapter, int]


class StoreDepth:
    """Find columns of a prompt in stores.

    Parameters
    ----------
    search : BelowSearch
    stores : sequence of StoreAdapter
        Each column is read from the first store that has it.
    """

    def __init__(self, search: Search, stores: Sequence[StoreAdapter]) -> None:
        self._search, self._stores = search, stores
        self._found: dict[int, Found | None] = {}
        self._bad: set[tuple[int, str]] = set()

    def reach(self) -> int:
        """Return the number of columns before the first column that is in no tier.

        If a hit does not need all columns, count up to the last column that a store has.
        """
        if self._search.has_gaps:
            return self._reach_over_gaps()
        end, batch = self._search.have, 1
        while end < self._search.most:
            last = min(end + batch, self._search.most)
            self._look(range(end, last))
            for column in range(end, last):
                if self._found[column] is None:
                    return column
            end, batch = last, min(_MOST_BATCH, max(_FIRST_BATCH, 2 * batch))
        return end

    def _reach_over_gaps(self) -> int:
        columns = range(self._search.have, self._search.most)
        self._look(columns)
        found = [column for column in columns if self._found[column] is not None]
        return found[-1] + 1 if found else self._search.have

    def best(self, end: int, least: int) -> list[tuple[int, int]]:
        """Return the columns that stores must load for the longest hit of at most `end` columns.

        The items are those of `BelowSearch.needed`; according to the stores, all parts are stored.
        The list is empty if no hit is longer than `least` columns.
        """
        while end > least:
            needed = self._search.needed(end)
            self._look([column for column, _ in needed])
            lacking = [column for column, parts in needed if parts & ~self._parts(column)]
            if not lacking:
                return needed
            # A hit that ends after the last lacking column needs it; try a hit that ends before it.
            end = lacking[-1]
        return []

    def store_of(self, column: int) -> StoreAdapter | None:
        """Return the store of a column that was looked up; return None without a store."""
        found = self._found.get(column)
        return found[0] if found is not None else None

    def learn(self, column: int, parts: int) -> None:
        """Record the stored parts of a column, which the store could not list before the read."""
        found = self._found[column]
        if found is not None:
            self._found[column] = (found[0], parts)

    def lose(self, column: int) -> bool:
        """Record that a store lacks a column; return whether another store has it."""
        found = self._found.pop(column)
        if found is not None:
            self._bad.add((column, found[0].name))
        self._look([column])
        return self._found[column] is not None

    def _parts(self, column: int) -> int:
        found = self._found[column]
        return 0 if found is None else found[1]

    def _look(self, columns: Sequence[int]) -> None:
        """Look up columns in the stores, except columns that were looked up before."""
        open_columns = {column for column in columns if column not in self._found}
        if not open_columns:
            return
        keys = dict(self._keys(sorted(open_columns)))
        for store in self._stores:
            asked = [column for column in keys if (column, store.name) not in self._bad]
            answers = store.parts_of([keys[column] for column in asked]) if asked else []
            for column, parts in zip(asked, answers, strict=True):
                if parts:
                    self._found[column] = (store, parts)
                    del keys[column]
            if not keys:
                return
        self._found.update(dict.fromkeys(keys))

    def _keys(self, columns: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield columns and their keys, with one call for each run of adjacent columns."""
        first = 0
        for i in range(1, len(columns) + 1):
            if i == len(columns) or columns[i] != columns[i - 1] + 1:
                run = columns[first:i]
                yield from zip(run, self._search.keys(run[0], run[-1] + 1), strict=True)
                first = i


log = logging.getLogger("kvcore")

#: The most attempts to load one prompt; each attempt uses the results of earlier attempts.
_ROUNDS = 8


class Fill(Protocol):
    """The attributes of `kvcore.native.engine.Fill` that `StoreReader` uses."""

    @property
    def replica(self) -> int:
        """The replica of the pages."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of the columns."""

    @property
    def parts(self) -> list[list[tuple[int, int]]]:
        """The parts of each column, as (part, page of the host tier or slot)."""

    def finish(self, arrived: int, forward: bool = ...) -> None:  # noqa: FBT001 - native
        """Add the first `arrived` columns to the host tier, and free the others."""


class FillSearch(Search, Protocol):
    """The attributes of `kvcore.native.engine.BelowSearch` that `StoreReader` uses."""

    @property
    def legal(self) -> int:
        """The number of columns that a hit can have now."""

    def begin_fill(self, columns: list[tuple[int, int]]) -> Fill | None:
        """Take pages of the host tier for columns; return None without room."""


class StoreReader:
    """Load the pages of prompts from stores into the host tier.

    Parameters
    ----------
    stores : sequence of StoreAdapter
        In the order in which they are searched.
    memory : HostMemory
    batch_bytes : int
        Approximate number of bytes that one call of a store reads.
    seconds : float
        Time limit for waiting until another thread has read pages.
    drain : callable
        Waits a limited time until queued pages, which take room in the host tier, are written;
        returns whether pages were queued.

    Notes
    -----
    Any number of threads may use it. A failure does not raise: it shortens the hit.
    """

    def __init__(
        self,
        stores: Sequence[StoreAdapter],
        memory: HostMemory,
        batch_bytes: int,
        seconds: float,
        drain: Callable[[], bool],
    ) -> None:
        self._stores = tuple(stores)
        self._asks = tuple(store.parts_of for store in stores)
        self._memory, self._batch_bytes, self._seconds = memory, batch_bytes, seconds
        self._drain = drain
        self._flights = Flights()
        self._epoch = 0
        self._lock = Lock()
        self._reapers = Threads("kvcore late read")
        self._is_closed = False

    def may_have(self, key: bytes) -> bool:
        """Return whether any store has a page."""
        keys = [key]
        return any(ask(keys)[0] for ask in self._asks)

    def depth(self, search: Search) -> int:
        """Return the number of columns of a prompt that the tiers report, without reading them."""
        return StoreDepth(search, self._stores).reach()

    def bring(self, search: FillSearch) -> None:
        """Load the pages that extend the hit of a prompt into the host tier."""
        try:
            self._bring(search)
        except Exception:  # every failure only shortens the hit
            if not self._is_closed:
                log.exception("pages could not be loaded from the stores below the host tier")

    def forget(self) -> None:
        """Discard the pages that are in flight now: no search finds them."""
        with self._lock:
            self._epoch += 1

    def close(self, timeout: float | None) -> None:
        """Wait for reads that exceeded the time limit, whose memory the stores still use."""
        self._is_closed = True
        self._reapers.join(timeout)

    def _bring(self, search: FillSearch) -> None:
        depth = StoreDepth(search, self._stores)
        end = depth.reach()
        waits_until = monotonic() + self._seconds
        least = search.legal
        for _ in range(_ROUNDS):
            columns = depth.best(end, least)
            if not columns:
                return
            keys = [search.keys(column, column + 1)[0] for column, _ in columns]
            other = self._flights.begin(search.replica, keys)
            if other is not None:
                if not other.wait(max(0.0, waits_until - monotonic())):
                    return
                continue
            try:
                is_whole = self._fill(search, depth, dict(zip(keys, columns, strict=True)))
            finally:
                self._flights.end(search.replica, keys)
            if is_whole:
                return

    def _fill(
        self, search: FillSearch, depth: StoreDepth, wanted: dict[bytes, tuple[int, int]]
    ) -> bool:
        """Load columns, given by key; return False if another attempt may load more."""
        columns = [*wanted.values()]
        with self._lock:
            epoch = self._epoch
        fill = search.begin_fill(columns)
        if (fill is None or len(fill.keys) < len(columns)) and self._drain():
            del fill  # frees its pages
            fill = search.begin_fill(columns)
        if fill is None:
            return True
        # The fill may have fewer columns: some have arrived meanwhile, or the host tier is full.
        job = _FillJob(fill, [wanted[key][0] for key in fill.keys], depth, self._memory)
        try:
            while job.arrived < job.size and job.read_on(self._batch_bytes):
                pass
        finally:
            late = None if job.handle is None or job.handle.done() else job.handle
            if late is None:
                self._finish(fill, job, epoch)
            else:
                self._finish_later(fill, job, epoch, late)
        is_whole = job.arrived == job.size or not job.has_learned
        return is_whole or late is not None or epoch != self._epoch

    def _finish(self, fill: Fill, job: _FillJob, epoch: int) -> None:
        with self._lock:  # excludes `forget`, which runs before the upper tiers are emptied
            arrived = job.arrived if epoch == self._epoch else 0
            fill.finish(arrived, self._has_upper(job))

    def _has_upper(self, job: _FillJob) -> bool:
        """Return whether pages came from a lower store, so that an upper store lacks them."""
        return any(store is not self._stores[0] for store in job.read_from)

    def _finish_later(self, fill: Fill, job: _FillJob, epoch: int, handle: StoreHandle) -> None:
        def reap() -> None:
            with suppress(Exception):
                handle.wait()
            self._finish(fill, job, epoch)

        try:
            self._reapers.start(reap)
        except BaseException:  # wait here, because the store reads into the pages of the fill
            with suppress(Exception):
                handle.wait()
            raise


class _FillJob:
    """Read the columns of a fill, batch by batch."""

    def __init__(
        self, fill: Fill, columns: list[int], depth: StoreDepth, memory: HostMemory
    ) -> None:
        self._keys, self._columns, self._depth = fill.keys, columns, depth
        self._memory = memory
        self._places = memory.places(fill.replica, fill.parts)
        self.size = len(self._keys)
        self.arrived = 0
        self.has_learned = False
        self.read_from: set[StoreAdapter] = set()
        self.handle: StoreHandle | None = None  # of a batch that reads into the fill's pages
        memory.settle(fill.replica)
        memory.expect(fill.replica, fill.parts)

    def read_on(self, batch_bytes: int) -> bool:
        """Read the next pages from one store; return whether to read on in this fill."""
        first = self.arrived
        store = self._depth.store_of(self._columns[first])
        if store is None:
            return False
        to = self._next(store, batch_bytes)
        masks = store.read(self._keys[first : first + len(to)], to, self._begun)
        for wanted, mask in zip(to.masks(), masks, strict=False):
            if wanted & ~mask:
                self._depth.learn(self._columns[self.arrived], mask)
                self.has_learned = True
                return False
            self.arrived += 1
        if self.arrived > first:
            self.read_from.add(store)
        if len(masks) == len(to):
            return True
        self.has_learned = True
        if self.handle is not None and not self.handle.done():
            return False
        return self._depth.lose(self._columns[self.arrived])

    def _begun(self, handle: StoreHandle) -> None:
        self.handle = handle

    def _next(self, store: StoreAdapter, batch_bytes: int) -> Places:
        """Return the next pages of a store: at most `batch_bytes`, but at least one page."""
        end, left = self.arrived, batch_bytes
        while end < self.size and self._depth.store_of(self._columns[end]) is store:
            left -= sum(self._memory.bytes_of(part) for part, _ in self._places.columns[end])
            if end > self.arrived and left < 0:
                break
            end += 1
        return self._places[self.arrived : end]
