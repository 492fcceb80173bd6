# SPDX-License-Identifier: Apache-2.0
"""Threads use one manager with a host tier together; each reads what was written for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvcore
from builders import make_manager, with_host
from together import THREADS, run_together, switch_often
from written_pool import WrittenPool

__all__ = ["switch_often"]

pytestmark = pytest.mark.usefixtures("switch_often")


def serve(manager: Any, number: int, rounds: int, replicas: int) -> int:
    """Runs prompts that all threads share; answers how many were refused."""
    draw, pool, refused = random.Random(number), WrittenPool(manager), 0
    for n in range(rounds):
        prompt = [draw.randrange(6)] * draw.randint(1, 24) + [7] * draw.randint(1, 4)
        context = kvcore.TextGenerationContext((number, n), prompt)
        manager.external_claim(context.request_id, replica_idx=draw.randrange(replicas))
        try:
            for _ in range(draw.randint(1, 3)):
                pool.run([context], draw.randrange(2))
        except kvcore.InsufficientBlocksError:
            refused += 1
        manager.release(context.request_id)
        if n % 40 == number:
            manager.reset_prefix_cache()
            manager.check_integrity()
    return refused


@pytest.mark.parametrize(("replicas", "host_pages"), [(1, 200), (2, 20)])
def test_threads_store_and_load_each_others_pages(replicas: int, host_pages: int) -> None:
    manager = make_manager(
        4,
        24,
        replicas=replicas,
        params=with_host(4, host_pages),
        blocks="allocate",
        enable_runtime_checks=False,
    )
    refused = [0] * THREADS

    def work(number: int) -> None:
        refused[number] = serve(manager, number, 120, replicas)

    run_together(work)
    manager.check_integrity()
    metrics = manager.metrics
    assert min(metrics.h2d_blocks_copied, metrics.d2h_blocks_copied) > 10, metrics
    assert sum(refused) < 60 * THREADS
    assert manager.num_free_blocks == 24 * replicas
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0, "a host page is held by nobody"
