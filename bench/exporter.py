# SPDX-License-Identifier: Apache-2.0
"""Ask what an exporter costs a decode step of 256 requests, and what a scrape takes.

Timed as in decode.py, but that one manager runs parts of the steps in turn: without an exporter,
with one, which times each call, and without again. What is added is the difference to the mean of
the parts before and behind; the spread is that between these two. Nobody scrapes meanwhile: a
scrape is timed by itself, over HTTP from the same process, asked for and answered. As a share of
the time it is one every 15 s, which is taken to hold the interpreter as long as it lasts.
"""

from __future__ import annotations

import statistics
import urllib.request
from argparse import Namespace
from time import perf_counter_ns

import kvcore
from decode import ROWS, start_batch, step_tokens
from harness import Row, main, make_row, plain_row, quiet
from kvcore.metrics import Exporter, export
from workload import PAGE, Context, fill, manager

_CONTEXT = 2048
_PART = 64
_US_BETWEEN_SCRAPES = 15e6


def _full_manager(steps: int) -> tuple[kvcore.PagedKVCacheManager, list[Context]]:
    held = ROWS * (_CONTEXT // PAGE + steps // PAGE + 4)
    mgr = manager(held + held // 4)
    fill(mgr, 128, seed=_CONTEXT)
    return mgr, start_batch(mgr, _CONTEXT, "start")[0]


def _steps(mgr: kvcore.PagedKVCacheManager, batch: list[Context]) -> float:
    """Return the median us of a part of the steps."""
    fetch, step, update_batch = mgr.fetch, mgr.step, kvcore.update_batch
    spent = []
    inputs = fetch(batch)  # what the last step was given is still held when the next one asks
    for row in step_tokens(_PART, 1):
        start = perf_counter_ns()
        inputs = fetch(batch)
        update_batch(batch, row)
        step(batch)
        spent.append((perf_counter_ns() - start) / 1e3)
    del inputs
    return statistics.median(spent[1:])


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
    """Measure steps with and without an exporter, and scrapes."""
    parts = 10 if options.quick else 100
    mgr, batch = _full_manager((3 * parts + 1) * _PART)
    _steps(mgr, batch)
    before, on, behind = [], [], []
    with quiet():
        for _ in range(parts):
            before.append(_steps(mgr, batch))
            with export(mgr, port=0):
                on.append(_steps(mgr, batch))
            behind.append(_steps(mgr, batch))
        with export(mgr, port=0) as exporter:
            scrapes = _scrapes(exporter, 5 + parts)[5:]
    step = f"decode step, {ROWS} requests, 2k context"
    ends = list(zip(before, behind, strict=True))
    added = [(b - (a + c) / 2) * 1e3 for b, (a, c) in zip(on, ends, strict=True)]
    spread = statistics.median((c - a) * 1e3 for a, c in ends)
    off = before + behind
    limit = {"limit": statistics.median(off) * 1e3, "limit_name": "the step", "unit": "ns"}
    share = 100 * statistics.median(scrapes) / _US_BETWEEN_SCRAPES
    return [
        make_row("exporter.step.off", f"{step}; no exporter", off),
        plain_row("exporter.step.spread", f"{step}; A/A", spread, "ns", parts),
        make_row("exporter.step.added", f"{step}; added by an exporter", added, **limit),
        make_row("exporter.scrape", "a scrape over HTTP, from question to answer", scrapes),
        plain_row("exporter.scrape.share", "of the time, scraped every 15 s", share, "%"),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
