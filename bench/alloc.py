# SPDX-License-Identifier: Apache-2.0
"""Measure taking 256 pages from the pool and returning them, and building a pool of 1M pages.

In the ``fresh`` rows the free list has its first order. For the ``scrambled`` rows, 1M
pages were released in random order before. A ``ring`` row keeps 1,024 requests at a time
and releases the oldest request. The free list is a stack: without the ring, every reserve
would get the pages that were released last.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Sequence

import kvcore
from harness import Row, main, make_row, sample_loop, time_each
from workload import PAGE, Admission, admissions, manager, prompts

_PAGES = 256
_POOL = 1 << 20
_RING = 1_024


def _cycle(mgr: kvcore.PagedKVCacheManager) -> Callable[[Sequence[Admission]], None]:
    claim, reserve, release = mgr.claim, mgr.reserve, mgr.release

    def body(items: Sequence[Admission]) -> None:
        for request_id, context, _ in items:
            claim(request_id)
            reserve(context)
            release(request_id)

    return body


def _ring(
    mgr: kvcore.PagedKVCacheManager,
) -> Callable[[Sequence[tuple[Admission, str]]], None]:
    claim, reserve, release = mgr.claim, mgr.reserve, mgr.release

    def body(items: Sequence[tuple[Admission, str]]) -> None:
        for (request_id, context, _), oldest in items:
            claim(request_id)
            reserve(context)
            release(oldest)

    return body


def _scramble(mgr: kvcore.PagedKVCacheManager) -> None:
    """Reserve every page in requests of one page each; release the requests in random order."""
    names = [f"one-{i}" for i in range(mgr.total_num_pages)]
    row = prompts(1, PAGE, 1)[0]
    for name in names:
        mgr.claim(name)
        assert mgr.reserve(kvcore.TextGenerationContext(name, row))
    random.Random(4).shuffle(names)
    for name in names:
        mgr.release(name)


def _rows(pool: int, calls: int, *, scrambled: bool) -> list[Row]:
    mgr = manager(pool, requests=pool)
    if scrambled:
        _scramble(mgr)
    kind = "scrambled" if scrambled else "fresh"
    items = admissions(prompts(calls, _PAGES * PAGE, 3), kind)
    body = _cycle(mgr)
    samples = sample_loop(body, items)
    name = f"claim + reserve + release, 256 pages, {kind} free list"
    rows = [make_row(f"alloc.{kind}", name, samples)]
    ring = [request_id for request_id, _, _ in items[:_RING]]
    for request_id, context, _ in items[:_RING]:
        mgr.claim(request_id)
        mgr.reserve(context)
    turns = 4 * len(ring)
    again = [items[i % len(items)] for i in range(_RING, _RING + turns)]
    order = ring + [item[0] for item in again]
    visits = list(zip(again, order, strict=False))
    samples = sample_loop(_ring(mgr), visits, _RING // 8)
    assert mgr.num_free_blocks == pool - _RING * _PAGES
    return [*rows, make_row(f"alloc.{kind}.ring", f"{name}, ring of {_RING:,}", samples)]


def _build(pages: int, repeats: int) -> Row:
    samples = time_each(manager, [pages] * repeats)
    return make_row("alloc.build", f"build a pool of {pages:,} pages", samples)


def measure(options: Namespace) -> list[Row]:
    """Measure the fresh and the scrambled free list, and construction of a pool."""
    pool = 1 << 19 if options.quick else _POOL
    calls = 1_500 if options.quick else 4_000
    fresh = _rows(pool, calls, scrambled=False)
    return fresh + _rows(pool, calls, scrambled=True) + [_build(1_000_000, 20)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
