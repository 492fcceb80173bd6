# SPDX-License-Identifier: Apache-2.0
"""Measure what ``CacheOptions(explain=True)`` adds to an admission.

``option_cost.py`` states how an admission is measured. Traffic: unseen prompts in a full pool, and
sessions that share a system prompt, grow turn by turn, and return after a part of their pages was
evicted.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from harness import Row, main
from option_cost import Managers, cost_rows, fill, sessions, unseen
from workload import Tokens, manager

_FILLED = 330_000  # pages: more than the record of evicted pages has room for


def _rows(key: str, name: str, pages: int, length: int, work: Iterator[list[Tokens]]) -> list[Row]:
    managers = Managers(manager(pages), manager(pages, explain=True))
    fill(managers, length, _FILLED)
    return cost_rows(
        f"explain.{key}", f"admit {name}, {pages:,} pages", "explain=True", managers, work
    )


def measure(options: Namespace) -> list[Row]:
    """Measure unseen prompts of three lengths and pool sizes, and sessions."""
    share = 1 if options.quick else 8
    return [
        *_rows("64", "unseen 64 tokens", 65_536, 64, unseen(64, 4_000 * share)),
        *_rows("128", "unseen 128 tokens", 8_000, 128, unseen(128, 4_000 * share)),
        *_rows("2048", "unseen 2,048 tokens", 65_536, 2048, unseen(2048, 1_000 * share)),
        *_rows("sessions", "turns of sessions", 8_000, 256, sessions(2_000 * share)),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
