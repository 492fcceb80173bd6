# SPDX-License-Identifier: Apache-2.0
"""The lower stores of vLLM's offloading: lookups, reads and writes in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from time import monotonic
from typing import Any, NamedTuple

from kvcore.integrations.vllm.offload_threads import ordered_calls
from kvcore.stores import StoreHandle
from kvcore.stores.tiers.adapters import DiskAdapter, StoreAdapter
from kvcore.stores.tiers.memory import Places

__all__ = ["Below", "Done"]

#: Seconds for which a store's answer is valid, and for which a failed page is a miss.
_FRESH = 5.0

#: The store index of a chunk that no store has.
NOWHERE = -1


class Done(NamedTuple):
    """A finished batch.

    Parameters
    ----------
    is_read : bool
        True for a read, false for a write.
    generation : int
        The number of `Below.forget` calls before the batch began.
    keys, slots : list
        The chunks of the batch; ``slots[i]`` is the slot of ``keys[i]``.
    served : int
        The number of pages that were read and checked: a prefix of the batch.
    handle : StoreHandle, optional
        For a read that took too long: its slots stay reserved until the handle is done.
    """

    is_read: bool
    generation: int
    keys: list[bytes]
    slots: list[int]
    served: int = 0
    handle: StoreHandle | None = None


class Below:
    """Look up, read and write chunks in stores, in two threads of its own.

    Parameters
    ----------
    stores : list of StoreAdapter
        The stores in lookup order.
    region : SharedOffloadRegion
        Its rows are the slots.
    fingerprint : bytes [32]

    Notes
    -----
    For one thread, the scheduler's. No call waits for a store or raises because a store fails.
    """

    def __init__(self, stores: Sequence[StoreAdapter], region: Any, fingerprint: bytes) -> None:
        self._stores, self._fingerprint = stores, fingerprint
        self._rows = region.base_tensor.numpy().view("uint8").reshape(region.num_chunks, -1)
        self._is_local = all(isinstance(store, DiskAdapter) for store in stores)
        self._reader = ordered_calls("kvcore tier reader")
        self._writer = ordered_calls("kvcore tier writer")
        self._cleared: Future[None] = Future()
        self._cleared.set_result(None)
        self._generation = 0
        self._answers: deque[tuple[int, dict[bytes, int]]] = deque()
        self._done: deque[Done] = deque()
        self._known: dict[bytes, tuple[float, int]] = {}
        self._asked: dict[bytes, bool] = {}  # true while the lookup is in flight
        self._writing = 0

    @property
    def generation(self) -> int:
        """The number of `forget` calls."""
        return self._generation

    def find(self, key: bytes) -> bool | None:
        """Return true if a store has a chunk; None while the answer is unknown."""
        until, where = self._known.get(key, (0.0, NOWHERE))
        if until > monotonic():
            return where != NOWHERE
        if not self._cleared.done():
            return False
        if self._is_local:
            where = self._ask([key])[key]
            if where != NOWHERE:
                self._know(key, where)
            return where != NOWHERE
        self._asked.setdefault(key, False)
        return None

    def ask(self) -> None:
        """Start the lookups for which `find` returned None."""
        keys = [key for key, is_under_way in self._asked.items() if not is_under_way]
        if keys:
            self._asked |= dict.fromkeys(keys, True)
            self._reader.submit(self._answer, self._generation, keys, self._cleared)
        now = monotonic()
        while self._known and next(iter(self._known.values()))[0] < now:
            del self._known[next(iter(self._known))]

    def read(self, keys: list[bytes], slots: list[int]) -> None:
        """Start to read chunks that `find` found."""
        by_store: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            _, where = self._known.get(key, (0.0, 0))  # the answer may have expired
            by_store.setdefault(max(where, 0), []).append(i)
        for store, at in by_store.items():
            batch = [keys[i] for i in at], [slots[i] for i in at]
            self._reader.submit(self._read, self._generation, store, *batch, self._cleared)

    def write(self, keys: list[bytes], slots: list[int]) -> int:
        """Start to write the first of these chunks; return how many.

        At most half of the slots wait for writes, so a slow store does not block the tier.
        """
        n = max(0, min(len(keys), len(self._rows) // 2 - self._writing))
        if n:
            for key in keys[:n]:
                self._known.pop(key, None)
            self._writing += n
            self._writer.submit(self._write, self._generation, keys[:n], slots[:n])
        return n

    def miss(self, key: bytes) -> None:
        """Count a chunk as a miss for `_FRESH` seconds."""
        self._know(key, NOWHERE)

    def settled(self) -> list[Done]:
        """Return the batches that finished since the last call."""
        while self._answers:
            generation, found = self._answers.popleft()
            for key, where in found.items() if generation == self._generation else ():
                self._asked.pop(key, None)
                self._know(key, where)
        over = [self._done.popleft() for _ in range(len(self._done))]
        self._writing -= sum(len(done.keys) for done in over if not done.is_read)
        return over

    def forget(self) -> None:
        """Start to empty the stores; `find` no longer finds chunks stored or in flight before."""
        self._generation += 1
        self._known.clear()
        self._asked.clear()
        self._cleared = self._writer.submit(self._clear)

    def close(self) -> None:
        """Finish all reads and writes in flight, and close the stores."""
        for thread in (self._reader, self._writer):
            thread.shutdown()
        for store in self._stores:
            store.close(None)

    def _know(self, key: bytes, where: int) -> None:
        self._known.pop(key, None)  # keeps the oldest answer first
        self._known[key] = monotonic() + _FRESH, where

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [sha256(self._fingerprint + key).digest() for key in keys]

    def _ask(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the first store that has each chunk; a store that raises counts as empty."""
        names, found = self._names(keys), dict.fromkeys(keys, NOWHERE)
        for where in reversed(range(len(self._stores))):
            with suppress(Exception):
                for key, parts in zip(keys, self._stores[where].parts_of(names), strict=True):
                    found[key] = where if parts else found[key]
        return found

    def _answer(self, generation: int, keys: list[bytes], cleared: Future[None]) -> None:
        cleared.result()
        self._answers.append((generation, self._ask(keys)))

    def _read(
        self,
        generation: int,
        store: int,
        keys: list[bytes],
        slots: list[int],
        cleared: Future[None],
    ) -> None:
        cleared.result()
        begun: list[StoreHandle] = []
        to, served = Places(self._rows, None, [[(0, slot)] for slot in slots]), 0
        with suppress(Exception):  # a miss
            served = self._stores[store].read(self._names(keys), to, begun.append).count(1)
        late = next((handle for handle in begun if not handle.done()), None)
        self._done.append(Done(True, generation, keys, slots, served, late))

    def _write(self, generation: int, keys: list[bytes], slots: list[int]) -> None:
        if generation == self._generation:
            names, pages = self._names(keys), [{0: self._rows[slot]} for slot in slots]
            waits: list[Callable[[], int]] = []
            with suppress(Exception):  # not stored
                for store in self._stores:
                    waits.append(store.write(names, pages))
            for wait in waits:
                with suppress(Exception):
                    wait()
        self._done.append(Done(False, generation, keys, slots))

    def _clear(self) -> None:
        for store in self._stores:
            with suppress(Exception):
                store.clear()
