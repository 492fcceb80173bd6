# SPDX-License-Identifier: Apache-2.0
"""Stores as a manager uses them: nothing raises, and every page that arrives was checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvcore.errors import KVCacheError
from kvcore.metrics import TierMetrics
from kvcore.stores import (
    BlockStore,
    DiskStore,
    MemoryStore,
    MooncakeStore,
    RedisStore,
    StoreHandle,
    StoreHealth,
)
from kvcore.stores.tiers.calls import FAILED, StoreCalls, StoreCounters, StoreLimits
from kvcore.stores.tiers.memory import Parts, Places, mask_of
from kvcore.stores.tiers.records import Bytes, RecordLayout, RecordMemory

__all__ = ["ALL_PARTS", "COUNTS", "DiskAdapter", "RecordAdapter", "StoreAdapter"]

#: What a store says that knows of a page, but not of its parts, before it was read.
ALL_PARTS = (1 << 64) - 1

#: Takes the handle of what was begun.
Begun: TypeAlias = Callable[[StoreHandle], None]


class StoreAdapter(Protocol):
    """Use a store. Nothing raises."""

    name: str
    is_private: bool  # it is in no server that others use too

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the parts of each page as bits; `ALL_PARTS` where they are not known."""

    def read(self, keys: Sequence[bytes], to: Places, begun: Begun) -> list[int]:
        """Read parts of pages.

        A store that reads in place tells `begun` its handle: the memory is free once it is done,
        which may be later than this returns.

        Returns
        -------
        list of int
            For each page that was served, a prefix, the bits of its parts. A last one may be less
            than was wanted of it: what the page has. Its memory may hold anything.
        """

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        """Begin to write pages; what is returned waits, and returns how many are stored now.

        Until then the pages must not change.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget pages."""

    def clear(self) -> None:
        """Forget all pages."""

    def metrics(self, waiting: int) -> TierMetrics:
        """Return the counters."""

    def close(self, timeout: float | None) -> None:
        """End threads, and the store where it is the manager's own."""


class DiskAdapter:
    """Use a DiskStore: it knows of parts, checks by itself, and reads and writes in place.

    Parameters
    ----------
    name : str
    store : DiskStore
    layout : RecordLayout
    limits : StoreLimits
    is_own : bool
        Whether it is closed with its manager.
    """

    def __init__(
        self,
        name: str,
        store: DiskStore,
        layout: RecordLayout,
        limits: StoreLimits,
        *,
        is_own: bool,
    ) -> None:
        self.name, self.store, self.is_own = name, store, is_own
        self.is_private = True
        self._layout, self._limits = layout, limits
        self._counters = StoreCounters()
        self._last = store.health()

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """As of StoreAdapter."""
        try:
            return self.store.parts_of(keys)
        except KVCacheError:  # the caller has closed it
            self._counters.add(errors=1)
            return [0] * len(keys)

    def read(self, keys: Sequence[bytes], to: Places, begun: Begun) -> list[int]:
        """As of StoreAdapter; nothing is done per page in Python."""
        return to.masks()[: self._read(lambda: self._get_placed(keys, to), begun)]

    def _get_placed(self, keys: Sequence[bytes], to: Places) -> StoreHandle:
        return self.store._store.get_placed(keys, to.columns, to.rows, to.slots)  # noqa: SLF001

    def _read(self, begin: Callable[[], StoreHandle], begun: Begun) -> int:
        """Return how many pages were served."""
        began = perf_counter()
        try:
            handle = begin()
        except KVCacheError:
            self._counters.add(errors=1)
            return 0
        begun(handle)
        if not handle.wait(self._limits.seconds):
            self._counters.add(timeouts=1)
            return 0
        served = handle.result()
        self._counters.took("read", perf_counter() - began)
        return served

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        """As of StoreAdapter."""
        if self._layout.all_parts != 1:
            pages = [*map(self._completed, keys, self.parts_of(keys), pages)]
        began = perf_counter()
        try:
            handle = self.store.put_from(keys, [_listed(parts) for parts in pages])
        except KVCacheError:
            self._counters.add(errors=1)
            return lambda: 0

        def wait() -> int:
            stored = 0
            with suppress(KVCacheError):
                stored = handle.result()
            self._counters.took("write", perf_counter() - began)
            return stored

        return wait

    def _completed(self, key: bytes, there: int, parts: Parts) -> Parts:
        """Return parts with those that the store has beside them: a put replaces a page."""
        new = mask_of(parts)
        if not there & ~new or not new & ~there:
            return parts
        memory = np.empty(self._layout.record_bytes, np.uint8)
        others = self._layout.parts(memory, there & ~new)
        served = self._read(lambda: self.store.get_into([key], [_listed(others)]), lambda _: None)
        return {**others, **parts} if served else parts

    def remove(self, keys: Sequence[bytes]) -> None:
        """As of StoreAdapter."""
        with suppress(KVCacheError):
            self.store.remove(keys)

    def clear(self) -> None:
        """As of StoreAdapter."""
        with suppress(KVCacheError):
            self.store.clear()

    def metrics(self, waiting: int) -> TierMetrics:
        """As of StoreAdapter; the last ones once the store is closed."""
        with suppress(KVCacheError):
            self._last = self.store.health()
        own = self._counters.metrics(self._last.breaker, waiting)
        sums = {name: own[name] + getattr(self._last, name) for name in COUNTS}
        return replace(own, **sums)

    def close(self, timeout: float | None) -> None:  # noqa: ARG002 - it bounds itself
        """As of StoreAdapter."""
        with suppress(KVCacheError):
            self._last = self.store.health()
        if self.is_own:
            self.store.close()


class RecordAdapter:
    """Use any other store, which keeps records of one size and may do with them what it likes.

    Parameters
    ----------
    name : str
    store : BlockStore
    layout : RecordLayout
    limits : StoreLimits
    is_own : bool
        Whether it is closed with its manager.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        layout: RecordLayout,
        limits: StoreLimits,
        *,
        is_own: bool,
    ) -> None:
        self.name, self.store, self.is_own = name, store, is_own
        self.is_private = not isinstance(store, _SERVERS)
        self._layout = layout
        self._counters = StoreCounters()
        # One of kvcore's own answers from memory, the others bound their calls themselves.
        in_threads = type(store) not in (MemoryStore, *_SERVERS)
        self._calls = StoreCalls(name, self._counters, limits, in_threads=in_threads)
        self._closing_seconds = limits.seconds
        self._memory = RecordMemory(layout.record_bytes, self._new_buffer)
        self._last = StoreHealth()

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """As of StoreAdapter."""
        return self._known_parts(keys) or [0] * len(keys)

    def read(
        self,
        keys: Sequence[bytes],
        to: Places,
        begun: Begun,  # noqa: ARG002 - what it reads into is nobody else's
    ) -> list[int]:
        """As of StoreAdapter."""
        masks: list[int] = []
        records = self._records(keys)
        for key, parts, record in zip(keys, to, records, strict=False):
            mask = self._checked_mask(key, record)
            if not mask:
                break
            masks.append(mask)
            if mask_of(parts) & ~mask:
                break
            for part, data in self._layout.parts(record, mask_of(parts)).items():
                parts[part][:] = data
        self._memory.give_back(records)
        self._counters.add(hits=len(masks))
        return masks

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        """As of StoreAdapter; the pages are copied, so that they may change soon."""
        there = self._known_parts(keys)
        if there is None:
            return lambda: 0
        new = [i for i, mask in enumerate(there) if not mask]
        known = len(keys) - len(new)
        if self._layout.all_parts != 1:
            known = sum(
                self._complete(key, parts)
                for key, parts, mask in zip(keys, pages, there, strict=True)
                if mask
            )
        stored = self._put([keys[i] for i in new], [self._sealed(keys[i], pages[i]) for i in new])
        return lambda: known + stored

    def remove(self, keys: Sequence[bytes]) -> None:
        """As of StoreAdapter."""
        self._calls.make(lambda: self.store.remove(keys))

    def clear(self) -> None:
        """As of StoreAdapter."""
        self._calls.make(self.store.clear)

    def metrics(self, waiting: int) -> TierMetrics:
        """As of StoreAdapter."""
        own = self._counters.metrics(self._calls.breaker.state, waiting)
        if not isinstance(self.store, _SERVERS):
            return own
        with suppress(KVCacheError):  # what failed there was no error here
            self._last = self.store.health()
        sums = {
            name: own[name] + getattr(self._last, name)
            for name in ("corrupt", "errors", "timeouts")
        }
        return replace(own, breaker=self._last.breaker, **sums)

    def close(self, timeout: float | None) -> None:
        """As of StoreAdapter."""
        if self.is_own:
            self._calls.make(self.store.close)
        self._calls.close(self._closing_seconds if timeout is None else timeout)

    def _new_buffer(self, size: int) -> Bytes | None:
        with suppress(KVCacheError):  # the caller has closed it
            if isinstance(self.store, MooncakeStore):
                return self.store.new_buffer(size)
        return None

    def _known_parts(self, keys: Sequence[bytes]) -> list[int] | None:
        """Ask which pages are there; None where the store does not say."""
        found = self._calls.make(lambda: self._checked(self.store.contains(keys), len(keys)))
        return None if found is FAILED else [ALL_PARTS if there else 0 for there in found]

    def _records(self, keys: Sequence[bytes]) -> list[Bytes]:
        """Read records that were not checked: those of a prefix."""
        records = [self._memory.new() for _ in keys]

        def work() -> int:
            return self._counted(self.store.get_into(keys, records).result(), len(keys))

        served = self._calls.make(work, "read")
        if served is FAILED:
            return []
        self._memory.give_back(records[served:])
        self._counters.add(bytes_out=served * self._layout.record_bytes)
        return records[:served]

    def _put(self, keys: Sequence[bytes], records: list[Bytes]) -> int:
        if not keys:
            return 0

        def work() -> int:
            return self._counted(self.store.put_from(keys, records).result(), len(keys))

        stored = self._calls.make(work, "write")
        if stored is FAILED:
            return 0
        self._memory.give_back(records)
        self._counters.add(bytes_in=stored * self._layout.record_bytes)
        return int(stored)

    def _sealed(self, key: bytes, parts: Parts) -> Bytes:
        record = self._memory.new()
        self._layout.seal(record, key, parts)
        return record

    def _complete(self, key: bytes, parts: Parts) -> bool:
        """Add parts to a page that is stored; return whether it has them all."""
        found = self._records([key])
        mask = self._checked_mask(key, found[0]) if found else 0
        if mask and not mask_of(parts) & ~mask:
            return True
        record = self._memory.new()
        if mask:
            record[:] = found[0]
            self._layout.merge(record, key, parts)
        else:
            self._layout.seal(record, key, parts)
        self.remove([key])
        return self._put([key], [record]) == 1

    def _checked_mask(self, key: bytes, record: Bytes) -> int:
        mask = self._layout.check(record, key)
        if not mask:
            self._counters.add(corrupt=1)
            self.remove([key])
        return mask

    @staticmethod
    def _counted(served: Any, most: int) -> int:
        count = operator.index(served)
        if not 0 <= count <= most:
            raise ValueError(f"a store answered {count} pages of {most}")
        return count

    @staticmethod
    def _checked(found: Any, n: int) -> list[bool]:
        answers = [bool(each) for each in found]
        if len(answers) != n:
            raise ValueError(f"a store answered {len(answers)} times for {n} keys")
        return answers


_SERVERS = (MooncakeStore, RedisStore)

#: What is counted of a store since it was opened; `TierStack` counts misses.
COUNTS = ("hits", "bytes_in", "bytes_out", "corrupt", "timeouts", "errors")


def _listed(parts: Parts) -> Any:
    """Return the parts of a page as stores take them: by number, None for those not there."""
    if parts.keys() == {0}:
        return parts[0]
    listed: list[Bytes | None] = [None] * (max(parts) + 1)
    for part, data in parts.items():
        listed[part] = data
    return listed
