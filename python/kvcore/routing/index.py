# SPDX-License-Identifier: Apache-2.0
"""What workers hold, as their cache events say."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.prefix_index import WorkerPages, hashes_of
from kvcore.support.arguments import integer

__all__ = ["Keys", "PrefixIndex"]

#: Page keys of a prompt, in order: uint64 [n] of their low 64 bits, or bytes and ints.
Keys: TypeAlias = NDArray[np.uint64] | Sequence[bytes | int]

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]

#: What an event says: its kind, the pages, the medium as a bit; no pages where all are meant.
_Change: TypeAlias = tuple[str, NDArray[np.uint64] | None, int]

_MEDIA: Final = {"GPU": 1, "CPU": 2, "STORAGE": 4}
#: The media of events by the names that engines have for them; SGLang's are the last three.
_SENT_MEDIA: Final = {**_MEDIA, "CPU_PINNED": 2, "DISK": 4, "EXTERNAL": 4}
_MOST_WORKERS = 4096
_MOST_HELD = 1024


class _Feed:
    """The place of a worker: its number, and the events that came too early."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next = 0  # sequence number of the next batch
        self.early: dict[int, list[_Change]] = {}


class _Roster(NamedTuple):
    """The workers as a question reads them: made anew when one comes or goes."""

    names: tuple[Hashable, ...]
    numbers: NDArray[np.intp] | slice  # where each stands in what the C++ index counts


class PrefixIndex:
    """Know how much of a prompt each worker of a cluster has.

    Parameters
    ----------
    workers : iterable of hashable
        Their names: addresses, ranks, what one likes.
    max_workers : int, optional
        With those that are added later, up to 4,096; by default the next multiple of 64.
    group : int
        Of models with groups: the number of the group whose pages count, one that keeps all tokens.
        What windows need beside lies at the end of a hit and is not asked for, so a worker may have
        to compute up to a window of what the index promises.

    Notes
    -----
    It is fed by `apply` with what `kvcore.events.EventSubscriber` receives, from kvcore, vLLM or
    SGLang; or by `store`, `remove` and `clear`. A page is known by the low 64 bits of its key, as
    events send them; salts and adapters are in keys. A page that a worker evicted from the middle
    of a prompt ends what it has.

    Any number of threads. A match of 128 pages takes microseconds, whatever the number of pages. In
    memory a page takes 16 bytes at 3/8 to 3/4 full, and 24 bytes for each 64 workers where several
    have it (64 bytes where these are 15 or less of more than 64).

    Examples
    --------
    >>> from kvcore.keys import page_keys
    >>> from kvcore.routing import PrefixIndex
    >>> index = PrefixIndex(["a", "b"])
    >>> keys = page_keys(list(range(64)), 16)
    >>> index.store("a", keys[:3])
    >>> index.store("b", keys[:1])
    >>> index.match(keys), index.best(keys)
    (array([3, 1], dtype=int32), ('a', 3))
    """

    def __init__(
        self, workers: Iterable[Hashable] = (), *, max_workers: int | None = None, group: int = 0
    ) -> None:
        names = list(workers)
        if max_workers is None:
            max_workers = min(_MOST_WORKERS, max(1, -(-len(names) // 64)) * 64)
        self._most = integer("max_workers", max_workers, 1, _MOST_WORKERS)
        self._group = integer("group", group, 0)
        self._pages = WorkerPages(self._most)
        self._feeds: dict[Hashable, _Feed] = {}
        self._roster = _roster_of(self._feeds)
        self._lock = Lock()
        for name in names:
            self.add_worker(name)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._feeds)} workers, {self._pages.num_pages:,} pages)"

    # ---- workers ----------------------------------------
    @property
    def workers(self) -> tuple[Hashable, ...]:
        """The workers, in the order of what `match` returns."""
        return self._roster.names

    def add_worker(self, worker: Hashable) -> None:
        """Know one more worker, which has nothing yet.

        Raises
        ------
        ValueError
            It is known, or there are `max_workers`.
        """
        with self._lock:
            if worker in self._feeds:
                raise ValueError(f"worker {worker!r} is known already")
            taken = {feed.number for feed in self._feeds.values()}
            if len(taken) == self._most:
                raise ValueError(f"there are {self._most} workers; give more max_workers")
            number = next(i for i in range(self._most) if i not in taken)
            self._feeds[worker] = _Feed(number)
            self._roster = _roster_of(self._feeds)

    def remove_worker(self, worker: Hashable) -> None:
        """Forget a worker. O(pages of all).

        Raises
        ------
        ValueError
            It is unknown.
        """
        with self._lock:
            feed = self._feed(worker)
            del self._feeds[worker]
            self._roster = _roster_of(self._feeds)
            self._pages.clear(feed.number)

    # ---- what they hold ----------------------------------------
    def store(self, worker: Hashable, keys: Keys, medium: Medium = "GPU") -> None:
        """Note that a worker has pages.

        Parameters
        ----------
        worker : hashable
        keys : uint64 [n], or sequence of bytes and int
            Their keys, or the low 64 bits of them.
        medium : str
            "GPU", "CPU" or "STORAGE"; a page that is on several counts once.

        Raises
        ------
        ValueError
            The worker or the medium is unknown, or a key is none. Nothing has changed.
        """
        self._note(self._pages.store, worker, keys, medium)

    def remove(self, worker: Hashable, keys: Keys, medium: Medium = "GPU") -> None:
        """Note that a worker has pages no more on a medium; as `store`."""
        self._note(self._pages.remove, worker, keys, medium)

    def clear(self, worker: Hashable) -> None:
        """Note that a worker has nothing, on any medium. O(pages of all)."""
        with self._lock:
            self._pages.clear(self._feed(worker).number)

    def _note(
        self, note: Callable[[int, Keys, int], None], worker: Hashable, keys: Keys, medium: str
    ) -> None:
        hashes, bit = hashes_of(keys), _bit(medium)  # whose code may run, and change the workers
        with self._lock:
            note(self._feed(worker).number, hashes, bit)

    # ---- events ----------------------------------------
    def apply(self, worker: Hashable, batch: Any, sequence: int | None = None) -> bool:
        """Take in a batch of events.

        Parameters
        ----------
        worker : hashable
        batch : KVEventBatch
            Of `kvcore.events`, or any object with ``events`` that have the fields of vLLM's.
        sequence : int, optional
            Its number, from 0 on: then a batch that came before is left out, and one that comes too
            early waits for those in front of it. When 1,024 wait, the worker is taken to have
            nothing, and the first of them is the next. Without numbers batches have to come once
            and in order, which `EventSubscriber` sees to.

        Returns
        -------
        bool
            Whether it is in the index now.
        """
        number = None if sequence is None else integer("sequence", sequence, 0)
        changes = self._changes(batch)
        with self._lock:
            feed = self._feed(worker)
            if number is None:
                self._take_in(feed, changes)
                return True
            if number < feed.next or number in feed.early:
                return False
            feed.early[number] = changes
            if len(feed.early) > _MOST_HELD:
                self._pages.clear(feed.number)
                feed.next = min(feed.early)
            while feed.next in feed.early:
                self._take_in(feed, feed.early.pop(feed.next))
                feed.next += 1
            return number < feed.next

    def missing(self, worker: Hashable) -> range:
        """Return the numbers of the batches that others wait for: what to have sent again."""
        with self._lock:
            feed = self._feed(worker)
            return range(feed.next, min(feed.early, default=feed.next))

    def restart(self, worker: Hashable, sequence: int = 0) -> None:
        """Forget what a worker has, whose next batch is this one: its publisher began anew."""
        number = integer("sequence", sequence, 0)
        with self._lock:
            feed = self._feed(worker)
            self._pages.clear(feed.number)
            feed.next = number
            feed.early = {i: batch for i, batch in feed.early.items() if i >= number}
            while feed.next in feed.early:
                self._take_in(feed, feed.early.pop(feed.next))
                feed.next += 1

    def _changes(self, batch: Any) -> list[_Change]:
        """Read the events of a batch, all before the first is taken in."""
        found: list[_Change] = []
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                found.append((kind, None, 0))
            elif kind in ("BlockStored", "BlockRemoved"):
                if getattr(event, "group_idx", None) not in (None, self._group):
                    continue
                medium = getattr(event, "medium", None)
                # One that is none of them is further away than all.
                bit = _SENT_MEDIA.get("GPU" if medium is None else medium, _MEDIA["STORAGE"])
                found.append((kind, hashes_of(event.block_hashes), bit))
        return found

    def _take_in(self, feed: _Feed, changes: list[_Change]) -> None:
        for kind, hashes, medium in changes:
            if hashes is None:
                self._pages.clear(feed.number)
            elif kind == "BlockStored":
                self._pages.store(feed.number, hashes, medium)
            else:
                self._pages.remove(feed.number, hashes, medium)

    # ---- questions ----------------------------------------
    def lookup(
        self, keys: Keys, media: Sequence[Medium] | None = None
    ) -> tuple[tuple[Hashable, ...], NDArray[np.int32]]:
        """Return the workers, and how many leading pages of a prompt each has.

        Parameters
        ----------
        keys : uint64 [n], or sequence of bytes and int
            Of all its full pages, in order.
        media : sequence of str, optional
            On which they count; by default on all.

        Returns
        -------
        workers : tuple of hashable
        pages : ndarray int32 [workers]
        """
        bits = 7 if media is None else sum({_bit(medium) for medium in media})
        hashes = hashes_of(keys)  # whose code may run, and change the workers
        names, numbers = self._roster
        return names, self._pages.match(hashes, bits)[numbers]

    def match(self, keys: Keys, media: Sequence[Medium] | None = None) -> NDArray[np.int32]:
        """Return the pages of `lookup` alone, in the order of `workers`."""
        return self.lookup(keys, media)[1]

    def best(self, keys: Keys) -> tuple[Hashable, int]:
        """Return the worker that has most of a prompt, the first of several, and its pages.

        Raises
        ------
        ValueError
            There is no worker.
        """
        workers, held = self.lookup(keys)
        if not workers:
            raise ValueError("there is no worker; add one")
        at = int(held.argmax())
        return workers[at], int(held[at])

    @property
    def num_pages(self) -> int:
        """Pages that some worker has."""
        return self._pages.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes that the index takes."""
        return self._pages.num_bytes

    def pages_of(self, worker: Hashable) -> int:
        """Return how many pages a worker has, each once."""
        return self._pages.pages_of(self._feed(worker).number)

    def check_integrity(self) -> None:
        """Raise AssertionError with the law that the index breaks. O(everything)."""
        self._pages.check_integrity()

    def _feed(self, worker: Hashable) -> _Feed:
        try:
            return self._feeds[worker]
        except KeyError:
            raise ValueError(f"worker {worker!r} is unknown; add it first") from None


def _roster_of(feeds: dict[Hashable, _Feed]) -> _Roster:
    numbers = [feed.number for feed in feeds.values()]
    if numbers == list(range(len(numbers))):
        return _Roster(tuple(feeds), slice(len(numbers)))
    return _Roster(tuple(feeds), np.array(numbers, np.intp))


def _bit(medium: str) -> int:
    try:
        return _MEDIA[medium]
    except KeyError:
        raise ValueError(f"medium is {medium!r}, must be one of {', '.join(_MEDIA)}") from None
