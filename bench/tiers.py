# SPDX-License-Identifier: Apache-2.0
"""Measure stores below the host tier: requests without a hit in the stores, and loads.

The first rows reserve prompts of which the device has the first half. A manager with a disk store,
which has no page of the second half, and a manager without a disk store run in turn. The next row
loads the prompts of 64 requests at once, which are only on disk, with 4 threads. Its limit is raw
reads of the same number of bytes from another file in the same directory, without the page cache of
the system. The last rows measure decode steps of 64 other requests, without loads and while these
loads are in flight. Between two steps the thread sleeps for 2 ms, the time of the model.

``KVCORE_BENCH_DIR`` names a directory on the disk to measure. The default is the system's directory
for temporary files.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter_ns, sleep

import numpy as np

import kvcore
from harness import Row, main, make_row, percentile, plain_row
from limits import DirectFile
from workload import PAGE, Context, Tokens, prompts

_REQUESTS = 64
_PROMPT = 64  # pages of a prompt on disk
_DECODES = 64
_STEPS = 200
_MODEL = 2e-3  # seconds of the model in a step
_MOST_STEPS = 1500
_BLOCK = 4096


def _params(head_dim: int, dtype: str = "bfloat16") -> kvcore.KVCacheParams:
    return kvcore.KVCacheParams(dtype, 8, head_dim, 8, PAGE, enable_prefix_caching=True)


def _us_since(start: int) -> float:
    return (perf_counter_ns() - start) / 1e3


# ---- nothing found -------------------------------------------------------------------------------


def _reserving(mgr: kvcore.PagedKVCacheManager, rows: Tokens, tag: str) -> list[float]:
    """Return the us of ``reserve`` of each prompt."""
    spent = []
    for i, row in enumerate(rows):
        name = f"{tag}-{i}"
        context = Context(name, row)
        mgr.claim(name)
        start = perf_counter_ns()
        assert mgr.reserve(context)
        spent.append(_us_since(start))
        mgr.release(name)
    return spent


def _store_prefix(mgr: kvcore.PagedKVCacheManager, tokens: Tokens) -> None:
    context = Context("prefix", tokens)
    mgr.claim("prefix")
    mgr.fetch([context])
    context.update(1)
    mgr.step([context])
    mgr.release("prefix")


def _small_manager(length: int, *stores: str) -> kvcore.PagedKVCacheManager:
    return kvcore.PagedKVCacheManager(
        _params(16),
        max_batch_size=4,
        max_seq_len=2 * length,
        num_pages=4 * length // PAGE,
        tiers=["host:64MiB", *stores],
    )


def _nothing_found(folder: Path, length: int, rounds: int) -> list[Row]:
    """Reserve prompts: the device has the first half, no tier has the second half."""
    rows = prompts(rounds * 50, length, 5)
    rows[:, : length // 2] = rows[0, : length // 2]
    rows[:, length // 2] = np.arange(len(rows))
    spent: dict[str, list[float]] = {"host": [], "disk": []}
    below = f"disk:{folder / f'nothing.{length}'}:256MiB"
    with _small_manager(length) as host, _small_manager(length, below) as disk:
        for mgr in (host, disk):
            _store_prefix(mgr, rows[0, : length // 2 + 1])
            mgr.flush()
        for i in range(rounds):
            part = rows[i * 50 : (i + 1) * 50]
            for name, mgr in (("host", host), ("disk", disk))[:: 1 if i % 2 else -1]:
                spent[name] += _reserving(mgr, part, f"{name}-{i}")
        assert disk.tier_metrics["disk"].hits == 0
    alone = statistics.median(spent["host"])
    work = f"reserve {length} tokens, half of them a hit, nothing on disk"
    return [
        make_row(
            f"tiers.nothing.{length}",
            work,
            spent["disk"],
            limit=alone,
            limit_name="without disk",
        )
    ]


# ---- loads ---------------------------------------------------------------------------------------


class _OnDisk:
    """Prompts with pages in a disk store, and managers that have these pages only on disk."""

    def __init__(self, folder: Path, head_dim: int) -> None:
        self.params = _params(head_dim)
        self.page_bytes = self.params.bytes_per_page
        self.rows = prompts(_REQUESTS, _PROMPT * PAGE + 1, 7)
        self.bytes = _REQUESTS * _PROMPT * self.page_bytes
        slot = self.page_bytes + _BLOCK
        self._tier = f"disk:{folder / 'pages'}:{_REQUESTS * _PROMPT * slot + (1 << 20)}"
        with self.manager() as mgr:
            blocks = mgr.fetch([])[0].blocks
            blocks[:] = 1  # makes the memory present, as computing a page does
            for i, row in enumerate(self.rows):
                context = Context(i, row)
                mgr.claim(i)
                mgr.fetch([context])
                context.update(1)
                mgr.step([context])
                mgr.release(i)
            assert mgr.flush()

    def manager(self, *, async_onload: bool = False) -> kvcore.PagedKVCacheManager:
        """Build a manager with an empty pool and host tier, with room for all requests."""
        pages = _REQUESTS * (_PROMPT + 2) + _DECODES * (_MOST_STEPS // PAGE + 4)
        host = f"host:{2 * pages * self.page_bytes}"
        return kvcore.PagedKVCacheManager(
            self.params,
            max_batch_size=_REQUESTS + _DECODES,
            max_seq_len=_MOST_STEPS + _PROMPT * PAGE,
            num_pages=pages,
            tiers=kvcore.TierOptions([host, self._tier], async_onload=async_onload),
        )


@contextmanager
def _decoding(mgr: kvcore.PagedKVCacheManager) -> Iterator[list[Context]]:
    """Claim short requests that decode; all requests begin a new page in the same step."""
    batch = []
    for i, row in enumerate(prompts(_DECODES, PAGE, 11)):
        context = Context(f"decode-{i}", row)
        mgr.claim(context.request_id)
        assert mgr.reserve(context)
        batch.append(context)
    mgr.fetch(batch)
    kvcore.update_batch(batch, np.zeros(_DECODES, np.int32))
    mgr.step(batch)
    yield batch
    for context in batch:
        mgr.release(context.request_id)


def _steps(
    mgr: kvcore.PagedKVCacheManager, batch: list[Context], number: Iterator[int]
) -> Iterator[float]:
    """Run decode steps one after the other; yield the us of each step."""
    while True:
        sleep(_MODEL)
        tokens = np.full(_DECODES, next(number), np.int32)
        start = perf_counter_ns()
        mgr.fetch(batch)
        kvcore.update_batch(batch, tokens)
        mgr.step(batch)
        yield _us_since(start)


def _load(on_disk: _OnDisk) -> float:
    """Reserve all prompts, whose pages load together; return the us until they are loaded."""
    with on_disk.manager(async_onload=True) as mgr:
        mgr.fetch([])
        contexts = [Context(i, row) for i, row in enumerate(on_disk.rows)]
        for context in contexts:
            mgr.claim(context.request_id)
        start = perf_counter_ns()
        for context in contexts:
            assert mgr.reserve(context)
        for context in contexts:
            assert mgr.wait(context)
        spent = _us_since(start)
        assert all(context.start_idx == _PROMPT * PAGE for context in contexts)
        for context in contexts:
            mgr.release(context.request_id)
    return spent


def _beside(on_disk: _OnDisk) -> tuple[list[float], list[float]]:
    """Decode without loads, then while all prompts load; return the us of both kinds of steps."""
    with on_disk.manager(async_onload=True) as mgr, _decoding(mgr) as batch:
        steps = _steps(mgr, batch, count())
        for _ in range(20):
            next(steps)
        alone = [next(steps) for _ in range(_STEPS)]
        contexts = [Context(i, row) for i, row in enumerate(on_disk.rows)]
        for context in contexts:
            mgr.claim(context.request_id)
            assert mgr.reserve(context)
        beside: list[float] = []
        while any(context.pending for context in contexts) and len(beside) < _MOST_STEPS // 2:
            beside.append(next(steps))
            mgr.poll()
        for context in contexts:
            mgr.release(context.request_id)
    return alone, beside


def _loads(folder: Path, rounds: int) -> list[Row]:
    on_disk = _OnDisk(folder, 64)
    size = on_disk.page_bytes
    spent, least = [], []
    with closing(DirectFile(folder / "raw", on_disk.bytes, size, 4)) as raw:
        for i in range(rounds):
            for is_limit in (i % 2 == 0, i % 2 == 1):
                if is_limit:
                    start = perf_counter_ns()
                    raw.read(on_disk.bytes)
                    least.append(_us_since(start))
                else:
                    spent.append(_load(on_disk))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        for found, more in zip((alone, beside), _beside(on_disk), strict=True):
            found += more
    work = f"{_REQUESTS} prompts of {_PROMPT} pages of {size >> 10} KiB, from disk to pool"
    limit = {"limit": statistics.median(least), "limit_name": "raw O_DIRECT"}
    ratio = statistics.median(beside) / statistics.median(alone)
    title = f"decode step of {_DECODES} requests while these are read"
    return [
        make_row("tiers.load", work, spent, **limit),
        make_row(
            "tiers.decode",
            title,
            beside,
            p99=percentile(beside, 0.99),
            limit=statistics.median(alone),
            limit_name="without loads",
        ),
        plain_row("tiers.decode.ratio", f"the same: {title} / without loads", ratio, "x"),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure reservations without hits in the store, loads, and decode steps during loads."""
    rounds = 4 if options.quick else 20
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCORE_BENCH_DIR")) as name:
        folder = Path(name)
        rows = _nothing_found(folder, 2048, rounds) + _nothing_found(folder, 64, rounds)
        return rows + _loads(folder, max(3, rounds // 4))


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
