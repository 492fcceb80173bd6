# SPDX-License-Identifier: Apache-2.0
"""Write a trace of agent sessions for ``kvcore replay``: JSONL, one request a line.

    python bench/agent_sessions.py agents.jsonl
    kvcore replay agents.jsonl --page-size 64 --pages 5000 --policy lru,hinted --hints exact

All sessions share a system prompt, and each session has the tools of its project; there are four
projects. A session grows turn by turn: the agent waits for a tool for seconds, now and then for its
user for minutes, and ends. The same seed writes the same file.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

BLOCK = 64
_SYSTEM, _PROJECT = 40, 60  # blocks
_PROJECTS = 4


def sessions(number: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield the rows of all sessions in the order of their times."""
    draw, ids = random.Random(seed), count()
    system = [next(ids) for _ in range(_SYSTEM)]
    projects = [[next(ids) for _ in range(_PROJECT)] for _ in range(_PROJECTS)]
    rows: list[dict[str, object]] = []
    start = 0.0
    for session in range(number):
        start += draw.expovariate(1 / 20)
        at, blocks = start, [*system, *draw.choice(projects)]
        for _ in range(draw.randint(5, 30)):
            blocks += [next(ids) for _ in range(draw.randint(10, 60))]
            row = {"session_id": f"agent-{session}", "timestamp": round(at * 1000)}
            rows.append(row | {"input_length": len(blocks) * BLOCK, "output_length": 200})
            rows[-1]["hash_ids"] = list(blocks)
            waits_for_user = draw.random() < 0.1
            at += draw.expovariate(1 / 240) if waits_for_user else 4 + draw.expovariate(1 / 12)
    yield from sorted(rows, key=lambda row: row["timestamp"])  # type: ignore[arg-type,return-value]


def main() -> None:
    """Write the trace."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("path", type=Path)
    options.add_argument("--sessions", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    with given.path.open("w", encoding="utf-8") as file:
        for row in sessions(given.sessions, given.seed):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
