# SPDX-License-Identifier: Apache-2.0
"""Threads share one manager with a host tier; each request reads its own values."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

import kvcore
from builders import make_manager, with_host
from grouped_traffic import WRITE_POLICIES
from together import run_together, switch_often
from written_pool import WrittenPool

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

__all__ = ["switch_often"]

pytestmark = pytest.mark.usefixtures("switch_often")


def serve(manager: Any, number: int, rounds: int, replicas: int) -> None:
    """Run prompts that all threads share; the number of refusals depends on the threads' order."""
    draw, pool = random.Random(number), WrittenPool(manager)
    for n in range(rounds):
        prompt = [draw.randrange(6)] * draw.randint(1, 24) + [7] * draw.randint(1, 4)
        context = kvcore.TextGenerationContext((number, n), prompt)
        manager.external_claim(context.request_id, replica_idx=draw.randrange(replicas))
        with contextlib.suppress(kvcore.InsufficientBlocksError):
            for _ in range(draw.randint(1, 3)):
                pool.run([context], draw.randrange(2))
        manager.release(context.request_id)
        if n % 40 == number:
            manager.reset_prefix_cache()
            manager.check_integrity()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize(("replicas", "host_pages"), [(1, 200), (2, 20)])
def test_threads_store_and_load_each_others_pages(
    replicas: int, host_pages: int, policy: str
) -> None:
    manager = make_manager(
        4,
        24,
        replicas=replicas,
        params=with_host(4, host_pages),
        blocks="allocate",
        enable_runtime_checks=False,
        write_policy=policy,
    )
    run_together(lambda number: serve(manager, number, 120, replicas))
    manager.check_integrity()
    metrics = manager.metrics
    assert min(metrics.h2d_blocks_copied, metrics.d2h_blocks_copied) > 10, metrics
    assert manager.num_free_blocks == 24 * replicas
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0, "a host page has no holder"
