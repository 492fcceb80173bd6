# SPDX-License-Identifier: Apache-2.0
"""Requests that continue while their pages are loaded, and prefixes loaded ahead."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread, Timer
from typing import Any

import pytest

from foreign_context import Context
from kvcore import (
    InsufficientBlocksError,
    PagedKVCacheManager,
    RequestNotFoundError,
    TextGenerationContext,
)
from kvcore.stores import FinishedHandle, MemoryStore
from moved_requests import expected_rows, moving_params, read_rows, write_chunk
from tiered_requests import LONG, DictStore, run, store_prompt, tiered_manager

ALL = (len(LONG) - 1) // 4 * 4


class Gated(DictStore):
    """A store that reads when the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go = Event(), Event()
        self.num_reads = 0

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        self.num_reads += len(keys)
        self.is_asked.set()
        assert self.may_go.wait(60)
        return super().get_into(keys, buffers)


@pytest.fixture
def store() -> Gated:
    store = Gated()
    store_prompt([store])
    return store


def manager_of(store: Gated, **options: Any) -> PagedKVCacheManager:
    return tiered_manager(store, store_timeout=60, **({"async_onload": True} | options))


def begun(manager: PagedKVCacheManager, name: str = "r") -> TextGenerationContext:
    context = TextGenerationContext(name, LONG)
    manager.claim(name)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    assert context.pending
    return context


def poll_until(manager: PagedKVCacheManager, count: int = 1) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += manager.poll()
    return found


def test_a_request_has_a_longer_hit_once_its_pages_have_arrived(store: Gated) -> None:
    with manager_of(store) as manager:
        context = begun(manager)
        assert manager.maybe_reserve(context)  # the pages are still in flight
        assert manager.poll() == []
        store.may_go.set()
        assert poll_until(manager) == ["r"]
        assert not context.pending
        assert context.start_idx == ALL
        assert manager.poll() == []
        write_chunk(manager, context, 9)
        for found, wanted in zip(
            read_rows(manager, context), expected_rows(manager, context), strict=True
        ):
            assert (found == wanted).all()
        assert manager.metrics.cache_tokens == ALL


def test_a_request_can_be_waited_for(store: Gated) -> None:
    with manager_of(store) as manager:
        context = begun(manager)
        assert not manager.wait(context, timeout=0.01)
        store.may_go.set()
        assert manager.wait(context)
        assert context.start_idx == ALL
        assert manager.wait(context)
        assert manager.wait(TextGenerationContext("unknown", [1]))


def test_fetch_waits_for_what_is_on_its_way(store: Gated) -> None:
    with manager_of(store) as manager:
        context = begun(manager)
        store.may_go.set()
        inputs = manager.fetch([context])
        assert inputs[0].cache_lengths.tolist() == [ALL]
        assert manager.poll() == []


def test_a_batch_that_was_fetched_before_waits_for_one_that_has_come_again(store: Gated) -> None:
    with manager_of(store) as manager:
        context = TextGenerationContext("r", LONG[:3])
        batch = [context]
        manager.claim("r")
        for _ in range(2):  # the second call recognises the batch
            manager.fetch(batch)
        manager.release("r")
        batch[0] = again = begun(manager, "again")
        other = TextGenerationContext("r", LONG[:3])
        manager.claim("r")
        batch.append(other)
        Timer(0.05, store.may_go.set).start()
        assert manager.fetch(batch)[0].cache_lengths.tolist() == [ALL, 0]
        assert not again.pending


def test_the_context_that_was_reserved_last_is_the_one_that_waits(store: Gated) -> None:
    with manager_of(store) as manager:
        before = begun(manager)
        context = TextGenerationContext("r", LONG)
        assert manager.maybe_reserve(context)
        assert context.pending
        assert not before.pending
        store.may_go.set()
        assert manager.fetch([context])[0].cache_lengths.tolist() == [ALL]
        assert not context.pending
        assert context.start_idx == ALL
        assert manager.poll() == []


def test_a_request_that_was_not_reserved_runs_with_its_hit(store: Gated) -> None:
    store.may_go.set()
    with manager_of(store) as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        assert manager.fetch([context])[0].cache_lengths.tolist() == [ALL]
        assert not context.pending


def test_a_batch_is_reserved_without_waiting(store: Gated) -> None:
    with manager_of(store) as manager:
        contexts = [TextGenerationContext(i, LONG) for i in range(2)]
        for context in contexts:
            manager.claim(context.request_id)
        assert manager.maybe_reserve_batch(contexts) == 2
        assert all(context.pending for context in contexts)
        store.may_go.set()
        assert sorted(poll_until(manager, 2)) == [0, 1]
        assert [context.start_idx for context in contexts] == [ALL, ALL]


def test_one_who_has_nothing_below_is_not_pending() -> None:
    with tiered_manager(DictStore(), async_onload=True) as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        assert manager.maybe_reserve(context)
        assert not context.pending
        assert manager.wait(context)


def test_release_of_a_pending_request(store: Gated) -> None:
    with manager_of(store) as manager:
        context = begun(manager)
        manager.release("r")
        assert not context.pending
        again = begun(manager)  # another claim of the same name
        store.may_go.set()
        assert manager.wait(again)
        assert again.start_idx == ALL
        manager.release("r")
        assert manager.poll() == []
        assert manager.num_free_blocks == 32


def test_reset_while_a_request_is_pending(store: Gated) -> None:
    with manager_of(store) as manager:
        context = begun(manager)
        assert store.is_asked.wait(60)
        manager.reset_prefix_cache()
        store.may_go.set()
        assert manager.wait(context)
        assert context.start_idx == 0
        write_chunk(manager, context, 9)
        manager.release("r")


def test_fork_and_truncate_of_a_pending_request(store: Gated) -> None:
    with manager_of(store) as manager:
        begun(manager)
        child = TextGenerationContext("child", LONG)
        manager.fork("r", child)
        manager.truncate("r", 0)
        store.may_go.set()
        assert poll_until(manager) == ["r"]
        manager.release("child")
        manager.release("r")
        assert manager.num_free_blocks == 32


def test_close_while_a_request_is_pending(store: Gated) -> None:
    manager = manager_of(store)
    context = begun(manager)
    closer = Thread(target=manager.close)
    closer.start()
    store.may_go.set()
    closer.join()
    assert not context.pending


def test_a_request_that_does_not_fit_is_not_reserved_by_poll(store: Gated) -> None:
    with manager_of(store, num_pages=12) as manager:
        other = TextGenerationContext("other", [3] * 20)
        manager.claim("other")
        write_chunk(manager, other, 9)
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        assert not manager.maybe_reserve(context)
        store.may_go.set()
        if context.pending:
            assert poll_until(manager) == ["r"]
        assert manager.get_req_blocks("r") == []
        manager.release("other")
        assert manager.maybe_reserve(context)
        assert context.start_idx == ALL


def test_contexts_of_other_classes_are_polled_too(store: Gated) -> None:
    with manager_of(store) as manager:
        context = Context("r", LONG)
        manager.claim("r")
        assert manager.maybe_reserve(context)
        store.may_go.set()
        assert poll_until(manager) == ["r"]
        assert context.start_idx == ALL


def test_one_page_that_two_requests_want_is_read_once(store: Gated) -> None:
    with manager_of(store) as manager:
        first, second = begun(manager, "first"), begun(manager, "second")
        assert store.is_asked.wait(60)
        store.may_go.set()
        assert sorted(poll_until(manager, 2)) == ["first", "second"]
        assert (first.start_idx, second.start_idx) == (ALL, ALL)
        assert store.num_reads == ALL // 4


def test_threads_that_want_one_page_read_it_once(store: Gated) -> None:
    with manager_of(store, async_onload=False, max_batch_size=8, num_pages=200) as manager:
        found: list[int] = []
        threads = [Thread(target=lambda i=i: found.append(run(manager, LONG, i))) for i in range(6)]
        for thread in threads:
            thread.start()
        assert store.is_asked.wait(60)
        store.may_go.set()
        for thread in threads:
            thread.join()
        assert min(found) >= ALL
        assert store.num_reads == ALL // 4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prefix_is_brought_ahead(store: Gated, is_async: bool) -> None:
    store.may_go.set()
    with manager_of(store, async_onload=is_async) as manager:
        assert manager.prefetch(LONG) == ALL
        assert manager.prefetch(LONG[:9]) == 8
        assert manager.prefetch([99] * 9) == 0
        assert manager.prefetch(LONG, cache_salt="other") == 0
        assert manager.prefetch([]) == 0
        while manager.tier_metrics["gated"].hits < ALL // 4:
            pass
        assert manager.prefetch(LONG) == ALL
        reads = store.num_reads
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        while not manager.maybe_reserve(context) or context.start_idx < ALL:
            pass
        assert store.num_reads == reads == ALL // 4


def test_prefetch_without_stores_tells_what_the_device_has() -> None:
    with tiered_manager() as manager:
        run(manager, LONG)
        assert manager.prefetch(LONG) == ALL


def test_prefetch_checks_what_it_is_given() -> None:
    with tiered_manager(MemoryStore(1 << 20)) as manager:
        with pytest.raises(IndexError):
            manager.prefetch(LONG, replica_idx=3)
        with pytest.raises((TypeError, ValueError)):
            manager.prefetch("tokens")


def test_replicas_have_host_tiers_of_their_own(store: Gated) -> None:
    store.may_go.set()
    params = moving_params(n_devices=2, data_parallel_degree=2)
    with tiered_manager(store, params=params) as manager:
        for replica in range(2):
            assert run(manager, LONG, replica, replica_idx=replica) == ALL
        assert store.num_reads == 2 * (ALL // 4)


REFUSED: dict[str, tuple[type[Exception], Any]] = {
    "a request that is not claimed": (
        RequestNotFoundError,
        lambda m, ctx: m.fetch([ctx, TextGenerationContext("unknown", [1])]),
    ),
    "no steps": (ValueError, lambda m, ctx: m.fetch([ctx], 0)),
    "a request twice": (ValueError, lambda m, ctx: m.fetch([ctx, ctx])),
    "no pages for another": (InsufficientBlocksError, lambda m, ctx: fetch_with_long(m, ctx)),
}


def fetch_with_long(manager: PagedKVCacheManager, context: Any) -> None:
    """Fetch the context with a request for which the pool has no pages."""
    other = TextGenerationContext("long", [1] * 120)
    manager.claim("long")
    try:
        manager.fetch([context, other])
    finally:
        assert (other.start_idx, other.active_idx) == (0, 120)
        manager.release("long")


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_fetch_leaves_a_context_that_waits_where_it_stands(
    store: Gated, name: str, is_foreign: bool
) -> None:
    error, fetch = REFUSED[name]
    with manager_of(store) as manager:
        manager.claim("r")
        context: Any = (Context if is_foreign else TextGenerationContext)("r", LONG)
        assert manager.maybe_reserve(context)
        context.active_idx = 9
        store.may_go.set()
        before = (context.start_idx, context.active_idx, len(manager.get_req_blocks("r")))
        for _ in range(2):
            with pytest.raises(error):
                fetch(manager, context)
            now = (context.start_idx, context.active_idx, len(manager.get_req_blocks("r")))
            assert now == before
            assert is_foreign or context.pending
            manager.check_integrity()
        assert poll_until(manager) == ["r"]
        assert context.start_idx == ALL
        assert manager.fetch([context])[0].cache_lengths.tolist() == [ALL]
        manager.release("r")
        manager.check_integrity()
