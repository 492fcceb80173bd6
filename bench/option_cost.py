# SPDX-License-Identifier: Apache-2.0
"""Measure what an option of a manager adds to an admission.

An admission is claim, reserve, fetch, the context's ``update``, step and release. Two managers,
with and without the option, run the same requests in turn, part by part, so that other work of the
machine slows both. A ratio divides the times of parts that few others are faster than: the tenth
percentile of the parts with the option by the tenth percentile without.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

import kvcore
from harness import Row, make_row, percentile, plain_row, time_loop, undisturbed
from workload import PAGE, Tokens, admissions, admit, batches, prompts

_SYSTEM = 512
_SESSIONS = 120


class Managers(NamedTuple):
    """A manager without the option, and a manager with it."""

    off: kvcore.PagedKVCacheManager
    on: kvcore.PagedKVCacheManager


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

    def fresh(length: int) -> Tokens:
        return rng.integers(0, 128_256, length, dtype=np.int32)

    system = fresh(_SYSTEM)
    open_sessions = [system] * _SESSIONS
    for _ in range(requests // 50):
        part = []
        for _ in range(50):
            at = draw.randrange(_SESSIONS)
            tokens = np.concatenate([open_sessions[at], fresh(draw.randint(60, 400))])
            open_sessions[at] = system if len(tokens) > 4096 else tokens
            part.append(tokens)
        yield part


def fill(managers: Managers, length: int, pages: int) -> None:
    """Cache unseen prompts of `pages` pages in all."""
    for mgr in managers:
        for rows in batches(prompts(pages * PAGE // length, length, length), (1 << 20) // length):
            admit(mgr, admissions(rows, "fill"))


def cost_rows(
    key: str, name: str, option: str, managers: Managers, work: Iterator[list[Tokens]]
) -> list[Row]:
    """Return the us per admission without and with an option, the ratio, and the added ns."""

    def part(i: int, rows: list[Tokens]) -> list[tuple[float, float]]:
        spent = {}
        for each in ("off", "on") if i % 2 else ("on", "off"):
            items = admissions(rows, f"{each}-{i}")
            spent[each] = time_loop(partial(admit, getattr(managers, each)), items)
        return [(spent["off"], spent["on"])]

    pairs = undisturbed(partial(part, i, rows) for i, rows in enumerate(work))
    off, on = ([pair[i] for pair in pairs] for i in (0, 1))
    least, most = percentile(off, 0.1), percentile(on, 0.1)
    return [
        make_row(f"{key}.off", f"{name}, without {option}", off),
        make_row(f"{key}.on", f"{name}, with {option}", on),
        plain_row(f"{key}.ratio", f"{name}: with / without", most / least, "x", len(pairs)),
        plain_row(f"{key}.added", f"{name}: added", (most - least) * 1e3, "ns", len(pairs)),
    ]
