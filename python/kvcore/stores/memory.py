# SPDX-License-Identifier: Apache-2.0
"""Keep pages in a dictionary: the shortest whole store, for tests and to start one's own from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from kvcore.errors import KVCacheError
from kvcore.stores.protocol import (
    FinishedHandle,
    PageBuffers,
    StoreCapacity,
    StoreHandle,
    StoreHealth,
)

__all__ = ["MemoryStore"]

_Parts = dict[int, bytes]


def _parts(buffers: PageBuffers) -> dict[int, memoryview]:
    listed = buffers if isinstance(buffers, (list, tuple)) else [buffers]
    return {i: memoryview(each).cast("B") for i, each in enumerate(listed) if each is not None}


class MemoryStore:
    """Keep the pages used last in a dictionary.

    Parameters
    ----------
    capacity_bytes : int
        Of pages, at most.

    Examples
    --------
    >>> from kvcore.stores import MemoryStore
    >>> store = MemoryStore(1 << 20)
    >>> store.put_from([bytes(32)], [b"a page"]).result()
    1
    >>> page = bytearray(6)
    >>> store.get_into([bytes(32)], [page]).result(), page
    (1, bytearray(b'a page'))
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._pages: OrderedDict[bytes, _Parts] | None = OrderedDict()
        self._capacity_bytes = capacity_bytes
        self._used = self._hits = self._misses = self._bytes_in = self._bytes_out = 0
        self._lock = Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell of each page whether it is stored."""
        with self._lock:
            return [key in self._open for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Copy pages into memory, up to the first that is not there."""
        with self._lock:
            served = 0
            for key, wanted in zip(keys, buffers, strict=True):
                if not self._serve(key, _parts(wanted)):
                    break
                served += 1
            self._hits += served
            self._misses += len(keys) - served
        return FinishedHandle(served)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Copy pages from memory, but those that are stored with all these parts."""
        with self._lock:
            for key, given in zip(keys, buffers, strict=True):
                parts = _parts(given)
                if not parts.keys() <= self._open.get(key, {}).keys():
                    self._forget(key)
                    self._keep(key, {part: bytes(data) for part, data in parts.items()})
            return FinishedHandle(sum(key in self._open for key in keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages; return how many there were."""
        with self._lock:
            return sum(self._forget(key) for key in keys)

    def capacity(self) -> StoreCapacity:
        """Return how much the store holds."""
        with self._lock:
            return StoreCapacity(self._capacity_bytes, self._used, len(self._open))

    def health(self) -> StoreHealth:
        """Return the counters."""
        counts = (self._hits, self._misses, self._bytes_in, self._bytes_out)
        return StoreHealth("closed", *counts)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pages, self._used = None, 0

    @property
    def _open(self) -> OrderedDict[bytes, _Parts]:
        if self._pages is None:
            raise KVCacheError("this store is closed; open another")
        return self._pages

    def _serve(self, key: bytes, wanted: dict[int, memoryview]) -> bool:
        stored = self._open.get(key, {})
        if any(len(stored.get(part, b"")) != len(to) for part, to in wanted.items()):
            return False
        for part, to in wanted.items():
            to[:] = stored[part]
            self._bytes_out += len(to)
        self._open.move_to_end(key)
        return True

    def _keep(self, key: bytes, parts: _Parts) -> None:
        size = sum(map(len, parts.values()))
        while self._open and self._used + size > self._capacity_bytes:
            self._forget(next(iter(self._open)))
        if self._used + size <= self._capacity_bytes:
            self._open[key] = parts
            self._used += size
            self._bytes_in += size

    def _forget(self, key: bytes) -> bool:
        parts = self._open.pop(key, None)
        self._used -= sum(map(len, (parts or {}).values()))
        return parts is not None
