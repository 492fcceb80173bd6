# SPDX-License-Identifier: Apache-2.0
"""Prompts that are better computed one after the other than side by side."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcore import PagedKVCacheManager
from kvcore.groups.layers import column_tokens
from kvcore.scheduler import Request

__all__ = ["is_soon_cached"]


def is_soon_cached(
    manager: PagedKVCacheManager, request: Request, prefills: Iterable[Request]
) -> bool:
    """Tell whether a prompt being computed now will save another one half of its tokens.

    Parameters
    ----------
    manager : PagedKVCacheManager
    request : Request
        One that waits.
    prefills : iterable of Request
        Those whose prompts are being computed.
    """
    page_size = column_tokens(manager.params)
    if not manager.params.enable_prefix_caching or not prefills:
        return False
    tokens = request.context.tokens
    known = manager.match_prefix(tokens)
    for other in prefills:
        seen = other.context.tokens[: len(tokens) - 1]
        if len(seen) < page_size or seen[0] != tokens[0]:
            continue
        differ = np.flatnonzero(seen != tokens[: len(seen)])
        shared = int(differ[0]) if len(differ) else len(seen)
        shared -= shared % page_size
        if shared > other.context.start_idx and 2 * (shared - known) >= len(tokens) - known:
            return True
    return False
