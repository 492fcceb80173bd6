# SPDX-License-Identifier: Apache-2.0
"""Write a log that imitates the traffic of agents, to measure the readers and `kvcore replay`.

Sessions begin as a Poisson process. Each session has one of a few system prompts, and each turn
adds a message and an answer, so prompts grow. Ids of blocks are integers in the order in which the
blocks first appear. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from pathlib import Path

BLOCK = 64
_SYSTEMS = 12
_TURNS = 16


def write_log(path: Path, requests: int, seed: int = 0) -> int:
    """Write `requests` rows with block ids of 64 tokens; return the bytes of the file."""
    rng = random.Random(seed)
    next_id = 0

    def blocks(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    systems = [blocks(rng.randint(40, 120)) for _ in range(_SYSTEMS)]
    waiting: list[tuple[float, int, list[int], int]] = []
    begins, serial, written = 0.0, 0, 0
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        while written < requests:
            if not waiting or begins < waiting[0][0]:
                system = systems[min(int(rng.expovariate(0.5)), _SYSTEMS - 1)]
                heapq.heappush(waiting, (begins, serial, list(system), rng.randint(2, 2 * _TURNS)))
                begins += rng.expovariate(1.5)
                serial += 1
                continue
            time, number, prompt, turns = heapq.heappop(waiting)
            prompt += blocks(max(1, int(rng.lognormvariate(1.74, 0.9))))
            length = len(prompt) * BLOCK - rng.randint(0, BLOCK - 1)
            output = max(1, int(rng.lognormvariate(5.0, 1.0)))
            row = {
                "timestamp": round(time * 1e3),
                "input_length": length,
                "output_length": output,
                "hash_ids": prompt,
            }
            file.write(json.dumps(row) + "\n")
            written += 1
            if turns > 1:
                later = time + rng.expovariate(1 / 20) + output / 40
                follow = prompt + blocks(-(-output // BLOCK))
                heapq.heappush(waiting, (later, number, follow, turns - 1))
    return path.stat().st_size


def main() -> None:
    """Write a log to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    size = write_log(given.path, given.requests, given.seed)
    print(f"{given.requests:,} requests, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
