# SPDX-License-Identifier: Apache-2.0
"""Measure what ``CacheOptions(explain=True)`` adds to an admission.

An admission is claim, reserve, fetch, the context's ``update``, step and release. Two managers,
with and without ``explain``, run the same requests in turn, part by part, so that other work of the
machine slows both. A ratio divides the times of parts that few others are faster than: the tenth
percentile of the parts with ``explain`` by the tenth percentile without. Traffic: unseen prompts in
a full pool, and sessions that share a system prompt, grow turn by turn, and return after a part of
their pages was evicted.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np

import kvcore
from harness import Row, main, make_row, percentile, plain_row, time_loop, undisturbed
from workload import PAGE, Tokens, admissions, admit, batches, manager, prompts

Work = Callable[[], Iterator[list[Tokens]]]

_SYSTEM = 512
_SESSIONS = 120


def _managers(pages: int) -> dict[str, kvcore.PagedKVCacheManager]:
    return {"off": manager(pages), "on": manager(pages, explain=True)}


def unseen(length: int, requests: int) -> Iterator[list[Tokens]]:
    """Yield parts of prompts that no manager has seen."""
    size = max(1, min(200, (1 << 16) // length))
    for i in count():
        if i * size >= requests:
            return
        yield list(prompts(size, length, 1000 * length + i))


def sessions(requests: int) -> Iterator[list[Tokens]]:
    """Yield parts of the turns of sessions: a session grows, and ends after 4,096 tokens."""
    rng, draw = np.random.default_rng(7), random.Random(7)

    def fresh(n: int) -> Tokens:
        return rng.integers(0, 128_256, n, dtype=np.int32)

    system = fresh(_SYSTEM)
    open_sessions = [system] * _SESSIONS
    for _ in range(requests // 50):
        part = []
        for _ in range(50):
            at = draw.randrange(_SESSIONS)
            tokens: Tokens = np.concatenate([open_sessions[at], fresh(draw.randint(60, 400))])
            open_sessions[at] = system if len(tokens) > 4096 else tokens
            part.append(tokens)
        yield part


def _pairs(
    managers: dict[str, kvcore.PagedKVCacheManager], work: Work
) -> list[tuple[float, float]]:
    """Return the us per admission of each part, without and with ``explain``."""

    def part(i: int, rows: list[Tokens]) -> list[tuple[float, float]]:
        spent = {}
        order = ("off", "on") if i % 2 else ("on", "off")
        for name in order:
            items = admissions(rows, f"{name}-{i}")
            spent[name] = time_loop(partial(admit, managers[name]), items)
        return [(spent["off"], spent["on"])]

    return undisturbed(partial(part, i, rows) for i, rows in enumerate(work()))


def _fill(managers: dict[str, kvcore.PagedKVCacheManager], length: int, pages: int) -> None:
    """Cache unseen prompts until the pool, and the record of evicted pages, are full."""
    for mgr in managers.values():
        for rows in batches(prompts(pages * PAGE // length, length, length), (1 << 20) // length):
            admit(mgr, admissions(rows, "fill"))


def _rows(key: str, name: str, pages: int, work: Work, filler: int, filled: int) -> list[Row]:
    managers = _managers(pages)
    _fill(managers, filler, filled)
    pairs = _pairs(managers, work)
    off, on = ([pair[i] for pair in pairs] for i in (0, 1))
    least, most = percentile(off, 0.1), percentile(on, 0.1)
    return [
        make_row(f"explain.{key}.off", f"{name}, without explain", off),
        make_row(f"explain.{key}.on", f"{name}, explain=True", on),
        plain_row(f"explain.{key}.ratio", f"{name}: with / without", most / least, "x", len(pairs)),
        plain_row(f"explain.{key}.added", f"{name}: added", (most - least) * 1e3, "ns", len(pairs)),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure unseen prompts of three lengths and pool sizes, and sessions."""
    share = 1 if options.quick else 8
    filled = 330_000  # more than the record has room for
    rows = _rows(
        "64",
        "admit unseen 64 tokens, 65,536 pages",
        65_536,
        partial(unseen, 64, 4_000 * share),
        64,
        filled,
    )
    rows += _rows(
        "128",
        "admit unseen 128 tokens, 8,000 pages",
        8_000,
        partial(unseen, 128, 4_000 * share),
        128,
        filled,
    )
    rows += _rows(
        "2048",
        "admit unseen 2,048 tokens, 65,536 pages",
        65_536,
        partial(unseen, 2048, 1_000 * share),
        2048,
        filled,
    )
    rows += _rows(
        "sessions",
        "admit turns of sessions, 8,000 pages",
        8_000,
        partial(sessions, 2_000 * share),
        256,
        filled,
    )
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
