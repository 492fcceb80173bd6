# SPDX-License-Identifier: Apache-2.0
"""Run the benches of a suite, each in a fresh process, and set them beside the goals.

``python bench/run.py SUITE [--trace PATH] [--json OUT] [--page]``, where SUITE is
``control-path``, ``data-path`` or ``generate``, prints the table and writes the rows to
``bench/results/SUITE.json``. ``--page`` also writes the rows with goals into
``docs/benchmarks.md``, between ``<!-- SUITE:begin -->`` and ``<!-- SUITE:end -->``, and the
headlines of the control path into the README. ``--only`` names benches to run; the rows of the
others are kept as stored. ``--stored`` runs none: it prints and writes what is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from goals import Goal, goals_of
from harness import PACE, Row, best_pace, machine, number
from headlines import headline_table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
README = HERE.parent / "README.md"
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEADLINES = "control-path"
SUITES = {
    "control-path": (
        "limits",
        "match",
        "admit",
        "partial",
        "pin",
        "evict",
        "policies",
        "groups",
        "alloc",
        "decode",
        "memory",
        "replay",
        "startup",
    ),
    "data-path": ("data_path", "transfer", "attention", "swap", "disk"),
    "generate": ("generate", "hf_groups"),
}


def run_bench(name: str, options: argparse.Namespace) -> list[Row]:
    """Run one bench in a fresh process and read its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(out)]
        command += ["--quick"] if options.quick else []
        command += ["--trace", str(options.trace)] if options.trace else []
        print(f"== {name}", flush=True)
        subprocess.run(command, check=True)
        return [Row(**row) for row in json.loads(out.read_text())["rows"]]


def table(rows: list[Row], facts: dict[str, Any]) -> str:
    """Write the rows as a Markdown table, one line per goal."""
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['libc']}, Python {facts['python']}, "
        f"numpy {facts['numpy']}, kvcore {facts['kvcore']}; microseconds unless a unit is given.",
        "",
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
    """Replace what stands between the two marks of a name in a page."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    page = path.read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{path} has no {begin} ... {end} to write the table to")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def write_pages(suite: str, rows: list[Row], facts: dict[str, Any]) -> None:
    """Write the rows with goals into the page of benchmarks, the headlines into the README."""
    write_between(PAGE, suite, table([row for row in rows if goals_of(row)], facts))
    if suite == HEADLINES:
        write_between(README, "headlines", headline_table(rows, facts))


def stored(path: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Read the machine and the rows by bench of an earlier run; empty where there is none."""
    if not path.exists():
        return {}, {}
    found = json.loads(path.read_text())
    benches = {name: [Row(**row) for row in rows] for name, rows in found["benches"].items()}
    return found["machine"], benches


def store(path: Path, facts: dict[str, Any], benches: dict[str, list[Row]]) -> None:
    """Write the rows by bench, each with its goals, as JSON."""
    plain = {name: [asdict(row) for row in rows] for name, rows in benches.items()}
    goals = [
        {"key": row.key, "goal": goal.text(row), "met": goal.is_met(row)}
        for rows in benches.values()
        for row in rows
        for goal in goals_of(row)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": facts, "benches": plain, "goals": goals}, indent=1)
    path.write_text(text + "\n")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--trace", type=Path, help="trace for the replay rows (default: built in)")
    parser.add_argument("--json", type=Path, help="where the rows go (default: bench/results)")
    parser.add_argument("--page", action="store_true", help="write the tables into the docs")
    parser.add_argument("--only", nargs="+", metavar="BENCH", help="benches of the suite")
    parser.add_argument("--stored", action="store_true", help="run nothing, take the stored rows")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - set(SUITES[options.suite])
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in {', '.join(SUITES[options.suite])}")
    return options


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Run the benches that were asked for and store their rows beside the earlier ones."""
    os.environ[PACE] = str(best_pace())
    facts = machine()
    benches = SUITES[options.suite]
    default = None if options.quick else RESULTS / f"{options.suite}.json"
    path = options.json or default
    found = stored(path)[1] if path and options.only else {}
    for name in options.only or benches:
        found[name] = run_bench(name, options)
        if path:
            store(path, facts, {name: found[name] for name in benches if name in found})
    return facts, found


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the table, write the results."""
    options = options_of(arguments)
    results = options.json or RESULTS / f"{options.suite}.json"
    facts, found = stored(results) if options.stored else measured(options)
    rows = [row for name in SUITES[options.suite] for row in found.get(name, [])]
    print(table(rows, facts))
    if options.suite == HEADLINES:
        print(headline_table(rows, facts))
    if options.page:
        write_pages(options.suite, rows, facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
