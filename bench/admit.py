# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of admitting an unseen prompt to a full, recycled pool.

The time covers claim, reserve, fetch, the context's ``update``, step and release, one
request after the other. ``fresh`` contexts are built just before their use, as a server
builds them from the output of its tokenizer. ``cold`` contexts are built before the pool
is filled, so that no CPU cache holds their tokens. Each context is used once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial

from harness import Row, main, make_row, percentile, sample_parts, time_each_of
from limits import ColdCopies
from workload import PAGE, Admission, admit, fill, fresh_parts, manager, prompts

_BEGIN = 128_000
_KINDS = {
    "fresh": "",
    "cold": ", cold contexts",
    "begin": ", all begin with the same token (1 copied)",
    "plain": ", partial_page_reuse=False",
}


def _in_turns(
    parts: Iterable[list[Admission]], copies: ColdCopies | None
) -> Iterator[list[Admission]]:
    """Yield the parts; after each part, copy the size of a prompt in cold memory."""
    for part in parts:
        yield part
        if copies:
            copies()


def _row(tokens: int, *, pages: int, count: int, kind: str = "fresh") -> Row:
    """Measure one length of prompts; ``kind`` is a key of ``_KINDS``."""
    mgr = manager(pages, partial_page_reuse=kind != "plain")
    begin = _BEGIN if kind == "begin" else None
    rows = prompts(count, tokens, tokens, begin=begin)
    half = count // 2
    loops: Iterable[list[Admission]] = fresh_parts(rows[:half], "loop")
    singles: Iterable[list[Admission]] = fresh_parts(rows[half:], "single")
    if kind == "cold":
        loops, singles = list(loops), list(singles)
    fill(mgr, tokens, seed=1000 + tokens, begin=begin)
    mgr.reset_metrics()
    copies = ColdCopies(tokens) if tokens >= 8192 else None
    samples = sample_parts(partial(admit, mgr), _in_turns(loops, copies))
    single = time_each_of(lambda item: admit(mgr, (item,)), singles)
    found = mgr.metrics
    assert found.evicted_pages == count * (tokens // PAGE), f"{found.evicted_pages} evicted"
    assert found.cache_tokens == found.copied_tokens, "a page was reused; all pages must be unseen"
    expected = range(count, 2 * count) if begin else range(count // 50 + 2)
    assert found.copied_tokens in expected, f"{found.copied_tokens} tokens reused in part"
    return make_row(
        f"admit.{tokens}.{kind}",
        f"admit unseen {tokens:,} tokens, full pool{_KINDS[kind]}",
        samples,
        p99=percentile(single, 0.99),
        limit=copies.limit if copies else None,
        limit_name="cold memcpy",
    )


def measure(options: Namespace) -> list[Row]:
    """Measure prompts of 64 to 128k tokens."""
    small = 16_384 if options.quick else 262_144
    count = 1_000 if options.quick else 20_000
    rows = [_row(64, pages=small, count=count, kind=kind) for kind in _KINDS]
    for kind in ("fresh", "cold", "begin"):
        rows.append(_row(2048, pages=small, count=count // 4, kind=kind))
        rows.append(_row(8192, pages=small, count=count // 10, kind=kind))
    large, many = (65_536, 50) if options.quick else (1 << 20, 300)
    kinds = ("fresh", "cold", "begin")
    return [*rows, *(_row(131_072, pages=large, count=many, kind=k) for k in kinds)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
