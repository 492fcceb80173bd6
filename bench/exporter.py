# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of an exporter for a decode step of 256 requests, and the time of a scrape.

A step is fetch, ``update_batch`` and step, as in decode.py. An exporter times two of these calls.
The added time is too short to be measured in a step on a shared machine. The bench therefore uses
the shortest call, the fetch of a single request, without an exporter, with an exporter, and without
an exporter again. The fastest part of each kind counts. The spread is the difference between the
two kinds without an exporter. There are no scrapes during these calls: a scrape is timed
separately, over HTTP from the same process, from request to answer. The share of the time assumes
a scrape every 15 s that holds the interpreter for its whole duration.
"""

from __future__ import annotations

import statistics
import urllib.request
from argparse import Namespace
from time import perf_counter_ns

import kvcore
from decode import ROWS, decode_steps, start_batch, step_tokens
from harness import Row, main, make_row, plain_row, quiet
from kvcore.metrics import Exporter, export
from workload import PAGE, Context, fill, manager

_CONTEXT = 2048
_CALLS, _BLOCKS = 2000, 10
_TIMED = 2  # calls of a step that an exporter times
_US_BETWEEN_SCRAPES = 15e6


def _full_manager(steps: int) -> tuple[kvcore.PagedKVCacheManager, list[Context]]:
    held = ROWS * (_CONTEXT // PAGE + steps // PAGE + 4)
    mgr = manager(held + held // 4)
    fill(mgr, 128, seed=_CONTEXT)
    return mgr, start_batch(mgr, _CONTEXT, "start")[0]


def _fetch_one(mgr: kvcore.PagedKVCacheManager, batch: list[Context]) -> float:
    """Return the ns of a fetch in the fastest block of calls."""
    fetch, spent = mgr.fetch, []
    for _ in range(_BLOCKS):
        start = perf_counter_ns()
        for _ in range(_CALLS):
            fetch(batch)
        spent.append((perf_counter_ns() - start) / _CALLS)
    return min(spent)


def _scrapes(exporter: Exporter, count: int) -> list[float]:
    """Return the us of each scrape."""
    url = f"http://{exporter.host}:{exporter.port}/metrics"
    spent = []
    for _ in range(count):
        start = perf_counter_ns()
        with urllib.request.urlopen(url) as answer:
            answer.read()
        spent.append((perf_counter_ns() - start) / 1e3)
    return spent


def measure(options: Namespace) -> list[Row]:
    """Measure calls with and without an exporter, steps, and scrapes."""
    parts = 5 if options.quick else 30
    mgr, batch = _full_manager(257)
    one = batch[:1]
    before, on, behind = [], [], []
    with quiet():
        for _ in range(parts):
            before.append(_fetch_one(mgr, one))
            with export(mgr, port=0):
                on.append(_fetch_one(mgr, one))
            behind.append(_fetch_one(mgr, one))
    steps = decode_steps(mgr, batch, step_tokens(256, 1))
    with quiet(), export(mgr, port=0) as exporter:
        scrapes = _scrapes(exporter, 105)[5:]
    added = min(on) - min(before + behind)
    spread = abs(min(behind) - min(before))
    step = f"decode step, {ROWS} requests, 2k context"
    of_step = 100 * _TIMED * added / (1e3 * min(steps))
    of_time = 100 * statistics.median(scrapes) / _US_BETWEEN_SCRAPES
    return [
        plain_row("exporter.call.added", "a call, added by an exporter", added, "ns", parts),
        plain_row("exporter.call.spread", "a call, A/A", spread, "ns", parts),
        make_row("exporter.step", f"{step}; no exporter", steps),
        plain_row(
            "exporter.step.share",
            f"{_TIMED} calls' share of the fastest of these steps",
            of_step,
            "%",
        ),
        make_row("exporter.scrape", "a scrape over HTTP, from question to answer", scrapes),
        plain_row("exporter.scrape.share", "of the time, scraped every 15 s", of_time, "%"),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
