# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of events for the calls of a manager, and of taking events, in ns per page.

A call is the ``step`` that caches a prompt of 256 pages, or the ``fetch`` that evicts 256 pages.
Three managers run the same calls in turn: two managers without events, whose difference is the
spread, and a manager with events, which are taken between two prompts. ``take_events`` also
computes the keys of the pages. The limit of the row ``take`` is ``page_keys`` of the same tokens.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from time import perf_counter_ns
from typing import Any

import numpy as np

import kvcore
from harness import Row, main, make_row, plain_row, quiet
from kvcore.keys import page_keys
from workload import Context

_PAGE, _PAGES = 16, 256


def _manager(*, events: bool) -> kvcore.PagedKVCacheManager:
    params = kvcore.KVCacheParams(
        "float16", 8, 128, 32, page_size=_PAGE, enable_prefix_caching=True
    )
    tokens = _PAGES * _PAGE + _PAGE
    options: dict[str, Any] = {"num_pages": 2 * _PAGES, "blocks": None, "events": events}
    return kvcore.PagedKVCacheManager(params, 2, tokens, **options)


def _prompt(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 128_000, _PAGES * _PAGE + 1, dtype=np.int32)


class _Samples:
    """Times of one manager, in ns per page."""

    def __init__(self, *, events: bool) -> None:
        self.mgr, self.events = _manager(events=events), events
        self.step: list[float] = []
        self.evict: list[float] = []
        self.take: list[float] = []
        self.keys: list[float] = []

    def run(self, number: int) -> None:
        mgr, prompt = self.mgr, _prompt(number)
        context = Context(str(number), prompt)
        mgr.claim(context.request_id)
        begin = perf_counter_ns()
        mgr.fetch([context])
        fetched = perf_counter_ns()
        context.update(1)
        written = perf_counter_ns()
        mgr.step([context])
        done = perf_counter_ns()
        mgr.release(context.request_id)
        self.evict.append((fetched - begin) / _PAGES)
        self.step.append((done - written) / _PAGES)
        if not self.events:
            return
        begin = perf_counter_ns()
        mgr.take_events()
        taken = perf_counter_ns()
        page_keys(prompt[:-1], _PAGE)
        self.keys.append((perf_counter_ns() - taken) / _PAGES)
        self.take.append((taken - begin) / _PAGES)


def measure(options: Namespace) -> list[Row]:
    """Measure both calls, the spread, and ``take_events``."""
    off, again, heard = _Samples(events=False), _Samples(events=False), _Samples(events=True)
    rounds = 100 if options.quick else 1000
    with quiet():
        for number in range(rounds):
            for each in (off, again, heard) if number % 2 else (heard, again, off):
                each.run(number)
    rows = []
    for verb, name in (("step", "a step that caches"), ("evict", "a fetch that evicts")):
        base, other, with_events = (getattr(each, verb)[8:] for each in (off, again, heard))
        added = statistics.median(a - b for a, b in zip(with_events, base, strict=True))
        spread = statistics.median(a - b for a, b in zip(other, base, strict=True))
        median = statistics.median(base)
        n = len(base)
        rows.append(plain_row(f"events.{verb}.off", f"{name}, without", median, "ns", n))
        rows.append(plain_row(f"events.{verb}.spread", f"{name}, A/A", spread, "ns", n))
        rows.append(plain_row(f"events.{verb}.added", f"{name}, added", added, "ns", n))
    limit = statistics.median(heard.keys[8:])
    more: dict[str, Any] = {"limit": limit, "limit_name": "page_keys of the tokens", "unit": "ns"}
    rows.append(make_row("events.take", "taking the events of a page", heard.take[8:], **more))
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
