# SPDX-License-Identifier: Apache-2.0
"""Run every bench of the control path, each in a fresh process, and set them beside the goals.

``python bench/run.py [--trace PATH] [--json OUT] [--readme]`` prints the table, writes the
rows to ``bench/results/control-path.json`` and, with ``--readme``, the table into README.md
between ``<!-- bench:begin -->`` and ``<!-- bench:end -->``. ``--only`` names benches to run;
the rows of the others are kept as stored.
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
RESULTS = HERE / "results" / "control-path.json"
README = HERE.parent / "README.md"
BENCHES = ("limits", "match", "admit", "pin", "evict", "alloc", "decode", "memory", "replay")
_BEGIN, _END = "<!-- bench:begin -->", "<!-- bench:end -->"


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


def write_readme(text: str) -> None:
    """Replace what stands between the two marks in README.md."""
    page = README.read_text()
    if _BEGIN not in page or _END not in page:
        raise SystemExit(f"{README} has no {_BEGIN} ... {_END} to write the table to")
    head, rest = page.split(_BEGIN, 1)
    tail = rest.split(_END, 1)[1]
    README.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{tail}")


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
    parser.add_argument("--trace", type=Path, help="trace for the replay rows (default: built in)")
    parser.add_argument("--json", type=Path, help=f"where the rows go (default: {RESULTS.name})")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the table, write the results."""
    options = options_of(arguments)
    os.environ[PACE] = str(best_pace())
    facts = machine()
    path = options.json or (None if options.quick else RESULTS)
    found = stored(path) if path and len(options.only) < len(BENCHES) else {}
    for name in options.only:
        found[name] = run_bench(name, options)
        if path:
            store(path, facts, {name: found[name] for name in BENCHES if name in found})
    rows = [row for name in BENCHES for row in found.get(name, [])]
    print(table(rows, facts))
    if options.readme:
        write_readme(table([row for row in rows if goals_of(row)], facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
