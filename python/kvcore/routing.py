# SPDX-License-Identifier: Apache-2.0
"""Track which worker of a cluster has which pages of a prompt, and choose a worker for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore.native.tree import WorkerPages, hashes_of
from kvcore.support.arguments import integer, number

__all__ = ["POLICIES", "PrefixIndex", "Router"]

#: Page keys of a prompt, in order: uint64 [n] of their low 64 bits, or bytes and ints.
Keys: TypeAlias = NDArray[np.uint64] | Sequence[bytes | int]

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]

#: A change by an event: its kind, the pages, the medium as a bit; None for pages means all pages.
_Change: TypeAlias = tuple[str, NDArray[np.uint64] | None, int]

_MEDIA: Final = {"GPU": 1, "CPU": 2, "STORAGE": 4}
#: The media of events by the names that engines use; the last three names are SGLang's.
_SENT_MEDIA: Final = {**_MEDIA, "CPU_PINNED": 2, "DISK": 4, "EXTERNAL": 4}
_MOST_WORKERS = 4096
_MOST_HELD = 1024


class _Feed:
    """Hold a worker's number, and the event batches that arrived too early."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.next = 0  # sequence number of the next batch
        self.early: dict[int, list[_Change]] = {}


class _Roster(NamedTuple):
    """Hold the workers as a query reads them; a new roster is made when a worker comes or goes."""

    names: tuple[Hashable, ...]
    numbers: NDArray[np.intp] | slice  # the workers' indices in the C++ index


class PrefixIndex:
    """Index how much of a prompt each worker of a cluster has.

    Parameters
    ----------
    workers : iterable of hashable
        Their names: addresses, ranks or any other hashable values.
    max_workers : int, optional
        Maximum, including workers that are added later, up to 4,096; by default the next multiple
        of 64.
    group : int
        For models with groups: the number of the group whose pages count; its layers keep all
        tokens. The index ignores pages of window groups, which a hit needs only at its end. A
        worker may therefore have to compute up to a window of the tokens that the index reports as
        cached.

    Notes
    -----
    `apply` feeds the index with the batches that `kvcore.events.EventSubscriber` receives, from
    kvcore, vLLM or SGLang; `store`, `remove` and `clear` change it directly. The low 64 bits of a
    page's key identify the page, as events send them; keys include salts and adapters. If a worker
    evicted a page from the middle of a prompt, its match ends before this page.

    Any number of threads may use the index. A match of 128 pages takes microseconds, for any number
    of pages in the index. In memory a page takes 16 bytes, in a table that is 3/8 to 3/4 full. If
    several workers have the page, it takes another 24 bytes for each 64 workers, or 64 bytes if at
    most 15 of more than 64 workers have it.

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
        """The workers, in the order of the results of `match`."""
        return self._roster.names

    def add_worker(self, worker: Hashable) -> None:
        """Add a worker, which has no pages yet.

        Raises
        ------
        ValueError
            The worker is already known, or the index has `max_workers`.
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
        """Remove a worker. O(pages of all).

        Raises
        ------
        ValueError
            The worker is unknown.
        """
        with self._lock:
            feed = self._feed(worker)
            del self._feeds[worker]
            self._roster = _roster_of(self._feeds)
            self._pages.clear(feed.number)

    # ---- pages of workers ----------------------------------------
    def store(self, worker: Hashable, keys: Keys, medium: Medium = "GPU") -> None:
        """Record that a worker has pages.

        Parameters
        ----------
        worker : hashable
        keys : uint64 [n], or sequence of bytes and int
            The keys of the pages, or their low 64 bits.
        medium : str
            "GPU", "CPU" or "STORAGE"; a page that is on several media counts once.

        Raises
        ------
        ValueError
            The worker or the medium is unknown, or an item of `keys` is not a key. Nothing has
            changed.
        """
        self._note(self._pages.store, worker, keys, medium)

    def remove(self, worker: Hashable, keys: Keys, medium: Medium = "GPU") -> None:
        """Record that a worker no longer has pages on a medium; arguments as for `store`."""
        self._note(self._pages.remove, worker, keys, medium)

    def clear(self, worker: Hashable) -> None:
        """Record that a worker has no pages, on any medium. O(pages of all)."""
        with self._lock:
            self._pages.clear(self._feed(worker).number)

    def _note(
        self, note: Callable[[int, Keys, int], None], worker: Hashable, keys: Keys, medium: str
    ) -> None:
        hashes, bit = hashes_of(keys), _bit(medium)  # the caller's code may change the workers
        with self._lock:
            note(self._feed(worker).number, hashes, bit)

    # ---- events ----------------------------------------
    def apply(self, worker: Hashable, batch: Any, sequence: int | None = None) -> bool:
        """Apply a batch of events to the index.

        Parameters
        ----------
        worker : hashable
        batch : KVEventBatch
            A batch of `kvcore.events`, or any object with ``events`` that have the fields of
            vLLM's.
        sequence : int, optional
            Number of the batch, starting at 0. With numbers, a batch that was applied before is
            skipped, and a batch that arrives early waits for the batches before it. When 1,024
            batches wait, the worker's pages are removed from the index, and the first waiting batch
            is applied next. Without numbers, each batch must arrive once and in order, as
            `EventSubscriber` delivers them.

        Returns
        -------
        bool
            Whether the batch is in the index now.
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
        """Return the numbers of missing batches, which the worker has to send again."""
        with self._lock:
            feed = self._feed(worker)
            return range(feed.next, min(feed.early, default=feed.next))

    def restart(self, worker: Hashable, sequence: int = 0) -> None:
        """Remove a worker's pages after its publisher restarted; its next batch is `sequence`."""
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
        """Read all events of a batch before the first is applied."""
        found: list[_Change] = []
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                found.append((kind, None, 0))
            elif kind in ("BlockStored", "BlockRemoved"):
                if getattr(event, "group_idx", None) not in (None, self._group):
                    continue
                medium = getattr(event, "medium", None)
                # An unknown medium counts as STORAGE, the slowest medium.
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

    # ---- queries ----------------------------------------
    def lookup(
        self, keys: Keys, media: Sequence[Medium] | None = None
    ) -> tuple[tuple[Hashable, ...], NDArray[np.int32]]:
        """Return the workers, and the number of leading pages of a prompt that each has.

        Parameters
        ----------
        keys : uint64 [n], or sequence of bytes and int
            Keys of all full pages of the prompt, in order.
        media : sequence of str, optional
            Media whose pages count; by default all media.

        Returns
        -------
        workers : tuple of hashable
        pages : ndarray int32 [workers]
        """
        bits = 7 if media is None else sum({_bit(medium) for medium in media})
        hashes = hashes_of(keys)  # the caller's code may change the workers
        names, numbers = self._roster
        return names, self._pages.match(hashes, bits)[numbers]

    def match(self, keys: Keys, media: Sequence[Medium] | None = None) -> NDArray[np.int32]:
        """Return only the page counts of `lookup`, in the order of `workers`."""
        return self.lookup(keys, media)[1]

    def best(self, keys: Keys) -> tuple[Hashable, int]:
        """Return the worker that has most of a prompt, the first of equal workers, and its pages.

        Raises
        ------
        ValueError
            The index has no workers.
        """
        workers, held = self.lookup(keys)
        if not workers:
            raise ValueError("there is no worker; add one")
        at = int(held.argmax())
        return workers[at], int(held[at])

    @property
    def num_pages(self) -> int:
        """Number of pages that at least one worker has."""
        return self._pages.num_pages

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the index takes."""
        return self._pages.num_bytes

    def pages_of(self, worker: Hashable) -> int:
        """Return how many pages a worker has; a page on several media counts once."""
        return self._pages.pages_of(self._feed(worker).number)

    def check_integrity(self) -> None:
        """Raise AssertionError with the broken invariant of the index. O(everything)."""
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


#: Names of policies.
POLICIES: Final = ("prefix", "least-loaded", "round-robin", "prefix+load")

_BY_PREFIX = ("prefix", "prefix+load")


class Router:
    """Choose workers for requests, and record on which worker each request runs.

    Parameters
    ----------
    index : PrefixIndex
        Index with the workers to choose from.
    policy : str
        - ``"prefix+load"``: least ``prefix_weight * n + m``, for n pages of the prompt that the
          worker does not have, and m pages of the prompts that it runs; the cost function of NVIDIA
          Dynamo's router (https://docs.nvidia.com/dynamo/, "KV cache routing").
        - ``"prefix"``: least n; among workers with equal n, least m.
        - ``"least-loaded"``: least m.
        - ``"round-robin"``: each worker in turn.
    prefix_weight : float
        For ``"prefix+load"``: the cost of a page to compute, in pages of load.

    Notes
    -----
    Among equal workers, the router chooses the worker that was chosen longest ago. Any number of
    threads may use it. O(workers), and the cost of `PrefixIndex.match`.

    Examples
    --------
    >>> from kvcore.keys import page_keys
    >>> from kvcore.routing import PrefixIndex, Router
    >>> index = PrefixIndex(["a", "b"])
    >>> router = Router(index)
    >>> keys = page_keys(list(range(64)), 16)
    >>> index.store("b", keys[:3])
    >>> router.choose("request-1", keys), router.choose("request-2", keys)
    ('b', 'a')
    >>> router.finish("request-1")
    """

    def __init__(
        self, index: PrefixIndex, policy: str = "prefix+load", *, prefix_weight: float = 1.0
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}, must be one of {', '.join(POLICIES)}")
        self._index, self._policy = index, policy
        self._weight = number("prefix_weight", prefix_weight)
        if not 0 <= self._weight < float("inf"):
            raise ValueError(f"prefix_weight is {self._weight}, must be 0 or more, and finite")
        self._running: dict[Hashable, tuple[Hashable, int]] = {}
        self._workers: tuple[Hashable, ...] = ()
        self._places: dict[Hashable, int] = {}  # indices of the workers in the arrays
        self._loads = np.zeros(0, np.int64)  # pages of the prompts that each worker runs
        self._chosen_at = np.zeros(0, np.int64)
        self._times = 0  # number of choices so far
        self._lock = Lock()

    def choose(self, request_id: Hashable, keys: Keys) -> Hashable:
        """Return the worker that is to run a request, which counts as its load until `finish`.

        Parameters
        ----------
        request_id : hashable
        keys : uint64 [n], or sequence of bytes and int
            Keys of the prompt's full pages, in order; policies without a prefix only count them.

        Raises
        ------
        ValueError
            The index has no workers, or the request already runs.
        """
        hashes = hashes_of(keys) if self._policy in _BY_PREFIX else None
        pages = len(keys)  # the caller's code may run here, and call this router
        with self._lock:
            if request_id in self._running:
                raise ValueError(f"request {request_id!r} runs already; finish it first")
            if hashes is None:
                workers, held = self._index.workers, None
            else:
                workers, held = self._index.lookup(hashes)
            if not workers:
                raise ValueError("there is no worker; add one to the index")
            self._follow(workers)
            place = _least(self._costs(pages, held))
            self._times += 1
            self._chosen_at[place] = self._times
            self._loads[place] += pages
            self._running[request_id] = workers[place], pages
            return workers[place]

    def finish(self, request_id: Hashable) -> None:
        """Record that a request has ended.

        Raises
        ------
        ValueError
            The request does not run.
        """
        with self._lock:
            try:
                worker, pages = self._running.pop(request_id)
            except KeyError:
                raise ValueError(f"request {request_id!r} does not run") from None
            place = self._places.get(worker)
            if place is not None:
                self._loads[place] -= pages

    def load_of(self, worker: Hashable) -> int:
        """Return the pages of the prompts that a worker runs.

        O(1); O(requests that run) for a worker that was removed, or added after the last choice.
        """
        with self._lock:
            place = self._places.get(worker)
            if place is not None:
                return int(self._loads[place])
            return sum(pages for runs_on, pages in self._running.values() if runs_on == worker)

    def _follow(self, workers: tuple[Hashable, ...]) -> None:
        """Reorder the arrays to the index's workers, of which some may be new or removed."""
        if workers is self._workers:
            return
        chosen_at = dict(zip(self._workers, self._chosen_at.tolist(), strict=True))
        self._workers = workers
        self._places = {worker: place for place, worker in enumerate(workers)}
        self._chosen_at = np.array([chosen_at.get(worker, 0) for worker in workers], np.int64)
        self._loads = np.zeros(len(workers), np.int64)
        for worker, pages in self._running.values():
            if worker in self._places:
                self._loads[self._places[worker]] += pages

    def _costs(self, pages: int, held: NDArray[Any] | None) -> list[NDArray[Any]]:
        """Return costs [workers] to minimise, main cost first; `held` are pages of each."""
        if self._policy == "round-robin":
            return [self._chosen_at]
        if held is None:
            return [self._loads, self._chosen_at]
        new = pages - held.astype(np.int64)
        if self._policy == "prefix":
            return [new, self._loads, self._chosen_at]
        return [self._weight * new + self._loads, self._chosen_at]


def _least(costs: list[NDArray[Any]]) -> int:
    """Return the index of the least cost [workers]; the next cost decides between equal workers."""
    among = np.arange(len(costs[0]))
    for cost in costs:
        of_these = cost[among]
        among = among[of_these == of_these.min()]
    return int(among[0])
