# SPDX-License-Identifier: Apache-2.0
"""Measure the host tier: moving pages, compared with memcpy, and its bookkeeping.

Pages move between a pool and a host tier of 512 MiB each, scattered on both sides. Each sample
moves 16 MiB, and is followed by memcpy of the same number of bytes. The bookkeeping is measured
with a manager whose mover copies no bytes, in turn with the same manager without a tier.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

import kvcore
from harness import Row, main, make_row, undisturbed
from kvcore.backends.arrays import present_zeros
from kvcore.backends.host import HostMover
from transfer import against, scattered
from workload import PAGE, Context, admissions, admit, prompts

_BYTES = 512 << 20
_STEP = 16 << 20
_ROWS = 256
_GIB = 1 << 30


def _memcpy(memory: list[Any], i: int) -> Callable[[], object]:
    begin = i * _STEP % (_BYTES - _STEP)
    return partial(np.copyto, memory[1][begin : begin + _STEP], memory[0][begin : begin + _STEP])


def _move(page_bytes: int, rounds: int, memory: list[Any], *, is_load: bool) -> Row:
    """Move pages of K and V of 8 layers."""
    pages, count = _BYTES // page_bytes, _STEP // page_bytes
    pool = memory[0].reshape(pages, 2, 8, 1, 1, -1)
    mover = HostMover([[(pool, None)]], pages)
    orders = np.zeros((rounds, count, 4), np.int32)
    orders[:, :, 1] = is_load
    for i in range(rounds):
        orders[i, :, 2], orders[i, :, 3] = (scattered(pages, count, i, seed) for seed in (5, 6))
    every = np.zeros((pages, 4), np.int32)
    every[:, 2] = every[:, 3] = np.arange(pages)
    mover.run(every)  # makes all memory present
    calls = [partial(mover.run, each) for each in orders]
    name, way = ("load", "host to pool") if is_load else ("store", "pool to host")
    work = f"{way}, scattered pages of {page_bytes >> 10} KiB"
    limits = [_memcpy(memory, i) for i in range(rounds)]
    return against(f"swap.{name}.{page_bytes >> 10}", work, calls, limits)


def _manager(pages: int, host_pages: int) -> kvcore.PagedKVCacheManager:
    """Build a manager with tiny pages; its mover copies no bytes."""
    params = kvcore.KVCacheParams("int8", 1, 1, 1, PAGE, enable_prefix_caching=True)
    if host_pages:
        params = kvcore.KVCacheParams(
            "int8", 1, 1, 1, PAGE, enable_prefix_caching=True,
            enable_kvcache_swapping_to_host=True,
            host_kvcache_swap_space_gb=host_pages * params.bytes_per_page / _GIB,
        )  # fmt: skip
    made = kvcore.PagedKVCacheManager(params, _ROWS, 1 << 20, num_pages=pages)
    if host_pages:
        made._mover.run = lambda orders: 0  # type: ignore[union-attr, method-assign] # noqa: SLF001, ARG005
    return made


def _pairs(key: str, work: str, parts: Iterator[tuple[Callable[[], float], ...]]) -> Row:
    """Time the manager with a tier and the manager without a tier in turn."""
    least: list[float] = []

    def part(tiered: Callable[[], float], plain: Callable[[], float]) -> list[float]:
        spent = tiered()
        least.append(plain())
        return [spent]

    samples = undisturbed(partial(part, *pair) for pair in parts)
    return make_row(key, work, samples, limit=float(np.median(least)), limit_name="without a tier")


def _admit_us(mgr: kvcore.PagedKVCacheManager, items: list[Any]) -> float:
    start = perf_counter_ns()
    admit(mgr, items)
    return (perf_counter_ns() - start) / 1e3 / len(items)


def _admits(length: int, rounds: int, *, hits: bool) -> Row:
    """Admit prompts to full pools: unseen prompts, or prompts that are only in the tier."""
    size = 32
    pages = 4 * size * length // PAGE
    pair = [_manager(pages, n) for n in (8 * pages, 0)]
    families = [prompts(size, length, seed) for seed in range(8)]
    for i, rows in enumerate(families):
        for mgr in pair:
            admit(mgr, admissions(rows, f"fill-{i}"))

    def parts() -> Iterator[tuple[Callable[[], float], ...]]:
        for i in range(rounds):
            rows = families[i % 8] if hits else prompts(size, length, 100 + i)
            both = [admissions(rows, f"{i}") for _ in pair]
            yield tuple(partial(_admit_us, *each) for each in zip(pair, both, strict=True))

    row = _pairs(
        f"swap.admit.{length}.{'hit' if hits else 'unseen'}",
        f"admit {length:,} tokens, {'found in the tier' if hits else 'unseen'}, bytes not counted",
        parts(),
    )
    loaded = pair[0].metrics.h2d_blocks_copied
    assert (loaded > 0) == hits, f"{loaded} pages were loaded"
    return row


def _decodes(rounds: int) -> Row:
    """Run decode steps of a batch; in each step, a 16th of the batch fills a page."""
    steps = rounds * 16
    pair = [_manager(_ROWS * (64 + steps // PAGE), n) for n in (2 * _ROWS * (64 + steps), 0)]
    batches = []
    for mgr in pair:
        batch = [Context(f"r{i}", row[: 512 + i % PAGE]) for i, row in
                 enumerate(prompts(_ROWS, 528, 1))]  # fmt: skip
        for context in batch:
            mgr.claim(context.request_id)
        batches.append(batch)
    tokens = np.ones(_ROWS, np.int32)

    def run(mgr: kvcore.PagedKVCacheManager, batch: list[Context]) -> float:
        start = perf_counter_ns()
        for _ in range(PAGE):
            mgr.fetch(batch)
            kvcore.update_batch(batch, tokens)
            mgr.step(batch)
        return (perf_counter_ns() - start) / 1e3 / PAGE

    parts = (tuple(partial(run, *each) for each in zip(pair, batches, strict=True)),) * rounds
    return _pairs(
        "swap.decode", f"decode step, {_ROWS} requests, bytes not counted", iter(parts[:rounds])
    )


def measure(options: Namespace) -> list[Row]:
    """Measure moves in both directions, then the bookkeeping."""
    rounds = 4 if options.quick else 32
    memory = [present_zeros((_BYTES,), np.dtype(np.uint8)) for _ in range(2)]
    rows = [
        _move(page_bytes, rounds, memory, is_load=is_load)
        for page_bytes in (4 << 10, 64 << 10, 2 << 20)
        for is_load in (False, True)
    ]
    rows += [_admits(length, rounds, hits=hits) for length in (256, 2048) for hits in (False, True)]
    return [*rows, _decodes(max(4, rounds // 2))]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
