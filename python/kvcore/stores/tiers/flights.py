# SPDX-License-Identifier: Apache-2.0
"""Pages on their way into the host tier: who wants one that is, waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event, Lock

__all__ = ["Flights"]


class Flights:
    """Know which pages somebody reads from a store, by replica and key."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, bytes], Event] = {}
        self._lock = Lock()

    def begin(self, replica: int, keys: Iterable[bytes]) -> Event | None:
        """Begin to read pages; or return what is set once some of them have arrived."""
        names = [(replica, key) for key in keys]
        over = Event()
        with self._lock:
            for name in names:
                before = self._under_way.get(name)
                if before is not None:
                    return before
            self._under_way.update(dict.fromkeys(names, over))
        return None

    def end(self, replica: int, keys: Iterable[bytes]) -> None:
        """They have arrived, or will not."""
        with self._lock:
            over = [self._under_way.pop((replica, key)) for key in keys]
        for each in over:
            each.set()
