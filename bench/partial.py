# SPDX-License-Identifier: Apache-2.0
"""Measure a prefix hit that ends inside a page, as almost every hit does.

The time is that of ``reserve`` of 128 unseen tokens in a pool that kvcore owns, with free pages.
The contexts are built and claimed just before. In the first row of a pool, no two prompts share a
token. In the second row all prompts begin with the same token, which kvcore copies from a cached
page in all layers of K and V. The limit of the second row is 1.5 times the first row plus a bare
loop that copies the same pieces of the same pages.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

import kvcore
from harness import Row, main, make_row, percentile, sample_parts, time_each_of
from limits import PieceCopies
from workload import PAGE, Admission, admissions, admit, prompts

_TOKENS = 128
_PAGES = _TOKENS // PAGE
_BEGIN = 1
_POOLS = {  # layers, heads, head_dim, dtype; requests claimed at a time
    "4x2x64.float16": ((4, 2, 64, "float16"), 256),
    "32x8x128.bfloat16": ((32, 8, 128, "bfloat16"), 48),
}


def _manager(pool: str) -> kvcore.PagedKVCacheManager:
    (layers, heads, width, dtype), requests = _POOLS[pool]
    params = kvcore.KVCacheParams(
        dtype, heads, width, layers, page_size=PAGE, enable_prefix_caching=True
    )
    return kvcore.PagedKVCacheManager(
        params,
        max_batch_size=requests + 1,
        max_seq_len=4096,
        num_pages=(requests + 2) * _PAGES,
    )


def _rounds(
    mgr: kvcore.PagedKVCacheManager, requests: int, rounds: int, begin: int | None
) -> Iterator[list[Admission]]:
    """Yield claimed requests; release them before the next requests are built."""
    for i in range(rounds):
        items = admissions(prompts(requests, _TOKENS, 40 + i, begin=begin), f"round-{i}")
        for name, _, _ in items:
            mgr.claim(name)
        yield items
        for name, _, _ in items:
            mgr.release(name)


def _reserve(mgr: kvcore.PagedKVCacheManager, items: Sequence[Admission]) -> None:
    reserve = mgr.reserve
    for _, context, _ in items:
        reserve(context)


def _pair(pool: str, rounds: int) -> list[Row]:
    """Measure a pool, without and with a shared first token."""
    requests = _POOLS[pool][1]
    found: list[Row] = []
    for begin in (None, _BEGIN):
        mgr = _manager(pool)
        admit(mgr, admissions(prompts(1, _TOKENS, 7, begin=_BEGIN), "cached"))
        work = partial(_reserve, mgr)
        mgr.reset_metrics()
        samples = sample_parts(work, _rounds(mgr, requests, rounds, begin))
        singles = time_each_of(lambda item: work([item]), _rounds(mgr, requests, rounds, begin))  # noqa: B023
        expected = 2 * rounds * requests if begin else 0
        assert mgr.metrics.copied_tokens >= expected, f"{mgr.metrics.copied_tokens} copied"
        assert mgr.metrics.evicted_pages == 0, "pages must be free"
        more = {}
        if begin:
            _, (source, *_) = mgr.match_prefix(
                prompts(1, _TOKENS, 7, begin=_BEGIN)[0], return_pages=True
            )
            copies = PieceCopies(mgr._shards[0][0][0], int(source), tokens=1)  # noqa: SLF001
            alone = statistics.median(copies.samples(rounds, requests))
            more = {
                "limit": 1.5 * found[0].median + alone,
                "limit_name": "(1.5 x without + the copy)",
            }
        found.append(
            make_row(
                f"reserve.128.{pool}.{'begin' if begin else 'fresh'}",
                f"reserve 128 unseen tokens, own pool {pool.replace('.', ' ')}"
                + (", after a shared first token (1 copied)" if begin else ""),
                samples,
                p99=percentile(singles, 0.99),
                **more,
            )
        )
    return found


def measure(options: Namespace) -> list[Row]:
    """Measure a small pool and the pool of an 8B model."""
    rounds = 20 if options.quick else 200
    return [row for pool in _POOLS for row in _pair(pool, rounds)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
