# SPDX-License-Identifier: Apache-2.0
"""The fields of the result of a run on a GPU: the JSON of ``bench/gpu_run.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from goals import goals_of
from harness import Row

#: The fields of each part, with the types of their values.
FACTS = {
    "device": str,
    "compute_capability": str,
    "memory_bytes": int,
    "driver": int,
    "runtime": int,
    "python": str,
    "numpy": str,
    "cupy": str,
    "kvcore": str,
    "date": str,
}
STEP = {"name": str, "exit_code": int, "seconds": float, "summary": str}
ROW = {"key": str, "work": str, "n": int, "median": float, "min": float, "unit": str}
GOAL = {"key": str, "goal": str, "met": bool}


def result(facts: Mapping[str, Any], steps: list[Any], rows: list[Row]) -> dict[str, Any]:
    """Build a result: the rows, each with its share of its limit, and their goals."""
    limits = [row for row in rows if row.key.startswith("gpu.limit.")]
    return {
        "machine": dict(facts),
        "steps": steps,
        "limits": [asdict(row) for row in limits],
        "rows": [asdict(row) | {"share": _share(row)} for row in rows if row not in limits],
        "goals": [
            {"key": row.key, "goal": goal.text(row), "met": goal.is_met(row)}
            for row in rows
            for goal in goals_of(row)
        ],
    }


def _share(row: Row) -> float | None:
    return round(row.limit / row.median, 4) if row.limit and row.median else None


def check(found: Mapping[str, Any]) -> None:
    """Raise ValueError if a part of a result is missing, or a value has another type."""
    _check_values("machine", found.get("machine"), FACTS)
    for name, kinds in (("steps", STEP), ("limits", ROW), ("rows", ROW), ("goals", GOAL)):
        part = found.get(name)
        if not isinstance(part, list):
            raise ValueError(f"{name} is a {type(part).__name__}, must be a list")
        for i, entry in enumerate(part):
            _check_values(f"{name}[{i}]", entry, kinds)


def _check_values(name: str, found: Any, kinds: Mapping[str, type]) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is a {type(found).__name__}, must be an object")
    for key, kind in kinds.items():
        allowed = (int, float) if kind is float else (kind,)
        if not isinstance(found.get(key), allowed):
            raise ValueError(f"{name}.{key} is {found.get(key)!r}, must be a {kind.__name__}")
