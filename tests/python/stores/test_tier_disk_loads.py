# SPDX-License-Identifier: Apache-2.0
"""A batch that a disk reads into the host tier, and other calls during the read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kvcore import KVCacheError, PagedKVCacheManager, TextGenerationContext
from kvcore.stores import FinishedHandle
from kvcore.stores.tiers.adapters import DiskAdapter
from kvcore.stores.tiers.memory import HostMemory
from moved_requests import write_chunk
from tiered_requests import LONG, DictStore, kvcore_threads, run, store_prompt, tiered_manager

ALL = (len(LONG) - 1) // 4 * 4


class Gate:
    """Loads from stores begin at once, and read the first page when the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_asked, self.may_go = Event(), Event()
        prepare = HostMemory.prepare

        def wait_and_prepare(memory: HostMemory, replica: int, last: int) -> None:
            self.is_asked.set()
            assert self.may_go.wait(60)
            prepare(memory, replica, last)

        monkeypatch.setattr(HostMemory, "prepare", wait_and_prepare)


@pytest.fixture
def tier(tmp_path: Path) -> str:
    tier = f"disk:{tmp_path}:16MiB"
    store_prompt([tier])
    return tier


@pytest.fixture
def gate(tier: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.may_go.set()


def _begun(manager: PagedKVCacheManager, gate: Gate) -> TextGenerationContext:
    context = TextGenerationContext("r", LONG)
    manager.claim("r")
    assert manager.maybe_reserve(context)
    assert context.pending
    assert gate.is_asked.wait(60)
    return context


def test_what_a_released_request_waited_for_is_the_next_one_s(tier: str, gate: Gate) -> None:
    with tiered_manager(tier, async_onload=True) as manager:
        _begun(manager, gate)
        manager.release("r")
        gate.may_go.set()
        # A request that comes at once waits for the read in flight, and reads no page again.
        assert run_fetched(manager) == ALL
        assert manager.tier_metrics["disk"].hits == ALL // 4
        manager.check_integrity()


def run_fetched(manager: PagedKVCacheManager) -> int:
    """Serve the prompt with a fetch, which waits for its pages."""
    context = TextGenerationContext("again", LONG)
    manager.claim("again")
    cached = int(manager.fetch([context])[0].cache_lengths[0])
    write_chunk(manager, context, 9)
    manager.release("again")
    assert run(manager, LONG, "check") == ALL
    return cached


def test_nothing_arrives_after_a_reset(tier: str, gate: Gate) -> None:
    with tiered_manager(tier, async_onload=True) as manager:
        context = _begun(manager, gate)
        manager.reset_prefix_cache()
        gate.may_go.set()
        assert manager.wait(context, timeout=60)
        assert context.start_idx == 0
        manager.release("r")
        manager.check_integrity()
        assert run(manager, LONG) == 0


def test_others_fork_and_decode_meanwhile(tier: str, gate: Gate) -> None:
    with tiered_manager(tier, async_onload=True) as manager:
        parent = TextGenerationContext("parent", [1, 2, 3, 4, 5])
        manager.claim("parent")
        manager.fetch([parent])
        parent.update(6)
        manager.step([parent])
        context = _begun(manager, gate)
        child = TextGenerationContext("child", [1, 2, 3, 4, 5, 6])
        manager.fork("parent", child)
        batch = [parent, child]
        for token in range(12):
            manager.fetch(batch)
            for each in batch:
                each.update(token)
            manager.step(batch)
        assert context.pending
        gate.may_go.set()
        assert manager.wait(context, timeout=60)
        assert context.start_idx == ALL
        manager.check_integrity()


def test_a_manager_is_closed_meanwhile(tier: str, gate: Gate) -> None:
    manager = tiered_manager(tier, async_onload=True)
    context = _begun(manager, gate)
    closing = Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    gate.may_go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not context.pending
    assert not [*kvcore_threads()]
    with pytest.raises(KVCacheError, match="is closed; make another one"):
        manager.poll()


class SlowStore(DictStore):
    """A store whose reads end when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = Event()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        assert self.may_go.wait(60)
        return super().get_into(keys, buffers)


def test_a_batch_that_takes_too_long_is_a_miss() -> None:
    store = SlowStore()
    store_prompt([store])
    with tiered_manager(store, store_timeout=0.02) as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        assert manager.maybe_reserve(context)
        assert context.start_idx == 0
        assert manager.tier_metrics["slowstore"]["timeouts"] == 1
        manager.check_integrity()
        manager.release("r")
        store.may_go.set()


@pytest.mark.parametrize("error", [MemoryError(), KVCacheError("closed")])
def test_a_batch_that_cannot_begin_is_a_miss(
    tier: str,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    with tiered_manager(tier) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "prepare", fail)
            assert run(manager, [*LONG[:-1], 9]) == 0
            manager.check_integrity()
        assert "could not be loaded" in caplog.text
        assert run(manager, LONG) == ALL
        manager.reset_prefix_cache()


def test_an_interrupt_ends_a_load(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with tiered_manager(tier) as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "prepare", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.maybe_reserve(context)
        manager.check_integrity()
        assert manager.maybe_reserve(context)
        assert context.start_idx == ALL
        manager.release("r")


def test_a_store_that_its_owner_closes_meanwhile_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = f"disk:{tmp_path}:16MiB"
    store_prompt([tier])
    prepare = HostMemory.prepare
    with tiered_manager(tier) as manager:
        assert manager._tiers is not None
        (adapter,) = manager._tiers._stores
        assert isinstance(adapter, DiskAdapter)

        def close_first(memory: HostMemory, replica: int, last: int) -> None:
            adapter.store.close()
            prepare(memory, replica, last)

        monkeypatch.setattr(HostMemory, "prepare", close_first)
        assert run(manager, LONG) == 0
        assert manager.tier_metrics["disk"]["errors"] >= 1
        manager.check_integrity()


def test_threads_load_one_prompt_at_the_same_time(tier: str) -> None:
    with tiered_manager(tier, async_onload=True) as manager:
        contexts = [TextGenerationContext(n, LONG) for n in range(2)]
        for context in contexts:
            manager.claim(context.request_id)
            assert manager.maybe_reserve(context)
        for context in contexts:
            assert manager.wait(context, timeout=60)
            assert context.start_idx == ALL
        assert manager.tier_metrics["disk"].hits == ALL // 4
        manager.check_integrity()
