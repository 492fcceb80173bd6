# SPDX-License-Identifier: Apache-2.0
"""Run the benches of a suite, each in a fresh process, and set them beside the goals.

``python bench/run.py SUITE [--trace PATH] [--json OUT] [--page]``, where SUITE is
``control-path``, ``data-path`` or ``generate``, prints the table, writes the rows to
``bench/results/SUITE.json`` and, with ``--page``, the rows with goals into the page of the
suite, between ``<!-- SUITE:begin -->`` and ``<!-- SUITE:end -->``. ``--only`` names benches to
run; the rows of the others are kept as stored.
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

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = {
    "control-path": HERE.parent / "README.md",
    "data-path": HERE.parent / "docs" / "data-path.md",
    "generate": HERE.parent / "docs" / "transformers.md",
}
SUITES = {
    "control-path": (
        "limits",
        "match",
        "admit",
        "partial",
        "pin",
        "evict",
        "alloc",
        "decode",
        "memory",
        "replay",
        "startup",
    ),
    "data-path": ("data_path", "transfer", "attention", "swap"),
    "generate": ("generate",),
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


def write_page(suite: str, text: str) -> None:
    """Replace what stands between the suite's two marks in its page."""
    begin, end = f"<!-- {suite}:begin -->", f"<!-- {suite}:end -->"
    path = PAGES[suite]
    page = path.read_text()
    if begin not in page or end not in page:
        raise SystemExit(f"{path} has no {begin} ... {end} to write the table to")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def stored(path: Path) -> dict[str, list[Row]]:
    """Read the rows of an earlier run by bench; none where there is none."""
    if not path.exists():
        return {}
    benches = json.loads(path.read_text())["benches"]
    return {name: [Row(**row) for row in rows] for name, rows in benches.items()}


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
    parser.add_argument("--page", action="store_true", help="write the table into its page")
    parser.add_argument("--only", nargs="+", metavar="BENCH", help="benches of the suite")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - set(SUITES[options.suite])
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in {', '.join(SUITES[options.suite])}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the table, write the results."""
    options = options_of(arguments)
    os.environ[PACE] = str(best_pace())
    facts = machine()
    benches = SUITES[options.suite]
    default = None if options.quick else RESULTS / f"{options.suite}.json"
    path = options.json or default
    found = stored(path) if path and options.only else {}
    for name in options.only or benches:
        found[name] = run_bench(name, options)
        if path:
            store(path, facts, {name: found[name] for name in benches if name in found})
    rows = [row for name in benches for row in found.get(name, [])]
    print(table(rows, facts))
    if options.page:
        write_page(options.suite, table([row for row in rows if goals_of(row)], facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
