# SPDX-License-Identifier: Apache-2.0
"""Ask what an exporter costs a decode step of 256 requests, and what a scrape takes.

Timed as in decode.py. Three managers take turns, part by part: two without an exporter, whose
difference is the spread, and one with one, which times each call. Nobody scrapes meanwhile: a
scrape is timed by itself, over HTTP from the same process, asked for and answered. As a share of
the time it is one every 15 s, which is taken to hold the interpreter as long as it lasts.
"""

from __future__ import annotations

import statistics
import urllib.request
from argparse import Namespace
from contextlib import ExitStack
from time import perf_counter_ns

import kvcore
from decode import ROWS, decode_steps, start_batch, step_tokens
from harness import Row, main, make_row, plain_row, quiet
from kvcore.metrics import Exporter, export
from workload import PAGE, Context, fill, manager

_CONTEXT = 2048
_PART = 32
_SCRAPES_EVERY_US = 15e6


def _full_manager(steps: int) -> tuple[kvcore.PagedKVCacheManager, list[Context]]:
    held = ROWS * (_CONTEXT // PAGE + steps // PAGE + 4)
    mgr = manager(held + held // 4, tenants=())
    fill(mgr, 128, seed=_CONTEXT)
    return mgr, start_batch(mgr, _CONTEXT, "start")[0]


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
    parts = 8 if options.quick else 120
    found = [_full_manager((parts + 1) * _PART) for _ in range(3)]
    for mgr, batch in found:
        decode_steps(mgr, batch, step_tokens(_PART, 1))
    medians: list[list[float]] = [[], [], []]
    with ExitStack() as stack:
        exporter = stack.enter_context(export(found[2][0], port=0))
        for i in range(parts):
            for at in (0, 1, 2) if i % 2 else (2, 1, 0):
                spent = decode_steps(*found[at], step_tokens(_PART, i))
                medians[at].append(statistics.median(spent))
        with quiet():
            scrapes = _scrapes(exporter, 5 + parts)[5:]
    off, other, on = medians
    step = f"decode step, {ROWS} requests, 2k context"
    added = [(b - a) * 1e3 for a, b in zip(off, on, strict=True)]
    spread = [(b - a) * 1e3 for a, b in zip(off, other, strict=True)]
    without = statistics.median(off) * 1e3
    limit = {"limit": without, "limit_name": "the step", "unit": "ns"}
    share = statistics.median(scrapes) / _SCRAPES_EVERY_US
    return [
        make_row("exporter.step.off", f"{step}, no exporter", off),
        plain_row("exporter.step.spread", f"{step}, A/A", statistics.median(spread), "ns", parts),
        make_row("exporter.step.added", f"{step}, added by an exporter", added, **limit),
        make_row("exporter.scrape", "a scrape over HTTP, from question to answer", scrapes),
        plain_row("exporter.scrape.share", "of the time, scraped every 15 s", 100 * share, "%"),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
