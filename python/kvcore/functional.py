# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache as plain arrays: one pool of blocks, one block table, five functions.

There is no manager and no hidden state. The caller keeps the list of free blocks; each function
returns a new cache and leaves its argument as it was or, with ``donate=True``, updates it in place.
"""

from __future__ import annotations

from kvcore.compat.functional import (
    allocate_blocks,
    append_kv,
    gather_kv,
    init_paged_kv_cache,
)
from kvcore.compat.functional_attention import attend_kv
from kvcore.compat.functional_cache import PagedKVCache

__all__ = [
    "PagedKVCache",
    "allocate_blocks",
    "append_kv",
    "attend_kv",
    "gather_kv",
    "init_paged_kv_cache",
]
