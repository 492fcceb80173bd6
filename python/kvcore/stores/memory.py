# SPDX-License-Identifier: Apache-2.0
"""Keep pages in a dictionary: the shortest complete store, for tests and as a template."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


def _pages(
    keys: Sequence[bytes], buffers: Sequence[PageBuffers]
) -> list[tuple[bytes, dict[int, memoryview]]]:
    """Read the arguments of a call, without the lock, because a buffer may call the store."""
    return [(key, _parts(each)) for key, each in zip(keys, buffers, strict=True)]


class MemoryStore:
    """Keep the most recently used pages in a dictionary.

    Parameters
    ----------
    capacity_bytes : int
        The most bytes of pages.

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
        self._pages: OrderedDict[bytes, _Parts] = OrderedDict()
        self._closed = False
        self._capacity_bytes = capacity_bytes
        self._used = self._hits = self._misses = self._bytes_in = self._bytes_out = 0
        self._lock = Lock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether it is stored."""
        with self._opened():
            return [key in self._pages for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Copy pages into memory, up to the first page that is not stored."""
        pages, served = _pages(keys, buffers), 0
        with self._opened():
            while served < len(pages) and self._serve(*pages[served]):
                served += 1
            self._hits += served
            self._misses += len(pages) - served
        return FinishedHandle(served)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Copy pages from memory, except pages that are stored with all these parts."""
        pages = _pages(keys, buffers)
        with self._opened():
            for key, parts in pages:
                if not self._has(key, parts):
                    self._forget(key)
                    self._keep(key, parts)
            return FinishedHandle(sum(key in self._pages for key, _ in pages))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; return the number of removed pages."""
        with self._opened():
            return sum(self._forget(key) for key in keys)

    def clear(self) -> int:
        """Remove all pages; return the number of removed pages."""
        with self._opened():
            there, self._pages, self._used = len(self._pages), OrderedDict(), 0
            return there

    def capacity(self) -> StoreCapacity:
        """Return the capacity of the store, and its use."""
        with self._opened():
            return StoreCapacity(self._capacity_bytes, self._used, len(self._pages))

    def health(self) -> StoreHealth:
        """Return the counters."""
        with self._opened():
            counts = (self._hits, self._misses, self._bytes_in, self._bytes_out)
            return StoreHealth("closed", *counts)

    def close(self) -> None:
        """Remove all pages and close the store."""
        with self._lock:
            self._pages, self._used, self._closed = OrderedDict(), 0, True

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise KVCacheError("this store is closed; open another")
            yield

    def _has(self, key: bytes, parts: dict[int, memoryview]) -> bool:
        stored = self._pages.get(key)
        return stored is not None and all(
            part in stored and len(stored[part]) == len(data) for part, data in parts.items()
        )

    def _serve(self, key: bytes, wanted: dict[int, memoryview]) -> bool:
        if not self._has(key, wanted):
            return False
        for part, to in wanted.items():
            to[:] = self._pages[key][part]
            self._bytes_out += len(to)
        self._pages.move_to_end(key)
        return True

    def _keep(self, key: bytes, parts: dict[int, memoryview]) -> None:
        size = sum(map(len, parts.values()))
        if size > self._capacity_bytes:
            return
        while self._used + size > self._capacity_bytes:
            self._forget(next(iter(self._pages)))
        self._pages[key] = {part: bytes(data) for part, data in parts.items()}
        self._used += size
        self._bytes_in += size

    def _forget(self, key: bytes) -> bool:
        parts = self._pages.pop(key, None)
        self._used -= sum(map(len, (parts or {}).values()))
        return parts is not None
