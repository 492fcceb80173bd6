# SPDX-License-Identifier: Apache-2.0
"""Stores that raise, hang, lie or change bytes: only the hits and the counters change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest

from kvcore.stores import FinishedHandle, MemoryStore
from kvcore.stores.breaker import Breaker
from kvcore.stores.tiers.workers import Workers
from tiered_requests import (
    LONG,
    DictStore,
    kvcore_threads,
    run,
    served_by,
    store_prompt,
    tiered_manager,
)

PAGES = (len(LONG) - 1) // 4


class Raising(DictStore):
    """A store with a method that raises."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("where"):

            def fail(*arguments: Any) -> None:
                raise object.__getattribute__(self, "error")

            return fail
        return object.__getattribute__(self, name)


class Hanging(DictStore):
    """A store that hangs in reads until an event, and writes to the buffers afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = Event()
        self.has_written = Event()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        self.may_go.wait()
        for buffer in buffers:
            memoryview(buffer)[:] = bytes([255]) * len(buffer)
        self.has_written.set()
        return FinishedHandle(len(keys))


class Answer(FinishedHandle):
    """A handle whose result is not a number of pages of its batch."""

    answer: Any = -1

    def result(self) -> Any:
        return self.answer


class Lying(DictStore):
    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers

    def contains(self, keys: Sequence[bytes]) -> Any:
        return self.answers.get("contains", super().contains(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        found = super().get_into(keys, buffers)
        if "get" not in self.answers:
            return found
        answer = Answer(0)
        object.__setattr__(answer, "answer", self.answers["get"])
        return answer


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [*kvcore_threads()]


@pytest.mark.parametrize("where", ["contains", "get_into", "put_from", "remove", "clear"])
@pytest.mark.parametrize("error", [OSError("no"), KeyError("no"), SystemExit(3)], ids=repr)
def test_a_store_that_raises_is_a_miss(where: str, error: BaseException) -> None:
    store = Raising("", error)
    if where not in ("put_from",):
        store_prompt([store])
    store.where = where
    with tiered_manager(store) as manager:
        cached = run(manager, LONG)
        assert cached == (4 * PAGES if where in ("remove", "clear") else 0)
        run(manager, [3] * 9, "other")
        manager.flush(timeout=60)
        manager.reset_prefix_cache()
        metrics = manager.tier_metrics["raising"]
        assert (metrics.errors > 0) == (where != "remove")
        assert run(manager, LONG) == 0 if where != "clear" else True


def test_a_store_that_fails_is_left_alone_and_tried_again() -> None:
    now = [0.0]
    breaker = Breaker(3, 10, lambda: now[0])
    states: list[str] = []
    for _ in range(3):
        states.append(breaker.state)
        assert breaker.admits()
        breaker.failed()
    states.append(breaker.state)
    assert not breaker.admits()
    now[0] = 11
    states.append(breaker.state)
    assert breaker.admits()
    assert not breaker.admits()  # one at a time
    breaker.failed()
    states.append(breaker.state)
    now[0] = 22
    assert breaker.admits()
    breaker.succeeded()
    states.append(breaker.state)
    assert states == [*["closed"] * 3, "open", "half-open", "open", "closed"]


def test_the_breaker_of_a_store_opens() -> None:
    store = Raising("contains", OSError("gone"))
    with tiered_manager(store) as manager:
        for i in range(12):
            run(manager, [i] * 9, i)
        metrics = manager.tier_metrics["raising"]
        assert metrics.breaker == "open"
        assert 5 <= metrics.errors < 12
        assert not manager.flush(timeout=60)
    assert store.pages == {}


def test_a_store_that_hangs_costs_its_time_and_keeps_its_memory() -> None:
    store = Hanging()
    store.may_go.set()
    store_prompt([store])
    store.may_go.clear()
    with tiered_manager(store, store_timeout=0.02) as manager:
        try:
            assert run(manager, LONG) == 0
            metrics = manager.tier_metrics["hanging"]
            assert (metrics.timeouts, metrics.breaker) == (1, "open")
        finally:
            store.may_go.set()
        assert store.has_written.wait(60)  # into memory that no request uses:
        assert run(manager, LONG, "again") == 4 * PAGES


def test_many_calls_that_hang_take_a_bounded_number_of_threads() -> None:
    workers = Workers("kvcore test", 2)
    go = Event()
    jobs = [workers.start(go.wait), workers.start(go.wait)]
    assert workers.start(go.wait) is None
    go.set()
    assert all(job is not None and job.wait(60) for job in jobs)
    again = workers.start(lambda: 7)
    assert again is not None
    assert again.wait(60)
    assert again.result() == 7
    assert workers.close(60)
    assert workers.start(go.wait) is None


@pytest.mark.parametrize(
    "answers",
    [{"contains": []}, {"contains": None}, {"contains": 7}, {"get": -1}, {"get": 10**9},
     {"get": "all"}, {"get": None}],
    ids=str,
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_an_error(answers: dict[str, Any]) -> None:
    store = Lying()
    store_prompt([store])
    store.answers = answers
    with tiered_manager(store) as manager:
        assert run(manager, LONG) == 0
        assert manager.tier_metrics["lying"].errors > 0


def test_a_store_that_says_it_has_all_has_not() -> None:
    class All(list[bool]):
        def __iter__(self) -> Iterator[bool]:
            return iter([True])

    store = Lying(contains=All())
    with tiered_manager(store) as manager:
        assert run(manager, LONG) == 0
    store = Lying(get=3)  # it reports three pages with arbitrary bytes
    store.contains = lambda keys: [True] * len(keys)  # type: ignore[method-assign]
    with tiered_manager(store) as manager:
        assert run(manager, LONG) == 0
        assert manager.tier_metrics["lying"].corrupt > 0


@pytest.mark.parametrize("at", [0, 8, 40, 70, 100, 124, 127, 128, 300, -1])
def test_a_flipped_bit_is_a_miss_and_the_page_goes(at: int) -> None:
    store = DictStore()
    store_prompt([store])
    assert len(store.pages) == PAGES
    store.flip(at)
    with tiered_manager(store) as manager:
        assert run(manager, LONG) == 0
        metrics = manager.tier_metrics["dictstore"]
        assert (metrics.corrupt, metrics.hits) == (1, 0)
        assert manager.flush(timeout=60)
    assert served_by([store], LONG) == 4  # the first page is repaired, the second is removed


def test_a_page_that_is_flipped_in_the_middle_ends_the_hit() -> None:
    store = DictStore()
    store_prompt([store])
    key = [*store.pages][5]
    page = bytearray(store.pages[key])
    page[-1] ^= 1
    store.pages[key] = bytes(page)
    assert served_by([store], LONG) == 20
    assert served_by([store], LONG) == 4 * PAGES  # computed and stored again


def test_a_hole_ends_the_hit() -> None:
    store = DictStore()
    store_prompt([store])
    del store.pages[[*store.pages][3]]
    assert served_by([store], LONG) == 12


def test_what_one_store_cannot_serve_another_does() -> None:
    first, second = DictStore(), MemoryStore(1 << 20)
    store_prompt([first, second])
    first.flip(200)
    with tiered_manager(first, second) as manager:
        assert run(manager, LONG) == 4 * PAGES
        assert manager.tier_metrics["dictstore"].corrupt == PAGES
        assert manager.tier_metrics["memorystore"].hits == PAGES
