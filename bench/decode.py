# SPDX-License-Identifier: Apache-2.0
"""Measure a decode step of 256 requests at 512, 8k and 32k tokens of context.

The time of a step covers fetch (which reserves), ``update_batch`` and step, and includes
the clock. Lengths are spread over a page, so 16 requests begin a new page in every step.
The pool is full of cached pages, so each new page evicts a cached page. In the rows with
replacement, each step also releases one request and claims an unseen request, of 512
tokens or of the same length, in the same row. The time covers this replacement also.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import cycle
from time import perf_counter_ns

import numpy as np

import kvcore
from harness import Row, main, make_row, percentile, plain_row, undisturbed
from workload import PAGE, Context, Tokens, fill, manager, prompts

ROWS = 256
_PART = 32


def start_batch(
    mgr: kvcore.PagedKVCacheManager, context: int, tag: str, tenants: Sequence[str] = ()
) -> tuple[list[Context], list[Hashable]]:
    """Prefill 256 requests of the tenants in turn; their lengths are spread over one page."""
    rows = prompts(ROWS, context + PAGE, 11)
    batch: list[Context] = []
    names: list[Hashable] = []
    for i, row in enumerate(rows):
        name = f"{tag}-{i}"
        tenant = tenants[i % len(tenants)] if tenants else None
        item = Context(name, row[: context + i % PAGE], tenant=tenant)
        mgr.claim(name)
        assert mgr.reserve(item)
        batch.append(item)
        names.append(name)
    mgr.fetch(batch)
    kvcore.update_batch(batch, rows[:, 0].copy())
    mgr.step(batch)
    return batch, names


def decode_steps(
    mgr: kvcore.PagedKVCacheManager, batch: list[Context], tokens: list[Tokens]
) -> list[float]:
    """Run one step per row of ``tokens``; return the us of each step."""
    fetch, step, update_batch = mgr.fetch, mgr.step, kvcore.update_batch
    inputs = fetch(batch)  # `inputs` holds the last arrays during the next fetch

    def timed(part: list[Tokens]) -> list[float]:
        nonlocal inputs
        spent = []
        for row in part:
            start = perf_counter_ns()
            inputs = fetch(batch)
            update_batch(batch, row)
            step(batch)
            spent.append((perf_counter_ns() - start) / 1e3)
        return spent[1:]

    return _in_parts(timed, tokens)


def _in_parts(timed: Callable[[list[Tokens]], list[float]], tokens: list[Tokens]) -> list[float]:
    """Run the steps in parts; the first step of a part follows a wait and is not counted."""
    parts = [tokens[i : i + _PART] for i in range(0, len(tokens), _PART)]
    return undisturbed(partial(timed, part) for part in parts)


def _replace(
    mgr: kvcore.PagedKVCacheManager,
    batch: list[Context],
    names: list[Hashable],
    fresh: list[Context],
    tokens: list[Tokens],
) -> list[float]:
    """Replace one request per step; return the us of each step."""
    fetch, step, update_batch = mgr.fetch, mgr.step, kvcore.update_batch
    claim, release = mgr.claim, mgr.release
    waiting = iter(fresh)
    holes = cycle(range(0, 37 * ROWS, 37))
    inputs = fetch(batch)

    def timed(part: list[Tokens]) -> list[float]:
        nonlocal inputs
        spent = []
        for row in part:
            item, hole = next(waiting), next(holes) % ROWS
            name, leaving = item.request_id, names[hole]
            start = perf_counter_ns()
            release(leaving)
            claim(name)
            batch[hole] = item
            inputs = fetch(batch)
            update_batch(batch, row)
            step(batch)
            spent.append((perf_counter_ns() - start) / 1e3)
            names[hole] = name
        return spent[1:]

    return _in_parts(timed, tokens)


def step_tokens(steps: int, seed: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 128_256, (steps, ROWS), dtype=np.int32))


def _full_manager(context: int, steps: int) -> kvcore.PagedKVCacheManager:
    """Build a manager; its pool is a quarter larger than needed and full of cached pages."""
    held = ROWS * (context // PAGE + steps // PAGE + 4)
    mgr = manager(held + held // 4)
    fill(mgr, 128, seed=context)
    return mgr


def _title(context: int) -> str:
    size = f"{context // 1024}k" if context >= 1024 else str(context)
    return f"decode step, {ROWS} requests, {size} context"


def _steady(context: int, steps: int) -> Row:
    mgr = _full_manager(context, steps)
    batch, _ = start_batch(mgr, context, "start")
    decode_steps(mgr, batch, step_tokens(32, 1))
    before = mgr.metrics.evicted_pages
    spent = decode_steps(mgr, batch, step_tokens(steps, 2))
    evicted = mgr.metrics.evicted_pages - before
    assert evicted == steps * ROWS // PAGE, f"{evicted} pages evicted"
    p99 = percentile(spent, 0.99)
    return make_row(f"decode.{context}", _title(context), spent, p99=p99)


def _replaced(context: int, length: int, steps: int) -> Row:
    """Decode at ``context``; in each step, replace a request by a prompt of ``length`` tokens."""
    mgr = _full_manager(context, steps)
    batch, names = start_batch(mgr, context, "start")
    fresh = [
        Context(f"fresh-{i}", row) for i, row in enumerate(prompts(steps, length, context + 1))
    ]
    decode_steps(mgr, batch, step_tokens(32, 1))
    before = mgr.metrics.evicted_pages
    spent = _replace(mgr, batch, names, fresh, step_tokens(steps, 3))
    evicted = mgr.metrics.evicted_pages - before
    assert evicted >= steps * length // PAGE, f"{evicted} pages evicted"
    return make_row(
        f"decode.{context}.replace.{length}",
        f"{_title(context)}, one replaced by {length:,} unseen tokens",
        spent,
        p99=percentile(spent, 0.99),
    )


def measure(options: Namespace) -> list[Row]:
    """Measure the context lengths, and the ratio of the longest to the shortest."""
    steps = 64 if options.quick else 1_024
    sizes = (512, 2_048) if options.quick else (512, 8_192, 32_768)
    rows = [_steady(size, steps) for size in sizes]
    ratio = rows[-1].mean / rows[0].mean
    flat = plain_row("decode.flat", f"the same: {sizes[-1]:,} / {sizes[0]:,} context", ratio, "x")
    replaced = [_replaced(size, 512, min(steps, 256)) for size in sizes]
    longer = [_replaced(size, size, min(steps, 256)) for size in sizes[1:]]
    return [*rows, flat, *replaced, *longer]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
