# SPDX-License-Identifier: Apache-2.0
"""Adapters through which a manager uses stores: no method raises, every read page is checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from kvcore._core import DiskLowerStore
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
from kvcore.stores.tiers.memory import HostMemory, Parts, Places, mask_of
from kvcore.stores.tiers.records import Bytes, RecordLayout, RecordMemory

__all__ = ["ALL_PARTS", "COUNTS", "DiskAdapter", "RecordAdapter", "StoreAdapter"]

#: The parts of a page that is stored, if its store cannot list them: all parts, until it is read.
ALL_PARTS = (1 << 64) - 1

#: A function that takes the handle of a read that has begun.
Begun: TypeAlias = Callable[[StoreHandle], None]


def _ignore(handle: StoreHandle) -> None:
    """Do nothing with the handle of a read."""


class StoreAdapter(Protocol):
    """Use a store. No method raises."""

    name: str
    is_private: bool  # False for a server, which other processes may also use

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the parts of each page as bits; `ALL_PARTS` if the store cannot list them."""

    def lower_store(self, memory: HostMemory) -> DiskLowerStore | StoreAdapter:
        """Return the store as a StoreReader uses it: native code, or an adapter."""

    def read(self, keys: Sequence[bytes], to: Places, begun: Begun = ...) -> list[int]:
        """Read parts of pages.

        An adapter that reads directly into `to` calls `begun` with the handle of the read. The read
        may still be in flight after this method returns; until it is done, `to` is in use.

        Returns
        -------
        list of int
            For each page that was read, a prefix of `keys`, its stored parts as bits. If the last
            page lacks requested parts, its memory may hold any bytes.
        """

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        """Begin to write pages; return a function that waits for the number of stored pages.

        Until that function has returned, the pages must not change.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove pages."""

    def clear(self) -> None:
        """Remove all pages."""

    def metrics(self, waiting: int) -> TierMetrics:
        """Return the counters."""

    def close(self, timeout: float | None) -> None:
        """End the threads; close the store if the manager opened it."""


class DiskAdapter:
    """Use a DiskStore. It stores parts, checks pages, and reads and writes memory without a copy.

    Parameters
    ----------
    name : str
    store : DiskStore
    layout : RecordLayout
    limits : StoreLimits
    is_own : bool
        Whether closing the manager closes the store.
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
        self._lower: DiskLowerStore | None = None

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """See StoreAdapter."""
        try:
            return self.store.parts_of(keys)
        except KVCacheError:  # the caller has closed the store
            self._counters.add(errors=1)
            return [0] * len(keys)

    def lower_store(self, memory: HostMemory) -> DiskLowerStore:
        """See StoreAdapter. Native code finds, reads and writes pages, without the GIL."""
        self._lower = memory.lower_store(
            self.store._store,  # noqa: SLF001
            has_parts=self._layout.all_parts != 1,
            seconds=self._limits.seconds,
        )
        return self._lower

    def read(self, keys: Sequence[bytes], to: Places, begun: Begun = _ignore) -> list[int]:
        """See StoreAdapter. The read runs no Python code per page."""
        began = perf_counter()
        try:
            handle = self.store._store.get_placed(keys, to.columns, to.rows, to.slots)  # noqa: SLF001
        except KVCacheError:
            self._counters.add(errors=1)
            return []
        begun(handle)
        if not handle.wait(self._limits.seconds):
            self._counters.add(timeouts=1)
            return []
        served = handle.result()
        self._counters.took("read", perf_counter() - began)
        return to.masks()[:served]

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        """See StoreAdapter. The pages have only part 0."""
        began = perf_counter()
        try:
            handle = self.store.put_from(keys, [parts[0] for parts in pages])
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

    def remove(self, keys: Sequence[bytes]) -> None:
        """See StoreAdapter."""
        with suppress(KVCacheError):
            self.store.remove(keys)

    def clear(self) -> None:
        """See StoreAdapter."""
        with suppress(KVCacheError):
            self.store.clear()

    def metrics(self, waiting: int) -> TierMetrics:
        """See StoreAdapter. After the store is closed, return its last counters."""
        self._take_counters()
        own = self._counters.metrics(self._last.breaker, waiting)
        sums = {name: own[name] + getattr(self._last, name) for name in COUNTS}
        return replace(own, **sums)

    def close(self, timeout: float | None) -> None:  # noqa: ARG002 - the store limits its own time
        """See StoreAdapter."""
        self._take_counters()
        self._lower = None  # refers to the memory of the host tier
        if self.is_own:
            self.store.close()

    def _take_counters(self) -> None:
        with suppress(KVCacheError):
            self._last = self.store.health()
        if self._lower is not None:
            errors, timeouts, reads, writes = self._lower.take_counters()
            self._counters.add(errors=errors, timeouts=timeouts)
            for seconds in reads:
                self._counters.took("read", seconds)
            for seconds in writes:
                self._counters.took("write", seconds)


class RecordAdapter:
    """Use any other store. It keeps records of one size; every record that it returns is checked.

    Parameters
    ----------
    name : str
    store : BlockStore
    layout : RecordLayout
    limits : StoreLimits
    is_own : bool
        Whether closing the manager closes the store.
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
        # MemoryStore does not block, and the server stores limit the time of their own calls.
        in_threads = type(store) not in (MemoryStore, *_SERVERS)
        self._calls = StoreCalls(name, self._counters, limits, in_threads=in_threads)
        self._closing_seconds = limits.seconds
        self._memory = RecordMemory(layout.record_bytes, self._new_buffer)
        self._last = StoreHealth()

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """See StoreAdapter."""
        return self._known_parts(keys) or [0] * len(keys)

    def lower_store(self, memory: HostMemory) -> RecordAdapter:  # noqa: ARG002
        """See StoreAdapter."""
        return self

    def read(
        self,
        keys: Sequence[bytes],
        to: Places,
        begun: Begun = _ignore,  # noqa: ARG002 - the store reads into records of this adapter
    ) -> list[int]:
        """See StoreAdapter."""
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
        """See StoreAdapter. The pages are copied, so they may change after this returns."""
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
        """See StoreAdapter."""
        self._calls.make(lambda: self.store.remove(keys))

    def clear(self) -> None:
        """See StoreAdapter."""
        self._calls.make(self.store.clear)

    def metrics(self, waiting: int) -> TierMetrics:
        """See StoreAdapter."""
        own = self._counters.metrics(self._calls.breaker.state, waiting)
        if not isinstance(self.store, _SERVERS):
            return own
        with suppress(KVCacheError):  # failures that the store counts are not in `own`
            self._last = self.store.health()
        sums = {
            name: own[name] + getattr(self._last, name)
            for name in ("corrupt", "errors", "timeouts")
        }
        return replace(own, breaker=self._last.breaker, **sums)

    def close(self, timeout: float | None) -> None:
        """See StoreAdapter."""
        if self.is_own:
            self._calls.make(self.store.close)
        self._calls.close(self._closing_seconds if timeout is None else timeout)

    def _new_buffer(self, size: int) -> Bytes | None:
        with suppress(KVCacheError):  # the caller has closed the store
            if isinstance(self.store, MooncakeStore):
                return self.store.new_buffer(size)
        return None

    def _known_parts(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return `ALL_PARTS` or 0 for each page; return None if the call of the store fails."""
        found = self._calls.make(lambda: self._checked(self.store.contains(keys), len(keys)))
        return None if found is FAILED else [ALL_PARTS if there else 0 for there in found]

    def _records(self, keys: Sequence[bytes]) -> list[Bytes]:
        """Return the records of a prefix of `keys`, unchecked."""
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
        """Add parts to a stored page; return whether all of them are stored now."""
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
            raise ValueError(f"a store returned {count} as a number of pages, must be 0 .. {most}")
        return count

    @staticmethod
    def _checked(found: Any, n: int) -> list[bool]:
        answers = [bool(each) for each in found]
        if len(answers) != n:
            raise ValueError(f"contains of a store returned {len(answers)} values for {n} keys")
        return answers


_SERVERS = (MooncakeStore, RedisStore)

#: Counters of a store since it was opened; `TierStack` counts misses.
COUNTS = ("hits", "bytes_in", "bytes_out", "corrupt", "timeouts", "errors")
