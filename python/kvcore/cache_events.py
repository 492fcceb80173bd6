# SPDX-License-Identifier: Apache-2.0
"""What a manager tells of its caches to who keeps track of them elsewhere."""

from __future__ import annotations

from kvcore.native.engine import CacheCleared, PagesRemoved, PagesStored, StepEngine, take_events
from kvcore.params import require_count

__all__ = ["CacheCleared", "PagesRemoved", "PagesStored", "TellsEvents", "event_pages"]

#: Pages of which events wait, where the caller does not say how many.
DEFAULT_PAGES = 1 << 16


def event_pages(events: bool | int) -> int:  # noqa: FBT001 - a manager's argument
    """Return of how many pages events may wait; 0 for none.

    Raises
    ------
    ValueError, TypeError
    """
    if isinstance(events, bool):
        return DEFAULT_PAGES if events else 0
    require_count(events=events)
    return events


class TellsEvents(StepEngine):
    """Tell what enters and leaves the caches."""

    _fingerprint: bytes

    @property
    def fingerprint(self) -> bytes:
        """What tells pages of this model apart from those of others, bytes [32].

        The seed of its page keys: ``kvcore.keys.page_keys(tokens, page_size,
        seed=manager.fingerprint)`` are those of events and stores.
        """
        return self._fingerprint

    def take_events(self) -> list[PagesStored | PagesRemoved | CacheCleared]:
        """Return what entered and left the caches since the last call, in that order.

        Returns
        -------
        list
            A PagesStored for the pages that a ``step`` caches of a request, with groups one for
            each group; PagesRemoved for pages that go one after the other; CacheCleared of a
            replica after ``reset_prefix_cache``. Where more pages waited than the manager's
            `events` says, or memory ran out, the list begins with CacheCleared of every replica,
            and all that is cached now.

        Raises
        ------
        ValueError
            The manager was made without ``events=True``.
        KVCacheError
            The manager is closed.
        MemoryError
            The next call begins with CacheCleared.

        Notes
        -----
        O(events), and hashing the tokens of stored pages: keys are made here, without the GIL, and
        not by the calls that cache pages. Others wait for it O(1). Any number of threads may call
        it; each event is one caller's.

        Examples
        --------
        >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
        >>> params = KVCacheParams("float32", 1, 8, 1, page_size=2, enable_prefix_caching=True)
        >>> mgr = PagedKVCacheManager(params, 1, 8, num_pages=8, events=True)
        >>> ctx = TextGenerationContext("r1", [1, 2, 3, 4, 5])
        >>> mgr.external_claim("r1")
        >>> inputs = mgr.fetch([ctx])
        >>> ctx.update(6)
        >>> swaps = mgr.step([ctx])
        >>> mgr.take_events()
        [PagesStored(2 pages, GPU, replica 0)]
        """
        return take_events(self)
