# SPDX-License-Identifier: Apache-2.0
"""Ask how many tokens per second the manager takes from real traffic.

Runs ``kvcore replay --json`` in a fresh process for each case. ``inside`` divides the
prompt tokens by the time in the manager and in building contexts; ``all in`` by the
whole replay, expanding the trace's hashes to tokens included (reading the file not).
``calls`` is a loop of its own over the manager's five calls, contexts built before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import kvcore
from harness import Row, main, plain_row
from kvcore import replay as kvreplay
from limits import TOKEN_BYTES, read_bandwidth
from workload import PAGE, manager

_MILLION = 1e6
_REPEATS = 3
_ADMISSION_PAGES = 1 << 20
_ONLINE_PAGES = 400_000
_RUNNING = 256


def _replay(trace: Path | None, mode: str, pages: int, *more: str) -> list[dict[str, Any]]:
    """Run the command line; return the reports of every repeat."""
    command = [sys.executable, "-m", "kvcore", "replay", *([str(trace)] if trace else [])]
    command += ["--mode", mode, "--page-size", str(PAGE), "--pages", str(pages), "--json", *more]
    reports = []
    for _ in range(_REPEATS):
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        report = json.loads(answer)
        assert report["leaked_pages"] == 0
        reports.append(report)
    return reports


def _rate_row(key: str, work: str, rates: list[float], **more: Any) -> Row:
    """Build a row of rates in million tokens per second, the best repeat as the value."""
    best = max(rates) / _MILLION
    return plain_row(key, work, best, "M tokens/s", n=len(rates), **more)


def _calls_only(trace: Path | None, pages: int) -> float:
    """Replay in admission order, timing the manager's own calls; return tokens per second."""
    workload = kvreplay.read_trace(trace) if trace else kvreplay.chat_workload(seed=0)
    mgr = manager(pages, requests=1)
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
    return tokens / spent * 1e9


def measure(options: Namespace) -> list[Row]:
    """Measure admission and online replay."""
    trace: Path | None = options.trace
    name = trace.name.split(".")[0] if trace else "built-in chat"
    reading = read_bandwidth() * 1e9 / TOKEN_BYTES / _MILLION
    limit = {"limit": reading, "limit_name": "reading the tokens once"}
    reports = _replay(trace, "admission", _ADMISSION_PAGES)
    inside = [r["tokens_per_second"] for r in reports]
    all_in = [r["prompt_tokens"] / r["wall_seconds"] for r in reports]
    calls = [_calls_only(trace, _ADMISSION_PAGES) for _ in range(_REPEATS)]
    note = f"{reports[0]['evicted_pages']:,} pages evicted"
    online = _replay(trace, "online", _ONLINE_PAGES, "--concurrency", str(_RUNNING))
    rates = [r["tokens_per_second"] for r in online]
    work = f"replay {name}, admission"
    return [
        _rate_row("replay.calls", f"{work}, manager calls alone", calls, **limit),
        _rate_row("replay.inside", f"{work}, inside", inside, **limit, note=note),
        _rate_row("replay.all_in", f"{work}, all in", all_in, **limit),
        _rate_row("replay.online", f"replay {name}, online, {_RUNNING} running", rates, **limit),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
