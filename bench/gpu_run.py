# SPDX-License-Identifier: Apache-2.0
"""Run the benches of a GPU and write one JSON: the machine, limits, rows, goals, earlier steps.

``python bench/gpu_run.py --json OUT`` runs all of them, with ``--only`` some. OUT is written after
each bench. If OUT exists, it keeps the rows of the benches that do not run again: so
``bench/gpu_lease.sh`` runs each bench in a process of its own. ``--page`` writes a stored result
into ``docs/gpu.md``. Exit code 2: no GPU here.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_attention
import gpu_hosts
import gpu_limits
import gpu_moves
from gpu_result import check, result
from gpu_timing import library
from harness import Row, show
from run import DOCS, table, write_between

BENCHES = {
    "limits": gpu_limits,
    "moves": gpu_moves,
    "hosts": gpu_hosts,
    "attention": gpu_attention,
}
EXAMPLE = Path(__file__).resolve().parent.parent / "tests" / "packaging" / "gpu_result.json"


def why_no_gpu() -> str:
    """Return why no GPU can be used, "" where one can."""
    try:
        from kvcore.cuda import why_unavailable
    except ImportError as error:
        return str(error)
    return str(why_unavailable())


def facts() -> dict[str, Any]:
    """Describe the GPU and the versions that the numbers belong to."""
    cp = library()
    found = cp.cuda.runtime.getDeviceProperties(0)
    return {
        "device": found["name"].decode(),
        "compute_capability": f"{found['major']}.{found['minor']}",
        "memory_bytes": int(found["totalGlobalMem"]),
        "driver": int(cp.cuda.runtime.driverGetVersion()),
        "runtime": int(cp.cuda.runtime.runtimeGetVersion()),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "cupy": cp.__version__,
        "kvcore": metadata.version("kvcore"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def read_steps(path: Path | None) -> list[dict[str, Any]]:
    """Read what the script noted of its steps: name, exit code, seconds, last line."""
    if path is None:
        return []
    rows = [line.split("\t", 3) for line in path.read_text().splitlines()]
    return [
        {"name": name, "exit_code": int(code), "seconds": float(seconds), "summary": summary}
        for name, code, seconds, summary in rows
    ]


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Run the benches on a stream of their own; yield the rows of each."""
    cp = library()
    with cp.cuda.Stream(non_blocking=True):
        for name in options.only or BENCHES:
            print(f"== {name}", flush=True)
            found = BENCHES[name].measure(options)
            show(found)
            yield found
            cp.get_default_memory_pool().free_all_blocks()


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Return the rows of a stored result, limits first."""
    known = {field.name for field in fields(Row)}
    return [
        Row(**{key: value for key, value in row.items() if key in known})
        for row in (*found["limits"], *found["rows"])
    ]


def stored_rows(path: Path, device: str) -> list[Row]:
    """Return the rows that a result has already.

    Raises
    ------
    ValueError
        The result of another GPU.
    """
    if not path.is_file():
        return []
    found = json.loads(path.read_text())
    check(found)
    if found["machine"]["device"] != device:
        raise ValueError(
            f"{path} has rows of {found['machine']['device']}, this GPU is {device}; pass another "
            f"path"
        )
    return rows_of(found)


def with_new_rows(rows: list[Row], new: list[Row]) -> list[Row]:
    """Return rows of which those with a key in `new` are replaced."""
    keys = {row.key for row in new}
    return [*(row for row in rows if row.key not in keys), *new]


def write_result(path: Path, found: dict[str, Any]) -> None:
    """Write a result in the place of the one before."""
    check(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(found, indent=1) + "\n")
    half.replace(path)


def write_page(found: dict[str, Any]) -> None:
    """Write a stored result into the page on GPUs."""
    check(found)
    machine = found["machine"]
    facts = (
        f"{machine['device']}, driver {machine['driver']}, cupy {machine['cupy']}, "
        f"Python {machine['python']}, kvcore {machine['kvcore']}, {machine['date'][:10]}; "
        f"microseconds."
    )
    write_between(DOCS / "gpu.md", "gpu", f"{facts}\n\n{table(rows_of(found))}")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--steps", type=Path, help="what the script noted of its steps")
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), help="benches to run")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument(
        "--page", action="store_true", help="run none; write what --json holds into docs/gpu.md"
    )
    parser.add_argument("--dry-run", action="store_true", help="check what needs no GPU, and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the tables, write the result."""
    options = options_of(arguments)
    if options.dry_run:
        check(json.loads(EXAMPLE.read_text()))
        read_steps(options.steps)
        print("ready: the modules are there, and the stored example is a result")
        return 0
    if options.page:
        write_page(json.loads(options.json.read_text()))
        return 0
    reason = why_no_gpu()
    if reason:
        print(f"no GPU: {reason}", file=sys.stderr)
        return 2
    machine = facts()
    rows = stored_rows(options.json, machine["device"])
    found = result(machine, read_steps(options.steps), rows)
    for new in measure(options):
        rows = with_new_rows(rows, new)
        found = result(machine, read_steps(options.steps), rows)
        write_result(options.json, found)
    missed = [each for each in found["goals"] if not each["met"]]
    for each in missed:
        print(f"missed: {each['key']} {each['goal']}")
    print(f"{len(found['goals']) - len(missed)} of {len(found['goals'])} goals met; {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
