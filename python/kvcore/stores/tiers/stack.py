# SPDX-License-Identifier: Apache-2.0
"""The stores below a manager's host tier, from the first page to ``close``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from kvcore.errors import KVCacheError
from kvcore.metrics import TierMetrics
from kvcore.stores import BlockStore, DiskStore, MooncakeStore, RedisStore
from kvcore.stores.tiers.adapters import COUNTS, DiskAdapter, RecordAdapter, StoreAdapter
from kvcore.stores.tiers.calls import StoreLimits
from kvcore.stores.tiers.memory import HostMemory
from kvcore.stores.tiers.onload import Onload, RequestSearch
from kvcore.stores.tiers.reader import FillSearch, StoreReader
from kvcore.stores.tiers.records import RecordLayout
from kvcore.stores.tiers.writer import StoreWriter, WriteQueue

__all__ = ["TierStack", "adapters_of"]

#: Bytes that are read or written at a time, about.
_BATCH_BYTES = 64 << 20


#: Names of kvcore's own stores; others are called as their class.
_KINDS: dict[type, str] = {
    DiskStore: "disk",
    MooncakeStore: "mooncake",
    RedisStore: "redis",
}


def adapters_of(
    stores: Sequence[tuple[BlockStore, bool]], layout: RecordLayout, limits: StoreLimits
) -> list[StoreAdapter]:
    """Return what uses each store: the manager's own, or somebody's, with names of their own."""
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
    """Have pages written to stores and brought from them; what `_set_below` takes.

    Parameters
    ----------
    stores : sequence of StoreAdapter
    memory : HostMemory
    page_bytes : int
        Of all parts of a page.
    limits : StoreLimits
    max_write_wait : float
        Seconds that a step waits for stores where much of the host tier waits to be written.
    is_async : bool
        `bring` returns at once, and requests wait in `onload`.

    Notes
    -----
    Any number of threads. It knows nothing of its manager, so that it does not keep that alive.
    """

    def __init__(
        self,
        stores: Sequence[StoreAdapter],
        memory: HostMemory,
        *,
        page_bytes: int,
        limits: StoreLimits,
        max_write_wait: float,
        is_async: bool,
    ) -> None:
        self._stores, self._memory = tuple(stores), memory
        self._reader = StoreReader(stores, memory, _BATCH_BYTES, limits.seconds, self._make_room)
        self.onload = Onload(self._reader)
        host_pages = memory.num_bytes // page_bytes
        self._batch = max(1, min(_BATCH_BYTES // page_bytes, host_pages // 4))
        self._most_waiting = max(1, host_pages // 2)
        self._max_write_wait, self._is_async = max_write_wait, is_async
        self._process = os.getpid()
        self._is_off = False
        self._before: dict[str, TierMetrics] = {}  # counters at the last reset
        # Looked up by each call: an attribute of its own is the shortest way.
        self.may_have = self._reader.may_have

    def begin(self, queue: WriteQueue) -> None:
        """Take over what the core has to be written."""
        self._queue = queue
        self._writer = StoreWriter(
            queue,
            self._stores,
            self._memory,
            batch=self._batch,
            most_waiting=self._most_waiting,
            seconds=self._max_write_wait,
        )
        self.arrived = self._writer.arrived
        _ALIVE.add(self)

    def bring(self, search: RequestSearch, context: Any, now: bool) -> None:  # noqa: FBT001 - natively
        """Bring what stores have of a request's prompt, or begin to where it need not run now."""
        if self._is_off:
            return
        if self._is_async and not now:
            self.onload.begin(search, context)
        else:
            self._reader.bring(search)

    def prefetch(self, search: FillSearch) -> int:
        """Begin to bring a prefix; return the columns that are there or on their way."""
        found = self._reader.depth(search)
        if found > search.have or search.legal < search.have:
            self.onload.prefetch(search)
        return found

    def begin_reset(self) -> None:
        """Let nothing come back that is on its way, before the tiers above are emptied."""
        if not self._is_off:
            self._reader.forget()
            self._writer.forget()

    def end_reset(self) -> None:
        """Empty the stores, but for servers, whose pages are others' too."""
        if not self._is_off:
            for store in self._stores:
                if store.is_private:
                    store.clear()
            self._writer.forgotten()

    def flush(self, timeout: float | None) -> bool:
        """Wait until what waits now is written; return whether all of it is."""
        self.require_here()
        return self._writer.flush(timeout)

    def metrics(self, missed: int) -> dict[str, TierMetrics]:
        """Return the counters of the stores since `reset_metrics`.

        Parameters
        ----------
        missed : int
            Pages of prompts that no tier had. A store also lacked what those below it had.
        """
        waiting = 0 if self._is_off else self._queue.waiting
        found: dict[str, TierMetrics] = {}
        for store in reversed(self._stores):
            now, before = store.metrics(waiting), self._before.get(store.name, TierMetrics())
            counts = {name: getattr(now, name) - getattr(before, name) for name in COUNTS}
            found[store.name] = replace(now, **counts, misses=missed)
            missed += counts["hits"]
        return {store.name: found[store.name] for store in self._stores}

    def reset_metrics(self) -> None:
        """Let the counters of the stores begin at 0."""
        self._before = {store.name: store.metrics(0) for store in self._stores}

    def flush_here(self) -> None:
        """Wait without end for what waits now; for nothing where stores are off."""
        if not self._is_off:
            self._writer.flush(None)

    def require_here(self) -> None:
        """Raise KVCacheError in a child of ``os.fork``."""
        if os.getpid() != self._process:
            raise KVCacheError(
                f"the stores of this manager belong to process {self._process}, of which this one "
                f"is a fork; make a manager with stores of its own here"
            )

    def stop(self) -> None:
        """Have the threads end, without waiting: the manager is gone."""
        if not self._is_off:
            self._writer.stop()
            self.onload.close(0)
            for store in self._stores:
                store.close(0)

    def close(self, timeout: float | None) -> None:
        """End the threads and close the stores that are the manager's own."""
        if self._is_off:
            return
        self._switch_off()
        self.onload.close(timeout)
        self._reader.close(timeout)
        self._writer.close(timeout)
        for store in self._stores:
            store.close(timeout)
        self._memory.let_go()

    def _make_room(self) -> bool:
        return self._writer.drain()

    def leave_to_parent(self) -> None:
        """Touch no store any more, in a child of fork."""
        self._switch_off()
        self.onload.give_up()

    def _switch_off(self) -> None:
        self._is_off = True
        self.may_have = _nothing
        self.arrived = _nowhere


def _nothing(key: bytes) -> bool:  # noqa: ARG001
    return False


def _nowhere() -> None:
    pass


_ALIVE: WeakSet[TierStack] = WeakSet()


def _switch_off_in_child() -> None:
    """In a child of fork there are neither the threads nor the owner of the directories."""
    for stack in list(_ALIVE):
        stack.leave_to_parent()


os.register_at_fork(after_in_child=_switch_off_in_child)
