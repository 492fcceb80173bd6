# SPDX-License-Identifier: Apache-2.0
"""Combine the lower stores of a manager's host tier: loads, writes, resets and counters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet

from kvcore.errors import KVCacheError
from kvcore.metrics import TierMetrics
from kvcore.native.engine import (
    LowerSearch,
    LowerStores,
    StoreReader,
    StoreSide,
    StoreWriter,
)
from kvcore.stores import BlockStore, DiskStore, MooncakeStore, RedisStore
from kvcore.stores.tiers.adapters import COUNTS, DiskAdapter, RecordAdapter, StoreAdapter
from kvcore.stores.tiers.calls import StoreLimits
from kvcore.stores.tiers.memory import HostMemory
from kvcore.stores.tiers.onload import Onload
from kvcore.stores.tiers.records import RecordLayout
from kvcore.stores.tiers.writer import WriterThread

__all__ = ["TierStack", "adapters_of"]

#: Approximate number of bytes of one read or write.
_BATCH_BYTES = 64 << 20


#: Names of kvcore's own stores; every other store has the name of its class.
_KINDS: dict[type, str] = {
    DiskStore: "disk",
    MooncakeStore: "mooncake",
    RedisStore: "redis",
}


def adapters_of(
    stores: Sequence[tuple[BlockStore, bool]], layout: RecordLayout, limits: StoreLimits
) -> list[StoreAdapter]:
    """Return an adapter with a unique name for each store, given with its `is_own`."""
    kinds = [_KINDS.get(type(store), type(store).__name__.lower()) for store, _ in stores]
    found: list[StoreAdapter] = []
    for i, (store, is_own) in enumerate(stores):
        name = kinds[i]
        if kinds.count(name) > 1 and isinstance(store, DiskStore):
            name = f"disk:{store.paths[0]}"
        elif kinds.count(name) > 1 or name == "host":
            name = f"{name}-{kinds[: i + 1].count(name)}"
        if isinstance(store, DiskStore):
            found.append(DiskAdapter(name, store, layout, limits, is_own=is_own))
        else:
            found.append(RecordAdapter(name, store, layout, limits, is_own=is_own))
    return found


class TierStack:
    """Write pages to stores, and load pages from stores; the argument of `_set_below`.

    Parameters
    ----------
    stores : sequence of StoreAdapter
    memory : HostMemory
    page_bytes : int
        Bytes of all parts of a page.
    limits : StoreLimits
    max_write_wait : float
        The most seconds that a step waits for stores if half of the host tier waits to be written.

    Notes
    -----
    Any number of threads may use it. It has no reference to its manager, so it does not keep the
    manager alive.
    """

    def __init__(
        self,
        stores: Sequence[StoreAdapter],
        memory: HostMemory,
        *,
        page_bytes: int,
        limits: StoreLimits,
        max_write_wait: float,
    ) -> None:
        self._stores, self._memory, self._limits = tuple(stores), memory, limits
        host_pages = memory.num_bytes // page_bytes
        self._batch = max(1, min(_BATCH_BYTES // page_bytes, host_pages // 4))
        self._most_waiting = max(1, host_pages // 2)
        self._max_write_wait = max_write_wait
        self._process = os.getpid()
        self._is_off = False
        self._before: dict[str, TierMetrics] = {}  # counters at the last reset

    def begin(self, queue: StoreSide) -> Onload:
        """Start to write the pages of a queue, and to read pages; return the threads that load."""
        self.queue = queue
        stores = LowerStores(
            [store.lower_store(self._memory) for store in self._stores], self._memory
        )
        self._writes = StoreWriter(queue, stores)
        self._writer = WriterThread(
            queue,
            self._writes,
            self._memory,
            batch=self._batch,
            most_waiting=self._most_waiting,
            seconds=self._max_write_wait,
        )
        self.reader = StoreReader(
            queue,
            stores,
            self._writer.drain,
            batch_bytes=_BATCH_BYTES,
            seconds=self._limits.seconds,
        )
        self._onload = Onload(self.reader)
        # An attribute of this object, because every call looks it up.
        self.arrived = self._writer.arrived
        _ALIVE.add(self)
        return self._onload

    def prefetch(self, search: LowerSearch) -> int:
        """Begin to load a prefix; return the number of columns that are cached or in stores."""
        found = self.reader.reach(search)
        if found > search.have or search.legal < search.have:
            self._onload.prefetch(search)
        return found

    def begin_reset(self) -> None:
        """Discard pages in flight; called before the upper tiers are emptied."""
        if not self._is_off:
            self.reader.forget()
            self._writes.forget()

    def end_reset(self) -> None:
        """Empty the stores, except servers, which other processes may also use."""
        if not self._is_off:
            for store in self._stores:
                if store.is_private:
                    store.clear()
            self._writer.forgotten()

    def flush(self, timeout: float | None) -> bool:
        """Wait until all queued pages are written; return whether all of them are stored."""
        self.require_here()
        return self._writer.flush(timeout)

    def metrics(self, missed: int) -> dict[str, TierMetrics]:
        """Return the counters of the stores since `reset_metrics`.

        Parameters
        ----------
        missed : int
            Pages of prompts that no tier had. A hit of a store is a miss of the stores above it.
        """
        waiting = 0 if self._is_off else self.queue.waiting
        found: dict[str, TierMetrics] = {}
        for store in reversed(self._stores):
            now, before = store.metrics(waiting), self._before.get(store.name, TierMetrics())
            counts = {name: getattr(now, name) - getattr(before, name) for name in COUNTS}
            found[store.name] = replace(now, **counts, misses=missed)
            missed += counts["hits"]
        return {store.name: found[store.name] for store in self._stores}

    def reset_metrics(self) -> None:
        """Set the counters of the stores to 0."""
        self._before = {store.name: store.metrics(0) for store in self._stores}

    def flush_here(self) -> None:
        """Wait without limit until all queued pages are written, unless the stores are off."""
        if not self._is_off:
            self._writer.flush(None)

    def require_here(self) -> None:
        """Raise KVCacheError in a child of ``os.fork``."""
        if os.getpid() != self._process:
            raise KVCacheError(
                f"the stores of this manager belong to process {self._process}, of which this one "
                f"is a fork; create another manager with its own stores here"
            )

    def stop(self) -> None:
        """End the threads of a destroyed manager, without waiting for them."""
        if not self._is_off:
            self._writer.stop()
            self._onload.close(0)
            for store in self._stores:
                store.close(0)

    def close(self, timeout: float | None) -> None:
        """End the threads, and close the stores that the manager opened."""
        if self._is_off:
            return
        self._switch_off()
        self._onload.close(timeout)
        self.reader.close(timeout)
        self._writer.close(timeout)
        for store in self._stores:
            store.close(timeout)
        self._memory.let_go()

    def leave_to_parent(self) -> None:
        """Stop using the stores, in a child of fork."""
        self._switch_off()
        self.reader.leave_to_parent()
        self._onload.give_up()

    def _switch_off(self) -> None:
        self._is_off = True
        self.reader.switch_off()
        self.arrived = _nowhere


def _nowhere() -> None:
    pass


_ALIVE: WeakSet[TierStack] = WeakSet()


def _switch_off_in_child() -> None:
    """Switch off the stores: a child of fork has no threads, and does not own the directories."""
    for stack in list(_ALIVE):
        stack.leave_to_parent()


os.register_at_fork(after_in_child=_switch_off_in_child)
