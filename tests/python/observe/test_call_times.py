# SPDX-License-Identifier: Apache-2.0
"""Histograms of call durations: the counted calls, and the exporters that count them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager
from kvcore.metrics import Exporter, export
from scraped import Samples, of, scrape

CALLS = ("reserve", "reserve_batch", "fetch", "step")


def run(manager: Any, first: int) -> None:
    """Serve a prompt with one call of each kind."""
    context = claimed(manager, range(first, first + 10))
    assert manager.maybe_reserve(context)
    assert manager.maybe_reserve_batch([context]) == 1
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    manager.release(context.request_id)


def counts(samples: Samples) -> list[float]:
    return [of(samples, f"{call}_seconds_count") for call in CALLS]


def counted(manager: Any) -> list[int]:
    return [manager._call_times()[call][0][-1][1] for call in CALLS]


def test_each_call_counts_in_its_histogram() -> None:
    manager = make_manager(4, 32)
    run(manager, 0)
    with export(manager, port=0) as exporter:
        assert counts(scrape(exporter)) == [0, 0, 0, 0]
        for i in range(3):
            run(manager, i)
        context = claimed(manager, range(20))
        assert manager.reserve(context)
        found = scrape(exporter)
        assert counts(found) == [4, 3, 3, 3]
        bounds = sorted(
            float(dict(labels)["le"])
            for name, labels in found
            if name == "kvcore_step_seconds_bucket"
        )
        assert (bounds[0], bounds[-2], bounds[-1]) == (1e-6, 1.0, float("inf"))
        upto = [of(found, "step_seconds_bucket", le=_text(bound)) for bound in bounds]
        assert upto == sorted(upto)
        assert upto[-1] == 3
        assert 0 < of(found, "step_seconds_sum") < 60


def _text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


def test_calls_that_raise_do_not_count() -> None:
    manager = make_manager(4, 4)
    with export(manager, port=0) as exporter:
        stranger = kvcore.TextGenerationContext("never claimed", [1, 2, 3])
        with pytest.raises(kvcore.RequestNotFoundError):
            manager.fetch([stranger])
        assert counts(scrape(exporter)) == [0, 0, 0, 0]
        first, second = claimed(manager, range(12)), claimed(manager, range(50, 62))
        assert manager.maybe_reserve(first)
        assert not manager.maybe_reserve(second)  # a refusal also counts
        assert counts(scrape(exporter)) == [2, 0, 0, 0]


def test_nothing_is_timed_without_an_exporter() -> None:
    manager = make_manager(4, 32)
    run(manager, 0)
    assert counted(manager) == [0, 0, 0, 0]
    exporter = export(manager, port=0)
    run(manager, 1)
    exporter.close()
    run(manager, 2)
    assert counted(manager) == [1, 1, 1, 1]
    with export(manager, port=0) as again:
        assert counts(scrape(again)) == [1, 1, 1, 1]


def test_a_port_that_is_taken_times_nothing() -> None:
    manager, other = make_manager(4, 32), make_manager(4, 32)
    with export(other, port=0) as exporter, pytest.raises(OSError, match="cannot listen"):
        export(manager, port=exporter.port)
    run(manager, 0)
    assert counted(manager) == [0, 0, 0, 0]


def test_the_last_exporter_ends_it() -> None:
    manager = make_manager(4, 32)
    first, second = export(manager, port=0), export(manager, port=0)
    first.close()
    first.close()  # the second exporter stays open
    run(manager, 0)
    assert counts(scrape(second)) == [1, 1, 1, 1]
    second.close()
    run(manager, 1)
    assert counted(manager) == [1, 1, 1, 1]


def test_threads_that_close_at_once_close_once() -> None:
    manager = make_manager(4, 32)
    first, second = export(manager, port=0), export(manager, port=0)
    threads = [threading.Thread(target=first.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(manager, 0)
    assert counts(scrape(second)) == [1, 1, 1, 1]
    second.close()


def test_a_manager_that_is_closed_or_gone() -> None:
    closed = make_manager(4, 32)
    with export(closed, port=0) as exporter:
        closed.close()
        assert scrape(exporter) == {}
    with export(closed, port=0) as exporter:
        assert scrape(exporter) == {}
    gone = make_manager(4, 32)
    exporter = export(gone, port=0)
    del gone
    gc.collect()
    exporter.close()


def test_reset_metrics_in_the_middle() -> None:
    manager = make_manager(4, 32)
    with export(manager, port=0) as exporter:
        run(manager, 0)
        manager.reset_metrics()
        found = scrape(exporter)
        assert counts(found) == [0, 0, 0, 0]
        assert of(found, "fetch_seconds_sum") == 0
        run(manager, 1)
        assert counts(scrape(exporter)) == [1, 1, 1, 1]


def test_counts_only_grow_while_threads_serve() -> None:
    manager = make_manager(4, 256)
    stopped = threading.Event()
    served = [0, 0, 0]

    def serve(number: int) -> None:
        while not stopped.is_set():
            run(manager, 1000 * number + served[number])
            served[number] += 1

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
    with export(manager, port=0) as exporter:
        for thread in threads:
            thread.start()
        before = [0.0] * 4
        for _ in range(20):
            found = scrape(exporter)
            now = counts(found)
            assert all(a <= b for a, b in zip(before, now, strict=True))
            assert of(found, "fetch_seconds_bucket", le="+Inf") == now[2]
            before = now
        stopped.set()
        for thread in threads:
            thread.join()
        assert counts(scrape(exporter)) == [sum(served)] * 4


def test_an_exporter_that_is_closed_during_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(4, 32)
    asked, may_go_on = threading.Event(), threading.Event()

    def slow(_: Any) -> Any:
        asked.set()
        assert may_go_on.wait(60)
        return ()

    found: list[Samples] = []
    exporter: Exporter = export(manager, port=0)
    run(manager, 0)
    monkeypatch.setattr(type(manager), "replica_metrics", property(slow))
    scraping = threading.Thread(target=lambda: found.append(scrape(exporter)))
    scraping.start()
    assert asked.wait(60)
    exporter.close()
    run(manager, 1)
    may_go_on.set()
    scraping.join()
    assert counts(found[0]) == [1, 1, 1, 1]
