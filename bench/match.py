# SPDX-License-Identifier: Apache-2.0
"""Measure a full prefix hit, hot and cold, by length of the prompt and size of the tree.

``hot`` matches one prompt again and again. ``distinct`` matches every prompt once in
random order, so the tokens of the query and of the tree are cold; only the array objects
are new. In ``shuffled`` the array objects are also cold.
"""

from __future__ import annotations

import statistics
from argparse import Namespace

import numpy as np

import kvcore
from harness import Row, main, make_row, plain_row, repeat_calls, sample_calls
from limits import memcmp_limit
from workload import PAGE, Tokens, cache, manager, prompts

_SAMPLE = 100_000


def _cached(rows: Tokens) -> kvcore.PagedKVCacheManager:
    mgr = manager(rows.size // PAGE + 1024)
    cache(mgr, rows, "cached")
    assert mgr.match_prefix(rows[0]) == rows.shape[1]
    return mgr


def _visits(rows: Tokens, seed: int) -> list[Tokens]:
    """Return views of the prompts in random order, each prompt once."""
    order = np.random.default_rng(seed).permutation(len(rows))[:_SAMPLE]
    return [rows[i] for i in order]


def _distinct(mgr: kvcore.PagedKVCacheManager, visits: list[Tokens]) -> list[float]:
    return sample_calls(mgr.match_prefix, visits, max(20, min(500, len(visits) // 20)))


def by_length() -> list[Row]:
    """Measure one hot prompt of each length."""
    rows = []
    for tokens in (64, 256, 8192, 32_768, 131_072):
        mgr = _cached(prompts(4, tokens, tokens))
        query = prompts(4, tokens, tokens)[2]
        limit = memcmp_limit(tokens)
        samples = repeat_calls(mgr.match_prefix, query, tokens)
        limit = min(limit, memcmp_limit(tokens))
        name = f"match, full hit, {tokens:,} tokens"
        more = {"limit": limit, "limit_name": "memcmp"}
        rows.append(make_row(f"match.hot.{tokens}", name, samples, **more))
    return rows


def _tree(count: int, tokens: int) -> tuple[list[float], list[float], list[float]]:
    """Measure distinct, hot and shuffled matches among ``count`` cached prompts."""
    rows = prompts(count, tokens, 77)
    mgr = _cached(rows)
    distinct = _distinct(mgr, _visits(rows, 1))
    hot = repeat_calls(mgr.match_prefix, rows[count // 2].copy(), tokens)
    objects = [row.copy() for row in rows[:_SAMPLE]]
    order = np.random.default_rng(2).permutation(len(objects))
    shuffled = _distinct(mgr, [objects[i] for i in order])
    return distinct, hot, shuffled


def by_tree(quick: bool) -> list[Row]:
    """Measure 64-token prompts in trees of 1k to 1M prompts, and 2k in 10k."""
    rows: list[Row] = []
    medians: dict[int, float] = {}
    largest = 10_000 if quick else 1_000_000
    for count in [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= largest]:
        distinct, hot, shuffled = _tree(count, 64)
        limit = memcmp_limit(64, prompts=count)
        medians[count] = statistics.median(hot)
        name = f"match 64 in {count:,} prompts"
        cold = {"limit": limit, "limit_name": "cold memcmp"}
        rows.append(make_row(f"match.tree.{count}.distinct", f"{name}, distinct", distinct, **cold))
        rows.append(make_row(f"match.tree.{count}.hot", f"{name}, hot", hot))
        rows.append(make_row(f"match.tree.{count}.shuffled", f"{name}, shuffled", shuffled, **cold))
    ratio = medians[largest] / medians[1_000]
    work = f"match 64 hot: {largest:,} prompts / 1,000 prompts"
    return [*rows, plain_row("match.flat", work, ratio, "x")]


def long_prompts(quick: bool) -> list[Row]:
    """Measure 2k-token prompts among 10k cached ones."""
    count = 1_000 if quick else 10_000
    before = memcmp_limit(2048, prompts=count)
    distinct, hot, shuffled = _tree(count, 2048)
    limit = min(before, memcmp_limit(2048, prompts=count))
    cold = {"limit": limit, "limit_name": "cold memcmp"}
    warm = {"limit": memcmp_limit(2048), "limit_name": "memcmp"}
    name = f"match 2k in {count:,} prompts"
    return [
        make_row("match.2k.distinct", f"{name}, distinct", distinct, **cold),
        make_row("match.2k.hot", f"{name}, hot", hot, **warm),
        make_row("match.2k.shuffled", f"{name}, shuffled", shuffled, **cold),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure every match row."""
    return by_length() + by_tree(options.quick) + long_prompts(options.quick)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
