# SPDX-License-Identifier: Apache-2.0
"""Compare the cost of each eviction policy with LRU, as the number of cached leaves grows.

As in evict.py, the time of a request covers claim, reserve of 128 unseen tokens (which evicts 8
pages), the context's ``update``, step and release. The managers of one size run in turn, part by
part, so that other work of the machine slows all managers.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from evict import cycle
from harness import Row, main, make_row, percentile, plain_row, sample_parts
from kvcore.policies import BY_NAME
from workload import PAGE, fill, fresh_parts, manager, prompts

_TOKENS = 128
_PAGES = _TOKENS // PAGE


def _size(leaves: int, calls: int) -> dict[str, Row]:
    managers = {name: manager(leaves * _PAGES, eviction=name) for name in BY_NAME}
    for mgr in managers.values():
        fill(mgr, _TOKENS, seed=leaves)
    before = {name: mgr.metrics.evicted_pages for name, mgr in managers.items()}
    samples: dict[str, list[float]] = {name: [] for name in BY_NAME}
    rounds = 10
    for i in range(rounds):
        rows = prompts(calls // rounds, _TOKENS, leaves + i)
        for name, mgr in managers.items():
            parts = fresh_parts(rows, f"{name}-{i}")
            samples[name] += sample_parts(partial(cycle, mgr), parts)
    found: dict[str, Row] = {}
    for name, mgr in managers.items():
        evicted = mgr.metrics.evicted_pages - before[name]
        assert evicted == calls // rounds * rounds * _PAGES, f"{name}: {evicted} pages evicted"
        found[name] = make_row(
            f"policy.{name}.{leaves}",
            f"claim, reserve 128 evicting 8 pages, step, release; {name}, {leaves:,} leaves",
            samples[name],
            p99=percentile(samples[name], 0.99),
            limit=None if name == "lru" else found["lru"].median,
            limit_name="" if name == "lru" else "lru",
        )
    return found


def measure(options: Namespace) -> list[Row]:
    """Measure every policy by the number of leaves, and the ratio of most leaves to fewest."""
    quick = options.quick
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    found = [_size(n, 2_000 if quick else 20_000) for n in sizes]
    rows = [row for rows in found for row in rows.values()]
    for name in BY_NAME:
        ratio = found[-1][name].median / found[0][name].median
        work = f"the same: {name}, {sizes[-1]:,} / {sizes[0]:,} leaves"
        rows.append(plain_row(f"policy.{name}.flat", work, ratio, "x"))
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
