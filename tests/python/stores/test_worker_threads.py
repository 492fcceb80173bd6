# SPDX-License-Identifier: Apache-2.0
"""An owner keeps track of each of its threads, also if an interrupt hits the start of a thread."""

from __future__ import annotations

import gc
from threading import Event
from typing import Any

import pytest

from conftest import require
from interrupted_starts import MOMENTS, interrupt_starts, threads_named
from kvcore import PagedKVCacheManager
from kvcore.integrations.vllm.offload_threads import ordered_calls
from kvcore.stores import MemoryStore
from kvcore.stores.tiers.workers import Workers
from kvcore.support.threads import Threads
from tiered_requests import LONG, kvcore_threads, run, store_prompt, tiered_manager


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_thread_whose_start_was_interrupted_is_known_or_never_works(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    began, may_end = Event(), Event()

    def work() -> None:
        began.set()
        may_end.wait(60)

    threads = Threads("interrupted")
    met = interrupt_starts(monkeypatch, "interrupted", moment, began.is_set)
    with pytest.raises(KeyboardInterrupt):
        threads.start(work)
    assert len(met) == 1
    if moment == "after":
        assert len(threads) == 1
    if len(threads) == 1:
        assert began.wait(60)
        assert not threads.join(0)
    may_end.set()
    assert threads.join(60)
    assert len(threads) == 0
    if moment == "before":
        assert not began.is_set()


def test_a_start_that_the_system_refuses_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads("refused")
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(RuntimeError):
            threads.start(lambda: None)
    assert len(threads) == 0
    assert threads.join(0)


def test_a_thread_does_not_wait_for_itself() -> None:
    threads, found = Threads("own"), []
    threads.start(lambda: found.append(threads.join()))
    assert threads.join(60)
    assert found == [True]


def test_an_error_in_a_thread_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise ValueError("of the work")

    told: list[Any] = []
    monkeypatch.setattr("threading.excepthook", told.append)
    threads = Threads("failing")
    threads.start(work)
    assert threads.join(60)
    assert len(threads) == 0
    assert str(told[0].exc_value) == "of the work"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("queues", [False, True])
def test_workers_make_calls_and_end_after_interrupted_starts(
    monkeypatch: pytest.MonkeyPatch, moment: str, queues: bool
) -> None:
    workers, most = Workers("interrupted", 3, queues=queues), 3
    made: list[int] = []
    for _ in range(5):
        with monkeypatch.context() as patch:
            met = interrupt_starts(patch, "interrupted", moment, lambda: True)
            try:
                first = workers.start(lambda: made.append(-1))
            except KeyboardInterrupt:
                assert made == []
            else:
                assert met == []  # a thread of an earlier interrupted start makes the call
                assert first is not None
                assert first.wait(60)  # the thread is free for the next call
                break
    made.clear()
    may_end, at_work = Event(), [Event() for _ in range(most)]

    def call(i: int) -> None:
        made.append(i)
        at_work[i].set()
        may_end.wait(60)

    jobs = [workers.start(lambda i=i: call(i)) for i in range(most)]  # type: ignore[misc]
    assert all(event.wait(60) for event in at_work)
    assert (workers.start(lambda: None) is None) is not queues
    may_end.set()
    assert all(job is not None and job.wait(60) for job in jobs)
    assert len(threads_named("interrupted")) == most
    assert workers.close(60)
    assert threads_named("interrupted") == []
    assert sorted(set(made) - {-1}) == [*range(most)]


def closed_in_time(manager: PagedKVCacheManager) -> bool:
    """Return true if ``close`` returns; another thread calls it, in case it hangs."""
    threads = Threads("closing")
    threads.start(manager.close)
    return threads.join(60)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["onload", "writer"])
def test_a_manager_closes_after_an_interrupt_met_the_start_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    prompts = [[i, *LONG] for i in range(4)]
    store = MemoryStore(1 << 20)
    for prompt in prompts:
        store_prompt([store], prompt)
    manager = tiered_manager(store, async_onload=True)
    with monkeypatch.context() as patch:
        met = interrupt_starts(patch, f"kvcore {name}", moment, lambda: True)
        for i, prompt in enumerate([*prompts, LONG]):  # the last prompt is written to the store
            try:
                run(manager, prompt, f"r{i}")
            except KeyboardInterrupt:
                manager.release(f"r{i}")
        assert len(met) == 1
    for prompt in prompts:
        run(manager, prompt)
    assert closed_in_time(manager)
    assert [*kvcore_threads()] == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_publisher_leaves_neither_thread_nor_socket(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    require("msgspec")
    require("zmq")
    from kvcore.events import EventPublisher

    with tiered_manager(events=True) as manager:
        with monkeypatch.context() as patch:
            interrupt_starts(patch, "kvcore-events", moment, lambda: True)
            with pytest.raises(KeyboardInterrupt):
                EventPublisher(manager, "inproc://interrupted", replay_endpoint=None)
        assert threads_named("kvcore-events") == []
        with EventPublisher(manager, "tcp://127.0.0.1:*", replay_endpoint=None) as publisher:
            assert publisher.flush(60)
        assert threads_named("kvcore-events") == []


def test_calls_of_vllm_offloading_have_one_thread_before_the_first_call() -> None:
    made: list[int] = []
    pool = ordered_calls("ordered")
    assert len(threads_named("ordered")) == 1
    for i in range(100):
        pool.submit(made.append, i)
    pool.shutdown()
    assert made == [*range(100)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_no_thread_of_vllm_offloading(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    met = interrupt_starts(monkeypatch, "ordered", moment, lambda: True)
    with pytest.raises(KeyboardInterrupt):
        ordered_calls("ordered")
    gc.collect()  # frees the pool, and its thread ends
    if moment != "before":
        met[0].join(60)
    assert threads_named("ordered") == []
