# SPDX-License-Identifier: Apache-2.0
"""Small traces for the tests of the replay: rows, files and random prefix trees."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

BLOCK = 512


def row(
    ids: list[int], *, timestamp: float = 0, length: int | None = None, output: int = 1
) -> dict[str, Any]:
    """Make one row; its prompt fills its blocks unless `length` is given."""
    return {
        "timestamp": timestamp,
        "input_length": len(ids) * BLOCK if length is None else length,
        "output_length": output,
        "hash_ids": ids,
    }


def write_trace(folder: Path, *rows: dict[str, Any] | str) -> Path:
    """Write rows (or raw lines) to a file and return its path."""
    path = folder / "trace.jsonl"
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def random_rows(seed: int, *, requests: int, depth: int, fan_out: int) -> list[dict[str, Any]]:
    """Draw prompts from a random tree of blocks, so that equal ids have equal prefixes."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for at in range(requests):
        steps = [rng.randrange(fan_out) for _ in range(rng.randint(1, depth))]
        paths = [tuple(steps[: n + 1]) for n in range(len(steps))]
        blocks = [ids.setdefault(path, len(ids)) for path in paths]
        length = len(blocks) * BLOCK - rng.choice([0, 0, 1, 200, BLOCK - 1])
        rows.append(row(blocks, timestamp=at * 10, length=length, output=rng.randint(1, 40)))
    return rows
