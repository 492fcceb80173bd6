# SPDX-License-Identifier: Apache-2.0
"""After a million requests, memory and free pages are back at their start values."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import kvcore
from builders import make_manager

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

CYCLES = 1_000_000
WARM_UP = 200_000


def resident_kib() -> int:
    """Return this process's resident memory in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.slow
def test_a_million_requests_leave_nothing_behind() -> None:
    """Prompts have a common head and new tails; the pool is always full of cached pages."""
    manager = make_manager(4, 512, enable_runtime_checks=False)
    tokens = np.zeros(12, np.int32)
    resident = 0
    for n in range(CYCLES):
        if n == WARM_UP:
            gc.collect()
            resident = resident_kib()
        tokens[5:] = n % 7919, n % 104_729, n, 3, n % 3, 4, 5
        context = kvcore.TextGenerationContext(n % 1000, tokens)
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
        context.update(1)
        manager.step([context])
        manager.release(context.request_id)
    gc.collect()
    manager.check_integrity()
    assert manager.num_free_blocks == 512
    assert manager.metrics.evicted_pages > CYCLES
    assert manager.metrics.peak_used_pages <= 4
    grown = resident_kib() - resident
    assert grown < 2048, f"{grown} KiB more after {CYCLES - WARM_UP} cycles"
    manager.reset_prefix_cache()
    manager.check_integrity()


def test_a_running_batch_leaves_nothing_behind() -> None:
    """Fetch and step over and over while requests are replaced one by one."""
    manager = make_manager(4, 4096, enable_runtime_checks=False, max_seq_len=512)
    batch: list[kvcore.TextGenerationContext] = []
    resident = 0
    for n in range(30_000):
        if n == 10_000:
            gc.collect()
            resident = resident_kib()
        if len(batch) == 32:
            manager.release(batch.pop(0 if n % 2 else n % 32).request_id)
        batch.append(kvcore.TextGenerationContext(n, [n % 17, n % 13, n % 11, n % 7, n]))
        manager.external_claim(n)
        manager.fetch(batch)
        kvcore.update_batch(batch, np.full(len(batch), n % 5, np.int32))
        manager.step(batch)
    for context in batch:
        manager.release(context.request_id)
    gc.collect()
    manager.check_integrity()
    assert manager.num_free_blocks == 4096
    grown = resident_kib() - resident
    assert grown < 2048, f"{grown} KiB more after 20000 steps"
