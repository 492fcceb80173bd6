# SPDX-License-Identifier: Apache-2.0
"""Writes to stores: flush, back-pressure, resets, close."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kvcore import KVCacheError, TextGenerationContext
from kvcore.stores import DiskStore, FinishedHandle, MemoryStore
from moved_requests import moving_params, write_chunk
from tiered_requests import (
    LONG,
    DictStore,
    kvcore_threads,
    run,
    served_by,
    store_prompt,
    tiered_manager,
)

ALL = (len(LONG) - 1) // 4 * 4


class Slow(DictStore):
    """A store that writes when the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go = Event(), Event()

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        self.is_asked.set()
        assert self.may_go.wait(60)
        return super().put_from(keys, buffers)


def test_flush_waits_for_all_stores(tmp_path: Path) -> None:
    memory = MemoryStore(1 << 20)
    with tiered_manager(memory, f"disk:{tmp_path}:1MiB") as manager:
        run(manager, LONG)
        assert manager.flush()
        for name in ("memorystore", "disk"):
            assert manager.tier_metrics[name].pages_waiting == 0
            assert manager.tier_metrics[name].bytes_in > 0
            assert manager.tier_metrics[name].write_p99 >= manager.tier_metrics[name].write_p50 > 0


def test_flush_ends_with_its_time() -> None:
    store = Slow()
    with tiered_manager(store, store_timeout=60) as manager:
        run(manager, LONG)
        assert store.is_asked.wait(60)
        assert not manager.flush(timeout=0.01)
        assert manager.tier_metrics["slow"].pages_waiting == 10
        store.may_go.set()
        assert manager.flush(timeout=60)


def test_flush_tells_what_was_not_stored() -> None:
    class Full(DictStore):
        def put_from(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
            return FinishedHandle(super().put_from(keys[:3], buffers[:3]).pages)

    with tiered_manager(Full()) as manager:
        run(manager, LONG)
        assert not manager.flush(timeout=60)
        assert manager.flush(timeout=60)  # no page was lost since the first flush


def test_a_step_waits_a_bounded_time_for_stores() -> None:
    store = Slow()
    params = moving_params()
    tiers = [f"host:{12 * params.bytes_per_page}", store]
    with tiered_manager(*tiers, store_timeout=60, max_write_wait=0.01) as manager:
        for i in range(8):  # more than the host tier holds: pages not taken in time are lost
            run(manager, [i] * 17, i)
        store.may_go.set()
        manager.flush(timeout=60)
        manager.check_integrity()
        assert manager.tier_metrics["slow"].pages_waiting == 0
    assert 0 < len(store.pages) <= 8 * 4


def test_a_reset_empties_the_stores(tmp_path: Path) -> None:
    stores = [DictStore(), MemoryStore(1 << 20), f"disk:{tmp_path}:1MiB"]
    with tiered_manager(*stores) as manager:
        run(manager, LONG)
        assert manager.flush()
        manager.reset_prefix_cache()
        assert run(manager, LONG) == 0
        assert manager.flush()
        manager.reset_prefix_cache()
    assert served_by(stores) == 0


def test_what_is_being_written_does_not_come_back_after_a_reset() -> None:
    store = Slow()
    with tiered_manager(store, store_timeout=60) as manager:
        run(manager, LONG)
        assert store.is_asked.wait(60)
        manager.reset_prefix_cache()
        store.may_go.set()
        assert manager.flush(timeout=60)
        assert store.pages == {}
        assert run(manager, LONG) == 0


def test_what_is_being_read_does_not_come_back_after_a_reset() -> None:
    class SlowReads(DictStore):
        is_asked, may_go = Event(), Event()

        def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
            found = super().get_into(keys, buffers)
            self.is_asked.set()
            assert self.may_go.wait(60)
            return found

    store = SlowReads()
    store_prompt([store])
    with tiered_manager(store, store_timeout=60) as manager:
        found: list[int] = []
        reader = Thread(target=lambda: found.append(run(manager, LONG)))
        reader.start()
        assert store.is_asked.wait(60)
        manager.reset_prefix_cache()
        store.may_go.set()
        reader.join()
        assert found == [0]


def test_close_flushes_and_ends_everything(tmp_path: Path) -> None:
    disk, own = f"disk:{tmp_path}:1MiB", DictStore()
    manager = tiered_manager(disk, own)
    context = TextGenerationContext("r", LONG)
    manager.claim("r")
    write_chunk(manager, context, 9)
    inputs = manager.fetch([context])
    manager.close()
    manager.close()
    assert not [*kvcore_threads()]
    assert not own.is_closed
    assert len(own.pages) == 10
    assert inputs[0].blocks.shape[0] == 32  # a caller that has the pool keeps it
    calls: list[Any] = [
        lambda: manager.maybe_reserve(context),
        lambda: manager.fetch([context]),
        lambda: manager.step([context]),
        lambda: manager.claim("s"),
        lambda: manager.release("r"),
        lambda: manager.flush(),
        lambda: manager.match_prefix(LONG),
        lambda: manager.prefetch(LONG),
        lambda: manager.reset_prefix_cache(),
        lambda: manager.poll(),
        lambda: manager.wait(context),
        lambda: manager.tier_metrics,
        lambda: manager.fetch_collection([context]),
        lambda: manager.export_sequence("r"),
        manager.__enter__,
    ]
    for call in calls:
        with pytest.raises(KVCacheError, match="is closed; make another one"):
            call()
    assert served_by([disk]) == ALL


def test_close_gives_the_pool_back() -> None:
    manager = tiered_manager(MemoryStore(1 << 20))
    pool = weakref.ref(manager._shards[0][0][0])
    manager.close()
    gc.collect()
    assert pool() is None


def test_close_gives_the_memory_of_the_host_tier_back_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        manager = tiered_manager(MemoryStore(1 << 20))
        run(manager, LONG)
        mover = weakref.ref(manager._mover)
        manager.close()
        assert mover() is None
    finally:
        gc.enable()


def test_close_of_a_manager_without_tiers() -> None:
    with tiered_manager() as manager:
        run(manager, LONG)
    with pytest.raises(KVCacheError, match="is closed; make another one"):
        manager.claim("r")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_manager_that_is_dropped_leaves_no_thread(tmp_path: Path, is_async: bool) -> None:
    manager = tiered_manager(f"disk:{tmp_path}:1MiB", DictStore(), async_onload=is_async)
    run(manager, LONG)
    manager.prefetch(LONG)
    stores = [store.store for store in manager._tiers._stores]  # type: ignore[union-attr]
    there = weakref.ref(manager)
    del manager
    gc.collect()
    assert there() is None
    for _ in range(600):
        if not [*kvcore_threads()]:
            break
        Event().wait(0.1)
    assert not [*kvcore_threads()]
    assert isinstance(stores[0], DiskStore)
    with pytest.raises(KVCacheError, match="this disk store is closed; open another"):
        stores[0].contains([bytes(32)])


def test_a_store_of_the_caller_s_outlives_managers_and_may_be_closed_first() -> None:
    store = MemoryStore(1 << 20)
    store_prompt([store])
    with tiered_manager(store) as manager:
        store.close()
        assert run(manager, LONG) == 0
        assert not manager.flush(timeout=60)
        assert manager.tier_metrics["memorystore"].errors > 0


def test_a_disk_store_that_the_caller_closes_is_a_miss(tmp_path: Path) -> None:
    store = DiskStore(f"disk:{tmp_path}:1MiB", page_bytes=4096, fingerprint=bytes(32))
    with tiered_manager(store) as manager:
        run(manager, LONG)
        assert manager.flush()
        store.close()
        run(manager, [3] * 17, "other")
        assert not manager.flush(timeout=60)
        manager.reset_prefix_cache()
        assert run(manager, LONG) == 0
        assert manager.tier_metrics["disk"].errors > 0
