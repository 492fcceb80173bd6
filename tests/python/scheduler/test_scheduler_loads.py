# SPDX-License-Identifier: Apache-2.0
"""Schedulers whose requests wait for stores: loads overlap, and count as cached tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Barrier, Event
from typing import Any

import pytest

from foreign_context import Context
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.scheduler import Request, Scheduler
from kvcore.stores import FinishedHandle
from moved_requests import moving_params
from tiered_requests import DictStore, tiered_manager

COUNT = 12
PROMPTS = [[100 * n + i for i in range(14)] for n in range(COUNT)]
CACHED = 12


class Slow(DictStore):
    """Answer a read once `together` reads wait, or once the test releases the store."""

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self.barrier, self.may_read = Barrier(together), Event()
        self.may_read.set()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        self.barrier.wait(60)
        assert self.may_read.wait(60)
        return super().get_into(keys, buffers)


def filled(store: Slow) -> Slow:
    """Store the prompts."""
    with tiered_manager(store) as manager:
        for name, prompt in enumerate(PROMPTS):
            context = TextGenerationContext(name, prompt)
            manager.claim(name)
            manager.fetch([context])
            context.update(0)
            manager.step([context])
            manager.release(name)
        assert manager.flush(timeout=60)
    return store


def manager_of(store: Slow, **options: Any) -> PagedKVCacheManager:
    given: dict[str, Any] = {"async_onload": True, "store_timeout": 60, "num_pages": 64}
    return tiered_manager(store, max_batch_size=COUNT, **(given | options))


def run_all(scheduler: Scheduler) -> Iterator[Any]:
    while batch := scheduler.next_batch():
        yield batch
        scheduler.update(batch, [7] * len(batch.requests))


def test_loads_of_many_requests_are_under_way_together() -> None:
    store = filled(Slow())
    store.barrier = Barrier(COUNT)  # passes only if reads of all requests are in flight at once
    with manager_of(store) as manager:
        scheduler = Scheduler(manager, max_batch_tokens=16)
        requests = [Request(TextGenerationContext(n, p), 2) for n, p in enumerate(PROMPTS)]
        for request in requests:
            scheduler.add(request)
        for _ in run_all(scheduler):
            pass
        assert [r.cached_tokens for r in requests] == [CACHED] * COUNT
        assert manager.metrics.cache_tokens == CACHED * COUNT


@pytest.mark.parametrize("kind", [TextGenerationContext, Context])
def test_others_run_while_a_request_is_loaded(kind: Any) -> None:
    store = filled(Slow())
    with manager_of(store) as manager:
        scheduler = Scheduler(manager)
        slow, quick = Request(kind("slow", PROMPTS[0]), 2), Request(kind("quick", [1, 2, 3]), 3)
        store.may_read.clear()
        for request in (slow, quick):
            scheduler.add(request)
        for batch in run_all(scheduler):
            assert batch.requests == [quick]
            assert scheduler.loading == [slow]
            if quick.left == 1:
                store.may_read.set()
                break
        store.may_read.set()
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.update(batch, [7] * len(batch.requests))
        admitted = [request for each in run_all(scheduler) for request in each.admitted]
        assert slow in admitted or slow in batch.admitted
        assert (slow.cached_tokens, quick.cached_tokens) == (CACHED, 0)
        assert slow.finish_reason == quick.finish_reason == "length"
        assert len(scheduler) == scheduler.num_running == 0


@pytest.mark.parametrize("closes", [True, False])
def test_a_request_that_is_loaded_can_be_cancelled(closes: bool) -> None:
    store = filled(Slow())
    with manager_of(store) as manager:
        scheduler = Scheduler(manager)
        slow, quick = (
            Request(TextGenerationContext(n, p), 2) for n, p in ((0, PROMPTS[0]), (1, [1]))
        )
        store.may_read.clear()
        scheduler.add(slow)
        scheduler.add(quick)
        assert scheduler.next_batch() is not None
        assert scheduler.loading == [slow]
        if closes:
            scheduler.close()
        else:
            scheduler.cancel(slow)
            scheduler.cancel(quick)
        store.may_read.set()
        assert scheduler.num_running == len(scheduler) == 0
        assert manager.num_free_blocks == 64
        assert scheduler.next_batch() is None


def test_a_request_that_is_loaded_gives_its_pages_to_those_that_run() -> None:
    store = filled(Slow())
    with manager_of(store, num_pages=8) as manager:
        scheduler = Scheduler(manager)
        first = Request(TextGenerationContext("first", [*range(500, 514)]), 10)
        slow = Request(TextGenerationContext("slow", PROMPTS[0]), 2)
        scheduler.add(Request(TextGenerationContext("x", [1]), 1))
        store.may_read.clear()
        scheduler.add(slow)
        scheduler.next_batch()
        store.may_read.set()
        scheduler.add(first)
        for _ in run_all(scheduler):
            pass
        assert slow.finish_reason == first.finish_reason == "length"
        assert slow.cached_tokens == CACHED


class Unsearched(list[Request]):
    """A queue that refuses a search for a request."""

    def _refuse(self, *given: Any) -> Any:
        raise AssertionError("the queue is searched")

    __contains__ = index = remove = pop = __delitem__ = _refuse


@pytest.mark.parametrize("closes", [True, False])
def test_cancelling_a_long_queue_searches_it_for_no_request(closes: bool) -> None:
    with tiered_manager(params=moving_params(), num_pages=8) as manager:
        scheduler = Scheduler(manager)
        requests = [Request(TextGenerationContext(n, [n]), 1) for n in range(50)]
        for request in requests:
            scheduler.add(request)
        scheduler._queue = Unsearched(scheduler._queue)
        if closes:
            scheduler.close()
        else:
            for request in requests[:-1]:
                scheduler.cancel(request)
            assert scheduler.waiting == requests[-1:]
            scheduler.cancel(requests[-1])
        assert scheduler.waiting == []
        assert {request.finish_reason for request in requests} == {"cancelled"}
        assert scheduler.next_batch() is None
