# SPDX-License-Identifier: Apache-2.0
"""Measure what ``CacheOptions(advice=True)`` adds to an admission, and a call of ``advice``.

``option_cost.py`` states how an admission is measured. Traffic: unseen prompts in a full pool, and
sessions that share a system prompt, grow turn by turn, and return after a part of their pages was
evicted. The call of ``advice`` is measured after the sessions.
"""

from __future__ import annotations

from argparse import Namespace
from time import perf_counter_ns

import kvcore
from harness import Row, main, make_row
from option_cost import Managers, cost_rows, fill, sessions, unseen
from workload import manager

_OPTION = "advice=True"
_CALLS = 20


def _managers(pages: int) -> Managers:
    return Managers(manager(pages), manager(pages, advice=True))


def _unseen(length: int, pages: int, requests: int) -> list[Row]:
    managers = _managers(pages)
    fill(managers, length, pages + 1000)
    name = f"admit unseen {length:,} tokens, {pages:,} pages"
    return cost_rows(f"advice.{length}", name, _OPTION, managers, unseen(length, requests))


def _sessions(pages: int, requests: int) -> list[Row]:
    managers = _managers(pages)
    fill(managers, 256, pages + 1000)
    name = f"admit turns of sessions, {pages:,} pages"
    rows = cost_rows("advice.sessions", name, _OPTION, managers, sessions(requests))
    return [*rows, _call(managers.on)]


def _call(mgr: kvcore.PagedKVCacheManager) -> Row:
    def seconds() -> float:
        started = perf_counter_ns()
        mgr.advice()
        return (perf_counter_ns() - started) / 1e3

    uses = mgr.advice().sampled_uses
    return make_row(
        "advice.call", f"advice of {uses:,} sampled uses", [seconds() for _ in range(_CALLS)]
    )


def measure(options: Namespace) -> list[Row]:
    """Measure unseen prompts of three lengths and pool sizes, sessions, and a call."""
    share = 1 if options.quick else 8
    return [
        *_unseen(64, 65_536, 4_000 * share),
        *_unseen(128, 8_000, 4_000 * share),
        *_unseen(2048, 65_536, 1_000 * share),
        *_sessions(8_000, 2_000 * share),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
