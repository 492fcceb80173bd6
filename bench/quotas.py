# SPDX-License-Identifier: Apache-2.0
"""Compare work with quotas of tenants and the same work without quotas.

The bench times a decode step of 256 requests at 2k tokens, as in decode.py, and requests of 128
unseen tokens that evict, as in evict.py. The requests belong to the tenants in turn. The compared
managers run in turn, part by part, so that other work of the machine slows all managers.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from decode import ROWS, decode_steps, start_batch, step_tokens
from evict import cycle
from harness import Row, main, make_row, percentile, sample_parts
from workload import PAGE, fill, fresh_parts, manager, prompts

_TENANTS = (0, 2, 64)
_CONTEXT = 2048
_PROMPT = 128


def _names(count: int) -> list[str]:
    return [f"tenant-{i}" for i in range(count)]


def _rows(key: str, work: str, samples: dict[int, list[float]]) -> list[Row]:
    """Return a row per number of tenants; the limit is the first row, without quotas."""
    rows: list[Row] = []
    for count, spent in samples.items():
        without = {"limit": rows[0].median, "limit_name": "no quotas"} if rows else {}
        kind = f"quotas of {count} tenants" if count else "no quotas"
        p99 = percentile(spent, 0.99)
        rows.append(make_row(f"quotas.{key}.{count}", f"{work}; {kind}", spent, p99=p99, **without))
    return rows


def decode(steps: int) -> list[Row]:
    """Measure a decode step of 256 requests; 16 requests get a new page in every step."""
    held = ROWS * (_CONTEXT // PAGE + steps // PAGE + 4)
    found = {}
    for count in _TENANTS:
        mgr = manager(held + held // 4, tenants=_names(count))
        fill(mgr, _PROMPT, seed=_CONTEXT)
        batch, _ = start_batch(mgr, _CONTEXT, "start", tenants=_names(count))
        decode_steps(mgr, batch, step_tokens(32, 1))
        found[count] = mgr, batch
    samples: dict[int, list[float]] = {count: [] for count in _TENANTS}
    for i in range(0, steps, 32):
        for count, (mgr, batch) in found.items():
            samples[count] += decode_steps(mgr, batch, step_tokens(32, i))
    return _rows("decode", f"decode step, {ROWS} requests, 2k context", samples)


def evict(leaves: int, calls: int) -> list[Row]:
    """Measure requests with evictions, from claim to release."""
    managers = {}
    for count in _TENANTS:
        managers[count] = manager(leaves * _PROMPT // PAGE, tenants=_names(count))
        fill(managers[count], _PROMPT, seed=leaves)
    samples: dict[int, list[float]] = {count: [] for count in _TENANTS}
    for i in range(10):
        rows = prompts(calls // 10, _PROMPT, leaves + i)
        for count, mgr in managers.items():
            parts = fresh_parts(rows, f"{count}-{i}", tenants=_names(count))
            samples[count] += sample_parts(partial(cycle, mgr), parts)
    work = f"claim, reserve {_PROMPT} evicting 8 pages, step, release; {leaves:,} leaves"
    return _rows("evict", work, samples)


def measure(options: Namespace) -> list[Row]:
    """Measure decode steps and evictions."""
    quick = options.quick
    return [
        *decode(64 if quick else 1_024),
        *evict(1_000 if quick else 10_000, 2_000 if quick else 20_000),
    ]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
