# SPDX-License-Identifier: Apache-2.0
"""Short ways to a manager with a host tier, and prompts that crowd each other out."""

from __future__ import annotations

from typing import Any

from builders import claimed, make_manager, with_host
from written_pool import WrittenPool


def tiered(num_pages: int = 8, host_pages: int = 32, *, page_size: int = 4, **rest: Any) -> Any:
    """A manager with a pool, a tier below it, and what runs batches on it."""
    params = with_host(page_size, host_pages, **rest.pop("params", {}))
    settings: dict[str, Any] = {"blocks": "allocate"}
    manager = make_manager(page_size, num_pages, params=params, **(settings | rest))
    return manager, WrittenPool(manager)


def serve(manager: Any, pool: WrittenPool, tokens: Any, **rest: Any) -> int:
    """Run a prompt and let it go; answers the tokens it had not to run."""
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
