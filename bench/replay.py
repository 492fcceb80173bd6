# SPDX-License-Identifier: Apache-2.0
"""Measure the tokens per second that the manager handles in real traffic.

Each case runs ``kvcore replay --json`` in a fresh process. ``inside`` divides the prompt
tokens by the time in the manager and in building contexts. ``all in`` divides them by
the time of the whole replay, with expanding the trace's hashes to tokens, but without
reading the file. ``calls`` times only the manager's calls, in a separate loop. Each row
is the median of five runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import kvcore
from harness import Row, main, make_row, undisturbed
from kvcore import replay as kvreplay
from limits import TOKEN_BYTES, read_bandwidth
from workload import PAGE, manager

_MILLION = 1e6
_REPEATS = 5
_ADMISSION_PAGES = 1 << 20
_ONLINE_PAGES = 400_000
_RUNNING = 256


def _replay(trace: Path | None, mode: str, pages: int, *more: str) -> dict[str, Any]:
    """Run the command line once and return its report."""
    command = [sys.executable, "-m", "kvcore", "replay", *([str(trace)] if trace else [])]
    command += ["--mode", mode, "--page-size", str(PAGE), "--pages", str(pages), "--json", *more]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report: dict[str, Any] = json.loads(answer)
    assert report["leaked_pages"] == 0
    return report


def _inside(report: dict[str, Any]) -> float:
    return float(report["tokens_per_second"]) / _MILLION


def _all_in(report: dict[str, Any]) -> float:
    return float(report["prompt_tokens"] / report["wall_seconds"]) / _MILLION


def _rates(run: Callable[[], dict[str, Any]], *rates: Callable[[Any], float]) -> list[list[float]]:
    """Run five times; return the values of each rate, in million tokens per second."""
    reports: dict[float, dict[str, Any]] = {}

    def part() -> list[float]:
        report = run()
        key = _inside(report)
        reports[key] = report
        return [key]

    kept = undisturbed([part] * _REPEATS)
    return [[rate(reports[key]) for key in kept] for rate in rates]


def _calls_only(trace: Path | None) -> list[float]:
    """Replay in admission order; time only the manager's own calls."""
    workload = kvreplay.read_trace(trace) if trace else kvreplay.chat_workload(seed=0)
    mgr = manager(_ADMISSION_PAGES, requests=1)
    claim, reserve, step, release = mgr.claim, mgr.reserve, mgr.step, mgr.release
    spent = tokens = 0
    for i in range(len(workload)):
        prompt = workload.prompt(i)
        context = kvcore.TextGenerationContext(i, prompt)
        batch = [context]
        start = perf_counter_ns()
        claim(i)
        reserve(context)
        context.update(0)
        step(batch)
        release(i)
        spent += perf_counter_ns() - start
        tokens += len(prompt)
    return [tokens / spent * 1e9 / _MILLION]


def measure(options: Namespace) -> list[Row]:
    """Measure admission and online replay."""
    trace: Path | None = options.trace
    name = trace.name.split(".")[0] if trace else "built-in chat"
    reading = read_bandwidth() * 1e9 / TOKEN_BYTES / _MILLION
    more = {"unit": "M tokens/s", "limit": reading, "limit_name": "reading the tokens once"}
    admission = partial(_replay, trace, "admission", _ADMISSION_PAGES)
    inside, all_in = _rates(admission, _inside, _all_in)
    calls = undisturbed([partial(_calls_only, trace)] * _REPEATS)
    online = partial(_replay, trace, "online", _ONLINE_PAGES, "--concurrency", str(_RUNNING))
    (rates,) = _rates(online, _inside)
    work = f"replay {name}, admission"
    return [
        make_row("replay.calls", f"{work}, manager calls only", calls, **more),
        make_row("replay.inside", f"{work}, inside", inside, **more),
        make_row("replay.all_in", f"{work}, all in", all_in, **more),
        make_row("replay.online", f"replay {name}, online, {_RUNNING} running", rates, **more),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
