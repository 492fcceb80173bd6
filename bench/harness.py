# SPDX-License-Identifier: Apache-2.0
"""Time loops, describe the machine, print and store the rows of a bench.

A loop over prebuilt arguments is timed with ``perf_counter_ns``. Only the time of the
empty loop over the same arguments is subtracted. Percentiles come from calls that are
timed one by one, so they include the clock (about 50 ns). Garbage collection is off
while a loop runs, as in ``timeit``. Samples are left out if another process used the
CPU, or slowed it, during the sample (see ``undisturbed``).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from time import perf_counter_ns
from typing import Any, TypeVar

T = TypeVar("T")

_LOOP = range(1000)
_SLOWER = 1.25
_PATIENCE = 20.0

#: Environment variable with the best pace that an earlier process measured, in ns.
PACE = "KVCORE_BENCH_PACE"


@dataclass(frozen=True)
class Row:
    """One measured row: times in ``unit``, and the limit that they are compared with."""

    key: str
    work: str
    n: int
    median: float
    min: float
    mean: float
    p99: float | None = None
    limit: float | None = None
    limit_name: str = ""
    unit: str = "us"
    note: str = ""

    def value(self, stat: str) -> float:
        """Return one statistic by name; NaN if it was not measured."""
        found = getattr(self, stat)
        return float("nan") if found is None else float(found)


def plain_row(key: str, work: str, value: float, unit: str, n: int = 1, **more: Any) -> Row:
    """Build a row of a single number (a ratio, a size, a rate)."""
    return Row(key, work, n, value, value, value, unit=unit, **more)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile, ``share`` in 0..1."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def make_row(key: str, work: str, samples: Sequence[float], **more: Any) -> Row:
    """Build a row of ``samples``, us per call."""
    return Row(
        key,
        work,
        len(samples),
        statistics.median(samples),
        min(samples),
        statistics.fmean(samples),
        **more,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector off inside the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _empty(items: Sequence[Any]) -> None:
    for _ in items:
        pass


def _clock(body: Callable[[Sequence[T]], None], items: Sequence[T]) -> int:
    start = perf_counter_ns()
    body(items)
    return perf_counter_ns() - start


def time_loop(body: Callable[[Sequence[T]], None], items: Sequence[T]) -> float:
    """Return us per item of ``body(items)``, which loops over them, less the empty loop.

    The empty loop runs second: before the body, it would load the objects into the CPU caches.
    """
    spent = _clock(body, items)
    idle = min(_clock(_empty, items) for _ in range(3))
    return max(spent - idle, 0) / len(items) / 1e3


def time_calls(call: Callable[[T], Any], items: Sequence[T]) -> float:
    """Return us per ``call(item)``, less the empty loop."""

    def body(batch: Sequence[T]) -> None:
        for item in batch:
            call(item)

    return time_loop(body, items)


@cache
def best_pace() -> int:
    """Return the ns of a fixed loop on a machine without other work.

    This is the fastest loop of one second, or of an earlier process with its result in the
    environment: a machine can be slow during a whole bench.
    """
    end = perf_counter_ns() + 1_000_000_000
    best = int(os.environ.get(PACE, _clock(_empty, _LOOP)))
    while perf_counter_ns() < end:
        best = min(best, _clock(_empty, _LOOP))
    return best


def _is_quiet() -> bool:
    return min(_clock(_empty, _LOOP) for _ in range(2)) <= _SLOWER * best_pace()


def undisturbed(parts: Iterable[Callable[[], list[T]]], patience_s: float = _PATIENCE) -> list[T]:
    """Gather the samples of parts that ran at full speed.

    On a shared machine a neighbour on the same core halves the speed for milliseconds at
    a time. Each part waits until a fixed loop runs at its best pace; all waits together
    take at most ``patience_s`` seconds. A part is left out if the loop is slower after the
    part, or if the kernel ran another process during the part. If every part is disturbed,
    all samples are kept. The number of left out samples is printed to stderr.
    """
    kept: list[T] = []
    spoiled: list[T] = []
    patience = int(patience_s * 1e9)
    with quiet():
        for part in parts:
            start = perf_counter_ns()
            while not _is_quiet() and perf_counter_ns() - start < patience:
                pass
            patience -= perf_counter_ns() - start
            switches = getrusage(RUSAGE_THREAD).ru_nivcsw
            found = part()
            good = getrusage(RUSAGE_THREAD).ru_nivcsw == switches and _is_quiet()
            (kept if good else spoiled).extend(found)
    if spoiled:
        total = len(kept) + len(spoiled)
        print(f"disturbed: {len(spoiled)} of {total} samples left out", file=sys.stderr)
    return kept or spoiled


def sample_parts(body: Callable[[Sequence[T]], None], parts: Iterable[Sequence[T]]) -> list[float]:
    """Return us per item of ``body(part)``, one sample per part; parts are built one by one."""
    return undisturbed(partial(_sample, body, part) for part in parts)


def _sample(body: Callable[[Sequence[T]], None], part: Sequence[T]) -> list[float]:
    return [time_loop(body, part)]


def sample_loop(
    body: Callable[[Sequence[T]], None], items: Sequence[T], size: int = 200
) -> list[float]:
    """Return us per item, one sample per run of ``size`` items; a shorter run is left out."""
    return sample_parts(body, _runs(items[: len(items) // size * size], size))


def _runs(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def sample_calls(call: Callable[[T], Any], items: Sequence[T], size: int = 200) -> list[float]:
    """Return us per ``call(item)``, one sample for each run of ``size`` items."""

    def body(batch: Sequence[T]) -> None:
        for item in batch:
            call(item)

    return sample_loop(body, items, size)


def repeat_calls(call: Callable[[T], Any], item: T, tokens: int) -> list[float]:
    """Return us per call on one hot item, over runs of about half a millisecond."""
    size = max(20, min(2000, (1 << 21) // tokens))
    time_calls(call, [item] * size)
    return sample_calls(call, [item] * (41 * size), size)


def time_each(call: Callable[[T], Any], items: Sequence[T], size: int = 100) -> list[float]:
    """Return the us of every single call, with the time of the clock."""
    return time_each_of(call, _runs(items, size))


def time_each_of(call: Callable[[T], Any], parts: Iterable[Sequence[T]]) -> list[float]:
    """Return the us of every single call; the parts are built one by one."""
    return undisturbed(partial(_marks, call, part) for part in parts)


def _marks(call: Callable[[T], Any], items: Sequence[T]) -> list[float]:
    marks = [0] * (len(items) + 1)
    marks[0] = perf_counter_ns()
    for i, item in enumerate(items, 1):
        call(item)
        marks[i] = perf_counter_ns()
    return [(b - a) / 1e3 for a, b in pairwise(marks)]


def machine() -> dict[str, Any]:
    """Return the machine and the versions for which the numbers are valid."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "kvcore": _kvcore_version(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def _kvcore_version() -> str | None:
    try:
        return metadata.version("kvcore")
    except metadata.PackageNotFoundError:
        return None


def number(value: float | None) -> str:
    """Format a number for a table: three significant digits, '-' for None or NaN."""
    if value is None or math.isnan(value):
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table with the ratio to the limit."""
    line = "{:<58} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7}  {}"
    print(line.format("work", "median", "min", "mean", "p99", "limit", "ratio", "unit"))
    for row in rows:
        ratio = row.median / row.limit if row.limit else None
        cells = [row.median, row.min, row.mean, row.p99, row.limit, ratio]
        print(line.format(row.work, *map(number, cells), row.unit))


def main(measure: Callable[[argparse.Namespace], list[Row]], about: str | None) -> int:
    """Run one bench from the command line; print a table, and write JSON with --json."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a test of the bench")
    parser.add_argument("--trace", type=Path, help="trace for the replay bench")
    options = parser.parse_args()
    facts = machine()
    print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}", end=", ")
    print(f"numpy {facts['numpy']}, kvcore {facts['kvcore']}, load {facts['load'][0]}")
    rows = measure(options)
    show(rows)
    if options.json:
        stored = {"machine": facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(stored, indent=1) + "\n")
    sys.stdout.flush()
    return 0
