# SPDX-License-Identifier: Apache-2.0
"""Prompts that are better computed one after the other than side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvcore.layers.layer_map import column_tokens
from kvcore.paged import PagedKVCacheManager
from kvcore.requests import Request

__all__ = ["is_soon_cached"]


def is_soon_cached(
    manager: PagedKVCacheManager, request: Request, prefills: Iterable[Request]
) -> bool:
    """Tell whether a prompt being computed now will save another one half of its tokens.

    Parameters
    ----------
    manager : PagedKVCacheManager
    request : Request
        One that waits. Where its context is still a callable the answer is False.
    prefills : iterable of Request
        Those whose prompts are being computed, as ``scheduler.prefills``.

    Notes
    -----
    Changes nothing. Costs a match, and comparing the prompt with each of `prefills`.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> from kvcore.scheduler import Request, Scheduler, is_soon_cached
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4, enable_prefix_caching=True)
    >>> manager = PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16)
    >>> scheduler = Scheduler(
    ...     manager, hold=lambda request: is_soon_cached(manager, request, scheduler.prefills)
    ... )
    >>> for name in "ab":
    ...     scheduler.add(Request(TextGenerationContext(name, list(range(9))), 2))
    >>> len(scheduler.next_batch().contexts)  # the other one waits for the same tokens
    1
    """
    context = request.context
    if not manager.params.enable_prefix_caching or callable(context) or not prefills:
        return False
    page_size, tokens, names = column_tokens(manager.params), context.tokens, _names(context)
    known = manager.match_prefix(tokens, *names[:2], extra_keys=names[2])
    for other in prefills:
        seen = other.context.tokens[: len(tokens) - 1]
        if len(seen) < page_size or seen[0] != tokens[0] or _names(other.context) != names:
            continue
        differ = np.flatnonzero(seen != tokens[: len(seen)])
        shared = int(differ[0]) if len(differ) else len(seen)
        shared -= shared % page_size
        if shared > other.context.start_idx and 2 * (shared - known) >= len(tokens) - known:
            return True
    return False


def _names(context: Any) -> tuple[Any, Any, Any]:
    """Return what keeps the prefixes of contexts apart; contexts of other classes may have none."""
    extra_key, cache_salt = (getattr(context, name, None) for name in ("extra_key", "cache_salt"))
    return extra_key, cache_salt, getattr(context, "extra_keys", None)
