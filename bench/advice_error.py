# SPDX-License-Identifier: Apache-2.0
"""Measure the errors of ``advice`` in several samples of one trace.

The hash of a page includes its namespace, so each namespace has another sample of the same pages.
The command replays the trace once for each namespace, and once exactly for each size. It prints the
root mean square and the largest error of each size, in percentage points of the token hit rate.
"""

from __future__ import annotations

import argparse

import numpy as np

from kvcore import CacheOptions, KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.replay import PoolSettings, Workload, read_trace, replay_admission


def advised(workload: Workload, page_size: int, pages: int, sample: int, salt: str) -> list[float]:
    """Return the token hit rates that a manager estimates after the trace."""
    params = KVCacheParams("int8", 1, 1, 1, page_size=page_size, enable_prefix_caching=True)
    longest = int(workload.prompt_lengths.max())
    cache = CacheOptions(advice=sample)
    mgr = PagedKVCacheManager(params, 1, longest + 1, num_pages=pages, blocks=None, cache=cache)
    for i in range(len(workload)):
        ctx = TextGenerationContext(i, workload.prompt(i), cache_salt=salt)
        mgr.claim(i)
        mgr.reserve(ctx)
        mgr.take_copies()
        ctx.update(0)
        mgr.step([ctx])
        mgr.release(i)
    return [row.hit_rate for row in mgr.advice().rows]


def main() -> None:
    """Print the errors of each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--advice-sample", type=int, default=64)
    parser.add_argument("--samples", type=int, default=12)
    given = parser.parse_args()
    workload = read_trace(given.trace)
    sizes = [round(given.pages * factor) for factor in (0.5, 1, 2, 4)]
    pools = [PoolSettings(page_size=given.page_size, pages=n) for n in sizes]
    exact = [replay_admission(workload, pool).token_hit_rate for pool in pools]
    found = [
        advised(workload, given.page_size, given.pages, given.advice_sample, f"sample {i}")
        for i in range(given.samples)
    ]
    errors = 100 * (np.array(found) - exact)
    for n, rate, each in zip(sizes, exact, errors.T, strict=True):
        square, most = np.sqrt(np.mean(each**2)), np.abs(each).max()
        print(f"{n:>9,} pages: exact {rate:.2%}, error {square:.2f} points rms, {most:.2f} at most")


if __name__ == "__main__":
    main()
