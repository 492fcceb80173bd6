# SPDX-License-Identifier: Apache-2.0
"""Measure the bytes of metadata per cached token.

Each case runs in a fresh process. It reads malloc's own count (``mallinfo2``) before the
manager is built, and again after cached prompts fill a pool of exactly the right size and
no context is left. The note of a row has the resident memory. Each distinct prompt is one
tree node. The budget is 4.25 B per token, 96 B per node and 8 B per page.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import kvcore
from harness import Row, main, plain_row
from workload import PAGE, Context, Tokens, manager, prompts

_BYTES_PER_TOKEN = 4.25
_BYTES_PER_NODE = 96
_BYTES_PER_PAGE = 8


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _allocated() -> int:
    """Return the bytes that malloc has allocated, with mapped blocks."""
    query = ctypes.CDLL(None).mallinfo2
    query.restype = _Mallinfo
    gc.collect()
    info = query()
    return int(info.uordblks) + int(info.hblkhd)


def _resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def budget(tokens: int, nodes: int) -> float:
    """Return the goal for ``tokens`` cached tokens in ``nodes`` runs, bytes per token."""
    pages = tokens // PAGE
    total = _BYTES_PER_TOKEN * tokens + _BYTES_PER_NODE * nodes + _BYTES_PER_PAGE * pages
    return total / tokens


def _cache_one(mgr: kvcore.PagedKVCacheManager, name: str, row: Tokens, grown: int) -> None:
    """Cache one sequence; its last ``grown`` tokens are added one by one."""
    context = Context(name, row[: len(row) - grown])
    batch = [context]
    mgr.claim(name)
    for token in [*row[len(row) - grown :].tolist(), 0]:
        mgr.fetch(batch)
        context.update(token)
        mgr.step(batch)
    mgr.release(name)


def _measure_here(length: int, grown: int, total: int, bundles: int) -> dict[str, float]:
    """Fill a pool with prompts of ``length`` tokens; return bytes per token and bundle."""
    count = total // length
    for row in prompts(1, length, 99):  # allocations that a process makes once
        _cache_one(manager(bundles * length // PAGE, bundles=bundles), "first", row, grown)
    resident, allocated = _resident(), _allocated()
    mgr = manager(bundles * count * length // PAGE, bundles=bundles)
    share = max(1, (1 << 20) // length)
    for i, start in enumerate(range(0, count, share)):
        rows = prompts(min(share, count - start), length, 100 + i)
        for j, row in enumerate(rows):
            _cache_one(mgr, f"{i}-{j}", row, grown)
        del rows, row
    allocated, resident = _allocated() - allocated, _resident() - resident
    assert mgr.metrics.evicted_pages == 0
    assert mgr.metrics.copied_tokens == mgr.metrics.cache_tokens
    tokens = count * length * bundles
    return {"allocated": allocated / tokens, "resident": resident / tokens}


def _measured(*case: int) -> dict[str, float]:
    """Run ``_measure_here`` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", *map(str, case)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(answer)
    return found


def _case(length: int, grown: int, total: int) -> Row:
    """Measure one case in a fresh process."""
    found = _measured(length, grown, total, 1)
    how = f", {grown} of them generated" if grown else ""
    return plain_row(
        f"memory.{length}{'.grown' if grown else ''}",
        f"metadata per cached token, {length:,} tokens{how}",
        found["allocated"],
        "B",
        n=total // length,
        limit=budget(length, 1),
        limit_name="budget",
        note=f"resident {found['resident']:.2f} B",
    )


def _bundles(bundles: int, total: int) -> Row:
    """Measure sliding-window layers with all their pages cached."""
    found = _measured(2048, 0, total, bundles)
    return plain_row(
        f"memory.bundles.{bundles}",
        f"metadata per cached token and bundle, {bundles} bundles, 2,048 tokens",
        found["allocated"],
        "B",
        n=total // 2048,
        note=f"resident {found['resident']:.2f} B",
    )


def measure(options: Namespace) -> list[Row]:
    """Measure prompts of 256 tokens and more, generated tokens, and several bundles."""
    total = 1 << (20 if options.quick else 26)
    rows = [_case(length, 0, total) for length in (256, 1024, 8192, 32_768)]
    grown = _case(512, 256, total // 16)
    return [*rows, grown, *(_bundles(n, total // 16) for n in (2, 4))]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(_measure_here(*map(int, sys.argv[2:6]))))
        raise SystemExit(0)
    raise SystemExit(main(measure, __doc__))
