# SPDX-License-Identifier: Apache-2.0
"""Run the benches of a GPU and write one JSON: the machine, limits, rows, goals, earlier steps.

``python bench/gpu_run.py --json OUT`` runs all benches, or the benches that ``--only`` names. It
writes OUT after each bench. If OUT exists, it keeps the rows of the other benches: this lets
``bench/gpu_lease.sh`` run each bench in its own process. ``--page`` writes a stored result into
``docs/gpu.md``. Exit code 2: this machine has no GPU.
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
    """Return the reason why no GPU is available, or "" if a GPU is available."""
    try:
        from kvcore.cuda import why_unavailable
    except ImportError as error:
        return str(error)
    return str(why_unavailable())


def facts() -> dict[str, Any]:
    """Return the GPU and the versions for which the numbers are valid."""
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
    """Read the steps of gpu_lease.sh: name, exit code, seconds, last line."""
    if path is None:
        return []
    rows = [line.split("\t", 3) for line in path.read_text().splitlines()]
    return [
        {"name": name, "exit_code": int(code), "seconds": float(seconds), "summary": summary}
        for name, code, seconds, summary in rows
    ]


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Run the benches on a new stream; yield the rows of each bench."""
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
    """Return the rows of an existing result; no rows if there is no result.

    Raises
    ------
    ValueError
        The result is from another GPU.
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
    """Return the rows, where the rows of `new` replace the rows with the same key."""
    keys = {row.key for row in new}
    return [*(row for row in rows if row.key not in keys), *new]


def write_result(path: Path, found: dict[str, Any]) -> None:
    """Replace the result in a file."""
    check(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(found, indent=1) + "\n")
    half.replace(path)


def write_page(found: dict[str, Any]) -> None:
    """Write a stored result into docs/gpu.md."""
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
    parser.add_argument("--json", type=Path, required=True, help="file of the result")
    parser.add_argument("--steps", type=Path, help="file with the steps of gpu_lease.sh")
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), help="benches to run")
    parser.add_argument("--quick", action="store_true", help="few rounds, as a test of the benches")
    parser.add_argument(
        "--page", action="store_true", help="only write the result in --json into docs/gpu.md"
    )
    parser.add_argument("--dry-run", action="store_true", help="only run checks without a GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benches, print the tables, write the result."""
    options = options_of(arguments)
    if options.dry_run:
        check(json.loads(EXAMPLE.read_text()))
        read_steps(options.steps)
        print("ready: all modules import, and the stored example is a valid result")
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
