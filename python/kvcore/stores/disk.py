# SPDX-License-Identifier: Apache-2.0
"""Keep pages on local disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvcore import _core
from kvcore.stores.protocol import PageBuffers, StoreCapacity, StoreHandle, StoreHealth
from kvcore.stores.specs import DiskTier, parse_tier

__all__ = ["DiskStore"]


class DiskStore:
    """Keep pages in files of fixed slots, also over restarts.

    Each page is read or written by one system call, which bypasses the page cache if the file
    system supports it. Every page that is read is checked: its key, its fingerprint, and a CRC over
    all its bytes. When the quota is used up, the least recently used pages are evicted.

    Parameters
    ----------
    tier : str or DiskTier
        Directories and their quotas in bytes, such as ``"disk:/var/cache/kv:200GiB"``. Missing
        directories are created. Only one store at a time can use a directory. With several
        directories, pages are spread over all of them.
    page_bytes : int
        The most bytes of all parts of a page together.
    fingerprint : bytes
        32 bytes that identify the contents of pages: model, layout, dtype, page size. Pages with
        another fingerprint are misses, and their slots are reused.
    threads : int
        Number of threads that read and write.
    queue_pages : int
        The most pages that wait for a thread. A call with more pages waits for room, at most
        `slow_seconds`; after that its pages are misses.
    segment_bytes : int
        Bytes of a file; 0 for a 64th of the quota, at least 64 MiB.
    direct : bool
        Bypass the page cache if the file system supports it.
    breaker_failures : int
        After this number of consecutive failures, no read or write starts for `breaker_seconds`.
    breaker_seconds, slow_seconds : float
        A read or write that takes longer than `slow_seconds` is a failure.

    Raises
    ------
    ValueError
        A parameter is out of range; the text names it.
    KVCacheError
        A directory is in use (the text names the user), holds slots of another size, or cannot be
        written.

    Notes
    -----
    Any number of threads may use the store. After ``close()``, and in a child of ``os.fork``, every
    call raises KVCacheError; the child opens its own store, in another directory. A failure of a
    disk does not raise: it is a miss, and counts in `health`. Opening reads 4 KiB of each slot.

    Examples
    --------
    >>> import tempfile
    >>> from kvcore.stores import DiskStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = DiskStore(f"disk:{folder.name}:64MiB", page_bytes=8192, fingerprint=bytes(32))
    >>> store.put_from([b"k" * 32], [b"x" * 8192]).result()
    1
    >>> store.close()
    >>> store = DiskStore(f"disk:{folder.name}:64MiB", page_bytes=8192, fingerprint=bytes(32))
    >>> page = bytearray(8192)
    >>> store.get_into([b"k" * 32, b"?" * 32], [page, bytearray(8192)]).result()
    1
    >>> store.close()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        tier: str | DiskTier,
        *,
        page_bytes: int,
        fingerprint: bytes,
        threads: int = 4,
        queue_pages: int = 256,
        segment_bytes: int = 0,
        direct: bool = True,
        breaker_failures: int = 5,
        breaker_seconds: float = 10.0,
        slow_seconds: float = 5.0,
    ) -> None:
        spec = parse_tier(tier) if isinstance(tier, str) else tier
        if not isinstance(spec, DiskTier):
            raise ValueError(
                f"tier is {tier!r}, must be a disk tier such as 'disk:/var/cache/kv:200GiB'"
            )
        self._spec = spec
        self._store = _core.DiskStore(
            [(os.fsencode(path), size) for path, size in spec.directories],
            page_bytes,
            fingerprint,
            threads=threads,
            queue_pages=queue_pages,
            segment_bytes=segment_bytes,
            direct=direct,
            breaker_failures=breaker_failures,
            breaker_seconds=breaker_seconds,
            slow_seconds=slow_seconds,
        )

    def __repr__(self) -> str:
        if self._store.closed:
            return f"DiskStore({self._spec.directories}, closed)"
        stats = self._store.stats()
        return f"DiskStore({stats['stored']:,} of {stats['capacity']:,} pages)"

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether any part of it is stored. O(1) per page."""
        return [parts != 0 for parts in self._store.parts_of(keys)]

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the parts of each page as bits: bit i is part i; 0 for an unknown page."""
        return self._store.parts_of(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to read pages into memory.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, writable contiguous memory with the page's size in bytes; or a list of
            memory, part by part, with None for parts to skip. Fastest if the memory begins at a
            multiple of 4 KiB, with a length that is a multiple of 4 KiB.

        Returns
        -------
        StoreHandle
            Its `result` counts the pages that were read, a prefix of `keys`.

        Raises
        ------
        ValueError, TypeError
            Wrong keys or buffers, or buffers that share memory. Nothing was read.
        """
        return self._store.get(keys, buffers)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to write pages from memory; wait for room in the queue.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, contiguous memory, or a list of memory, part by part.

        Returns
        -------
        StoreHandle
            Its `result` counts the pages that are stored now. A page whose parts are all stored is
            not written again; a page with other parts is replaced.

        Raises
        ------
        ValueError, TypeError
            Wrong keys or buffers. Nothing was written.
        """
        return self._store.put(keys, buffers)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; return the number of removed pages.

        Removal is permanent, except for pages whose slots cannot be written at that moment because
        the disk fails: these pages may return after a restart.
        """
        return self._store.remove(keys)

    def clear(self) -> int:
        """Remove all pages, including pages in flight; return the number of removed pages.

        Removal is permanent, except on a disk that cannot be written at that moment. Writes one
        block to each directory, and costs O(pages).
        """
        return self._store.clear()

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories."""
        return tuple(path for path, _ in self._spec.directories)

    @property
    def page_bytes(self) -> int:
        """The most bytes of all parts of a page together."""
        return self._store.page_bytes

    def capacity(self) -> StoreCapacity:
        """Return the quotas, and the slots in use, in bytes."""
        stats, slot = self._store.stats(), self._store.slot_bytes
        return StoreCapacity(stats["capacity"] * slot, stats["stored"] * slot, stats["stored"])

    def health(self) -> StoreHealth:
        """Return the state of the breaker and the counters that all stores have."""
        stats = self._store.stats()
        same = {name: stats[name] for name in _SAME_NAMES}
        moved = {"bytes_in": stats["bytes_written"], "bytes_out": stats["bytes_read"]}
        return StoreHealth(**same, **moved)

    def stats(self) -> dict[str, Any]:
        """Return all counters.

        Returns
        -------
        dict
            The counters of `health` and: `slots` of the files, `capacity` of the quotas, `stored`
            pages, `broken` slots that failed and stay unused until the store is reopened,
            `restored` pages that were found at the start, `foreign` pages of other fingerprints,
            `written`, `evicted`, `refused` (not tried while the breaker was open), `no_room` (every
            slot was in use or broken, and the disk had no space for more), `queued` (waiting now),
            `direct`; `read_times` and `write_times`, lists whose item i counts pages that took less
            than 2 ** (i + 1) microseconds and no less than half of that.
        """
        return self._store.stats()

    def close(self) -> None:
        """Finish the calls in flight, end the threads and release the directories."""
        self._store.close()


_SAME_NAMES = ("breaker", "hits", "misses", "corrupt", "errors", "timeouts")
