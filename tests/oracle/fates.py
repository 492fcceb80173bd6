# SPDX-License-Identifier: Apache-2.0
"""A slow model of misses: a dict of every prefix that was ever cached, with its fate.

The model reads only which prefixes the manager finds. It compares after every call, so a prefix
that is gone left the cache in the call before.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore import PagedKVCacheManager

Path = tuple[str | None, tuple[int, ...]]


class Fates:
    """The fate of each cached prefix of whole pages: "cached", or the reason why it left."""

    def __init__(self, manager: PagedKVCacheManager, page: int) -> None:
        self._manager = manager
        self._page = page
        self.fates: dict[Path, str] = {}

    def watch(self, salt: str | None, tokens: Sequence[int]) -> None:
        """Record every prefix of `tokens` that is cached now."""
        n = self._cached(salt, tokens)
        for end in range(self._page, n + 1, self._page):
            self.fates[salt, tuple(tokens[:end])] = "cached"

    def _cached(self, salt: str | None, tokens: Sequence[int]) -> int:
        return int(self._manager.match_prefix([*tokens], cache_salt=salt))

    def settle(self, cause: str) -> None:
        """Give prefixes that have left the cache the reason `cause`."""
        for (salt, tokens), fate in [*self.fates.items()]:
            if fate == "cached" and self._cached(salt, tokens) < len(tokens):
                self.fates[salt, tokens] = cause

    def expected(self, salt: str | None, tokens: Sequence[int], cached: int) -> dict[str, int]:
        """The uncached tokens of a prompt by reason; call it before the prompt runs."""
        counts = dict.fromkeys(
            ("never_seen", "evicted", "forgotten", "reset", "other_namespace", "partial_page"), 0
        )
        whole = len(tokens) // self._page
        elsewhere = {
            path for (name, path), fate in self.fates.items() if name != salt and fate == "cached"
        }
        was_seen = True
        for i, _ in enumerate(tokens):
            if i < cached:
                continue
            path = tuple(tokens[: (i // self._page + 1) * self._page])
            fate = self.fates.get((salt, path)) if was_seen else None
            was_seen = fate is not None
            if i // self._page >= whole or (fate == "cached"):
                counts["partial_page"] += 1
                was_seen = True
            elif fate is not None:
                counts[fate] += 1
            elif path in elsewhere:
                counts["other_namespace"] += 1
            else:
                counts["never_seen"] += 1
        return {reason: n for reason, n in counts.items() if n}
