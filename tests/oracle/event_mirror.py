# SPDX-License-Identifier: Apache-2.0
"""Managers that publish events, and a reader that derives the cached pages from the events only."""

from __future__ import annotations

from typing import Any

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.cache_events import CacheCleared, PagesStored

PARAMS = KVCacheParams("float32", 1, 4, 1, page_size=2, enable_prefix_caching=True)


def manager_of(params: KVCacheParams = PARAMS, **options: Any) -> PagedKVCacheManager:
    fields = {"max_batch_size": 8, "max_seq_len": 64, "num_pages": 32, "events": True}
    return PagedKVCacheManager(params, **in_groups(fields | options))


def run(mgr: PagedKVCacheManager, tokens: list[int], replica: int = 0, **options: Any) -> None:
    """Run a prompt and release it, so its whole pages are cached."""
    context = TextGenerationContext("r", tokens, **options)
    mgr.claim("r", replica)
    mgr.fetch([context])
    context.update(0)
    mgr.step([context])
    mgr.release("r")


def taken(mgr: PagedKVCacheManager) -> list[Any]:
    """Return the events of the kinds that the test reads."""
    return [*mgr.take_events()]


class Mirror:
    """A router's plain sets, built only from events."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, str, int | None], set[bytes]] = {}

    def read(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                for place in [each for each in self.pages if each[0] == event.replica]:
                    del self.pages[place]
                continue
            known = self.pages.setdefault((event.replica, event.medium, event.group_idx), set())
            keys = set(event.keys)
            assert len(keys) == len(event.keys)
            if isinstance(event, PagesStored):
                assert not keys & known
                known |= keys
            else:
                assert keys <= known
                known -= keys

    def of(self, replica: int = 0, medium: str = "GPU", group: int | None = None) -> set[bytes]:
        return self.pages.get((replica, medium, group), set())
