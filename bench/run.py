# SPDX-License-Identifier: Apache-2.0
"""Run the benches of a suite, each in a fresh process, and compare the rows with the goals.

``python bench/run.py SUITE [--trace PATH] [--json OUT] [--page]``, where SUITE is
``control-path``, ``data-path``, ``generate`` or ``engines``, prints the table and writes the rows
to ``bench/results/SUITE.json``. ``--page`` also writes the rows with goals into
``docs/benchmarks.md``, between ``<!-- SUITE:begin -->`` and ``<!-- SUITE:end -->``, some rows into
the pages that quote them, and the headlines of the control path into the README. ``--only`` names
the benches to run; the stored rows of the other benches stay, each with the machine of its run.
``--stored`` runs no bench: it prints and writes the stored rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from goals import Goal, goals_of
from harness import PACE, Row, best_pace, number
from headlines import headline_table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
DOCS = HERE.parent / "docs"
PAGE = DOCS / "benchmarks.md"
HEADLINES = "control-path"
SUITES = {
    "control-path": (
        "limits",
        "match",
        "admit",
        "partial",
        "pin",
        "keys",
        "events",
        "exporter",
        "routing",
        "evict",
        "policies",
        "groups",
        "quotas",
        "alloc",
        "decode",
        "memory",
        "replay",
        "startup",
    ),
    "data-path": (
        "data_path",
        "small_calls",
        "transfer",
        "attention",
        "swap",
        "disk",
        "tiers",
        "shared",
        "shared_mooncake",
    ),
    "generate": ("generate", "engine", "hf_groups"),
    "engines": ("engine_vllm", "engine_vllm_windows", "offload_vllm", "engine_sglang"),
}
# By suite, the tables in other pages: page, mark, and the keys of the rows as shell patterns.
EXCERPTS = {
    "control-path": (
        (
            "groups.md",
            "groups-cost",
            (
                "groups.decode.*",
                "groups.match.*",
                "groups.window_length.window_*",
                "groups.give_back.*_pages",
                "memory.bundles.*",
            ),
        ),
        ("tenants.md", "quotas-cost", ("quotas.*",)),
        ("routing.md", "routing-cost", ("routing.*",)),
        ("metrics.md", "metrics-cost", ("exporter.*",)),
    ),
    "data-path": (
        ("shared_stores.md", "shared-cost", ("shared.put.*", "shared.get.*", "shared.miss")),
        ("shared_stores.md", "mooncake-cost", ("shared.mooncake.*",)),
    ),
    "generate": (("groups.md", "groups-model", ("hf_groups.*",)),),
    "engines": (
        ("vllm.md", "vllm-steps", ("vllm.*",)),
        ("vllm.md", "vllm-tiers", ("offload.*",)),
        ("sglang.md", "sglang-calls", ("sglang.*",)),
    ),
}


@dataclass(frozen=True)
class Measured:
    """The rows of a bench, and the machine and versions of their run."""

    machine: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Measured:
        """Build from the JSON that a bench wrote, or from the stored JSON."""
        return cls(found["machine"], [Row(**row) for row in found["rows"]])

    @property
    def facts(self) -> str:
        """The machine and the versions of the rows, on one line."""
        facts = self.machine
        return (
            f"{facts['cpu']}, {facts['cores']} cores, {facts['libc']}, Python {facts['python']}, "
            f"numpy {facts['numpy']}, kvcore {facts['kvcore']}; microseconds unless a unit is "
            f"given."
        )


def run_bench(name: str, options: argparse.Namespace) -> Measured:
    """Run one bench in a fresh process and read its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(out)]
        command += ["--quick"] if options.quick else []
        command += ["--trace", str(options.trace)] if options.trace else []
        print(f"== {name}", flush=True)
        subprocess.run(command, check=True)
        return Measured.read(json.loads(out.read_text()))


def rows_of(benches: Iterable[Measured]) -> list[Row]:
    """Return the rows of all benches in one list."""
    return [row for bench in benches for row in bench.rows]


def chosen(benches: Iterable[Measured], choice: Callable[[Row], object]) -> list[Measured]:
    """Return the benches with only the rows that a page shows, without empty benches."""
    found = (replace(bench, rows=[*filter(choice, bench.rows)]) for bench in benches)
    return [bench for bench in found if bench.rows]


def is_named(keys: Iterable[str], row: Row) -> bool:
    """Return true if the key of a row matches a pattern of ``keys``."""
    return any(fnmatchcase(row.key, key) for key in keys)


def tables(benches: Iterable[Measured]) -> str:
    """Return the rows as Markdown, one table per run of benches from the same machine."""
    return "\n\n".join(
        f"{facts}\n\n{table(rows_of(same))}"
        for facts, same in groupby(benches, key=lambda bench: bench.facts)
    )


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, one line per goal."""
    lines = [
        "| work | median / mean / p99 | limit, same run | ratio | goal | met |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.key.startswith("limit."):
            continue
        goals: list[Goal | None] = [*goals_of(row)] or [None]
        lines += [_line(row, goal, first=i == 0) for i, goal in enumerate(goals)]
    return "\n".join(lines)


def _line(row: Row, goal: Goal | None, *, first: bool) -> str:
    unit = "" if row.unit == "us" else f" {row.unit}"
    cells = [number(row.median)]
    if row.unit == "us":
        cells += [number(row.mean), number(row.p99)]
    measured = " / ".join(cells) + unit + (f" ({row.note})" if row.note else "")
    limit = f"{row.limit_name} {number(row.limit)}{unit}" if row.limit else ""
    ratio = f"{row.median / row.limit:.2f}" if row.limit else ""
    head = [row.work, measured, limit, ratio] if first else ["", "", "", ""]
    tail = [goal.text(row), "yes" if goal.is_met(row) else "**no**"] if goal else ["", ""]
    return "| " + " | ".join([*head, *tail]) + " |"


def write_between(path: Path, mark: str, text: str) -> None:
    """Replace the text between the two marks in a page."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    page = path.read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{path} has no {begin} ... {end} for the table; add both marks")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def write_pages(suite: str, benches: list[Measured]) -> None:
    """Write the rows with goals, the tables of other pages, and the headlines of the README."""
    write_between(PAGE, suite, tables(chosen(benches, goals_of)))
    for page, mark, keys in EXCERPTS.get(suite, ()):
        write_between(DOCS / page, mark, tables(chosen(benches, partial(is_named, keys))))
    if suite == HEADLINES:
        write_between(README, "headlines", headlines(benches))


def headlines(benches: list[Measured]) -> str:
    """Return the headlines, with the measured versions of kvcore."""
    versions = dict.fromkeys(bench.machine["kvcore"] for bench in benches)
    return headline_table(rows_of(benches), " and ".join(versions))


def stored(path: Path) -> dict[str, Measured]:
    """Return the benches of earlier runs; empty if the file does not exist."""
    if not path.exists():
        return {}
    benches = json.loads(path.read_text())["benches"]
    return {name: Measured.read(found) for name, found in benches.items()}


def store(path: Path, benches: dict[str, Measured]) -> None:
    """Write the benches and the results of their goals as JSON."""
    goals = [
        {"key": row.key, "goal": goal.text(row), "met": goal.is_met(row)}
        for row in rows_of(benches.values())
        for goal in goals_of(row)
    ]
    plain = {name: asdict(bench) for name, bench in benches.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benches": plain, "goals": goals}, indent=1) + "\n")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--trace", type=Path, help="trace for the replay rows (default: built in)")
    parser.add_argument("--json", type=Path, help="file for the rows (default: in bench/results)")
    parser.add_argument("--page", action="store_true", help="write the tables into the docs")
    parser.add_argument("--only", nargs="+", metavar="BENCH", help="benches of the suite")
    parser.add_argument("--stored", action="store_true", help="run no bench, use the stored rows")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a test of the bench")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - set(SUITES[options.suite])
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in {', '.join(SUITES[options.suite])}")
    return options


def measured(options: argparse.Namespace) -> dict[str, Measured]:
    """Run the chosen benches, and store them together with the other benches of earlier runs."""
    os.environ[PACE] = str(best_pace())
    benches = SUITES[options.suite]
    default = None if options.quick else RESULTS / f"{options.suite}.json"
    path = options.json or default
    found = stored(path) if path and options.only else {}
    for name in options.only or benches:
        found[name] = run_bench(name, options)
        if path:
            store(path, {name: found[name] for name in benches if name in found})
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the table, write the results."""
    options = options_of(arguments)
    results = options.json or RESULTS / f"{options.suite}.json"
    found = stored(results) if options.stored else measured(options)
    benches = [found[name] for name in SUITES[options.suite] if name in found]
    print(tables(benches))
    if options.suite == HEADLINES:
        print(headlines(benches))
    if options.page:
        write_pages(options.suite, benches)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
