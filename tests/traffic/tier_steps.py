# SPDX-License-Identifier: Apache-2.0
"""Builders of a manager with a host tier, and prompts that evict each other."""

from __future__ import annotations

from typing import Any

from builders import claimed, make_manager, with_host
from written_pool import WrittenPool


def tiered(num_pages: int = 8, host_pages: int = 32, *, page_size: int = 4, **rest: Any) -> Any:
    """Return a manager with a host tier, and a pool that runs batches on it."""
    params = with_host(page_size, host_pages, **rest.pop("params", {}))
    settings: dict[str, Any] = {"blocks": "allocate"}
    manager = make_manager(page_size, num_pages, params=params, **(settings | rest))
    return manager, WrittenPool(manager)


def serve(manager: Any, pool: WrittenPool, tokens: Any, **rest: Any) -> int:
    """Run a prompt and release it; return the number of cached tokens."""
    context = claimed(manager, tokens, **rest)
    assert manager.maybe_reserve(context)
    found = context.start_idx
    pool.run([context])
    manager.release(context.request_id)
    return int(found)


def moved(manager: Any) -> tuple[int, int]:
    metrics = manager.metrics
    return metrics.d2h_blocks_copied, metrics.h2d_blocks_copied


A, B, C = range(20), range(100, 130), range(200, 232)
