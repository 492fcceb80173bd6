# SPDX-License-Identifier: Apache-2.0
"""Measure the index of the pages that each worker caches.

Each worker has 100,000 pages: the 64 pages of a system prompt that all workers have, and the pages
of its own sessions. Another worker also has a fifth of these sessions. A query has the keys of the
128 pages of a session. The prompts are queried in random order, so no CPU cache holds the entries.
Ingest stores the pages worker by worker, in batches of 64 pages, the size of commits.
"""

from __future__ import annotations

from argparse import Namespace
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from harness import Row, main, make_row, plain_row, time_each
from kvcore.routing import PrefixIndex

_PROMPT = 128
_SYSTEM = 64
_BATCH = 64

Hashes = NDArray[np.uint64]


def _sessions(workers: int, pages: int) -> list[list[Hashes]]:
    """Return the keys of each worker's sessions, without the keys of the system prompt."""
    rng = np.random.default_rng(5)
    each = pages // (_PROMPT - _SYSTEM)
    found = [
        list(rng.integers(0, 1 << 63, (each, _PROMPT - _SYSTEM), np.uint64)) for _ in range(workers)
    ]
    for i, sessions in enumerate(found):  # a fifth of them ran on another worker once
        other = found[(i + 1) % workers]
        sessions[: each // 5] = other[each - each // 5 :]
    return found


def _fill(index: PrefixIndex, system: Hashes, sessions: list[list[Hashes]]) -> list[float]:
    """Store all pages; return the us per page of each worker."""
    spent = []
    for worker, own in enumerate(sessions):
        pages = np.concatenate([system, *own])
        batches = np.split(pages, range(_BATCH, len(pages), _BATCH))
        start = perf_counter_ns()
        for batch in batches:
            index.store(worker, batch)
        spent.append((perf_counter_ns() - start) / 1e3 / len(pages))
    return spent


def _with(workers: int, pages: int, questions: int) -> list[Row]:
    system = np.arange(1, _SYSTEM + 1, dtype=np.uint64) << np.uint64(40)
    sessions = _sessions(workers, pages)
    index = PrefixIndex(range(workers))
    ingest = _fill(index, system, sessions)
    order = np.random.default_rng(6)
    prompts = [
        np.concatenate([system, own[order.integers(len(own))]])
        for own in (sessions[order.integers(workers)] for _ in range(questions))
    ]
    assert int(index.match(prompts[0]).max()) == _PROMPT
    size = f"{workers:,} workers x {pages:,} pages"
    held = sum(index.pages_of(worker) for worker in range(workers))
    return [
        make_row(
            f"routing.match.{workers}", f"{_PROMPT} pages, {size}", time_each(index.match, prompts)
        ),
        make_row(f"routing.ingest.{workers}", f"store, per page, {size}", ingest),
        plain_row(
            f"routing.memory.{workers}",
            f"memory per page and worker, {size}",
            index.num_bytes / held,
            "B",
        ),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure clusters of several sizes."""
    if options.quick:
        return _with(64, 5_000, 500)
    return [
        *_with(8, 100_000, 3_000),
        *_with(64, 100_000, 3_000),
        *_with(4096, 2_000, 3_000),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
