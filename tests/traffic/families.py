# SPDX-License-Identifier: Apache-2.0
"""Parents and their forks, for tests of fork, truncate and shared_prefixes."""

from __future__ import annotations

from typing import Any

import kvcore
from builders import claimed, make_context, make_manager
from written_pool import WrittenPool

Manager = kvcore.PagedKVCacheManager


def pages_of(manager: Manager, context: Any) -> list[int]:
    return list(manager.get_req_blocks(context.request_id))


def forks(manager: Manager, parent: Any, count: int = 1, **rest: Any) -> list[Any]:
    """Return children of a parent, each with a different next token."""
    ids = parent.tokens[: parent.start_idx].tolist()
    children = [make_context([*ids, 1000 + n], **rest) for n in range(count)]
    manager.fork(parent.request_id, *children)
    return children


def family(
    num_pages: int, prompt: int = 6, count: int = 1, **rest: Any
) -> tuple[Manager, WrittenPool, list[Any]]:
    """Return a parent that has run `prompt` tokens in pages of 4, and its children."""
    manager = make_manager(4, num_pages, **rest)
    pool = WrittenPool(manager)
    parent = claimed(manager, range(prompt))
    pool.run([parent])
    return manager, pool, [parent, *forks(manager, parent, count)]
