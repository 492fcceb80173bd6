# SPDX-License-Identifier: Apache-2.0
"""Measure eviction as the number of cached leaves grows.

The time of a request covers claim, reserve of 128 unseen tokens (which evicts 8 pages),
the context's ``update``, step and release; the context is built just before. Further rows
time one reserve of 4096 tokens in a pool full of cached pages. The rows of the smallest
tree and of the reserve are repeated with prompts that all begin with the same token,
which kvcore copies.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import kvcore
from harness import (
    Row,
    main,
    make_row,
    percentile,
    plain_row,
    sample_calls,
    sample_parts,
    time_each,
    time_each_of,
)
from workload import PAGE, Admission, admissions, fill, fresh_parts, manager, prompts

_TOKENS = 128
_PAGES = _TOKENS // PAGE
_CALLS = 20_000
_BEGIN = 128_000


def cycle(mgr: kvcore.PagedKVCacheManager, items: Sequence[Admission]) -> None:
    """Run each request from claim to release, without fetch."""
    claim, reserve, step, release = mgr.claim, mgr.reserve, mgr.step, mgr.release
    for request_id, context, batch in items:
        claim(request_id)
        reserve(context)
        context.update(7)
        step(batch)
        release(request_id)


def _leaves(leaves: int, calls: int, begin: int | None = None) -> Row:
    mgr = manager(leaves * _PAGES)
    rows = prompts(calls, _TOKENS, leaves, begin=begin)
    fill(mgr, _TOKENS, seed=leaves, begin=begin)
    before = mgr.metrics.evicted_pages
    half = calls // 2
    samples = sample_parts(partial(cycle, mgr), fresh_parts(rows[:half], "loop"))
    singles = time_each_of(lambda item: cycle(mgr, (item,)), fresh_parts(rows[half:], "single"))
    evicted = mgr.metrics.evicted_pages - before
    assert evicted == calls * _PAGES, f"{evicted} pages evicted, expected {calls * _PAGES}"
    return make_row(
        f"evict.{leaves}{'.begin' if begin else ''}",
        f"claim, reserve 128 evicting 8 pages, step, release; {leaves:,} leaves{_same(begin)}",
        samples,
        p99=percentile(singles, 0.99),
    )


def _same(begin: int | None) -> str:
    return ", all begin with the same token (1 copied)" if begin else ""


def _reserve_row(filler: int, *, pages: int, rounds: int, begin: int | None = None) -> Row:
    """Time only reserve, in rounds of 32 requests; step and release are not timed."""
    mgr = manager(pages)
    fill(mgr, filler, seed=5, begin=begin)
    samples, singles = [], []
    for i in range(rounds):
        items = admissions(prompts(32, 4096, 900 + i, begin=begin), f"r{i}")
        before = mgr.metrics.evicted_pages
        for request_id, _, _ in items:
            mgr.claim(request_id)
        contexts = [context for _, context, _ in items]
        if i % 2:
            singles += time_each(mgr.reserve, contexts)
        else:
            samples += sample_calls(mgr.reserve, contexts, 32)
        assert mgr.metrics.evicted_pages - before == 32 * 4096 // PAGE
        for request_id, context, batch in items:
            context.update(7)
            mgr.step(batch)
            mgr.release(request_id)
    return make_row(
        f"reserve.4096.{filler}{'.begin' if begin else ''}",
        f"reserve 4096 tokens, pool full of cached {filler}-token prompts{_same(begin)}",
        samples,
        p99=percentile(singles, 0.99),
    )


def measure(options: Namespace) -> list[Row]:
    """Measure requests by the number of leaves, then one large reserve."""
    quick = options.quick
    sizes = (1_000, 20_000) if quick else (1_000, 20_000, 50_000, 200_000)
    rows = [_leaves(n, 2_000 if quick else _CALLS) for n in sizes]
    ratio = rows[-1].median / rows[0].median
    rows.append(
        plain_row("evict.flat", f"the same: {sizes[-1]:,} / {sizes[0]:,} leaves", ratio, "x")
    )
    pages = 65_536 if quick else 524_288
    rounds = 4 if quick else 60
    fillers = (4096, 128)
    rows += [_reserve_row(f, pages=pages, rounds=rounds) for f in fillers]
    rows.append(_leaves(sizes[0], 2_000 if quick else _CALLS, _BEGIN))
    return [*rows, _reserve_row(fillers[0], pages=pages, rounds=rounds, begin=_BEGIN)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
