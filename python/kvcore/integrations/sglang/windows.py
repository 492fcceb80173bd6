# SPDX-License-Identifier: Apache-2.0
"""The cache of models all of whose layers have a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache

from kvcore.integrations.sglang.cache import KVCoreRadixCache

__all__ = ["KVCoreWindowCache"]


class KVCoreWindowCache(KVCoreRadixCache):
    """Keep what the window had not left when a request was checkpointed: a prefix of its prompt."""

    supports_swa = PureSWARadixCache.supports_swa
    available_and_evictable_str = PureSWARadixCache.available_and_evictable_str
    swa_evictable_size = KVCoreRadixCache.evictable_size
    swa_protected_size = KVCoreRadixCache.protected_size

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.sliding_window_size = params.sliding_window_size
        self.draft_swa_window = params.draft_swa_window

    def sanity_check(self) -> None:
        """Verify the tree."""
        self.tree.check_integrity()

    def evict(self, params: Any) -> Any:
        """Free so many tokens of windows, which are all there are."""
        wanted = max(params.num_tokens, params.swa_num_tokens)
        return super().evict(replace(params, num_tokens=wanted))
