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

    Each page is read or written by one call of the system, past its page cache where the file
    system can do that. Every page is checked on its way back: its key, its fingerprint, and a CRC
    over all its bytes. When the quota is used up, the pages that were used least recently go.

    Parameters
    ----------
    tier : str or DiskTier
        Directories and their quotas in bytes, such as ``"disk:/var/cache/kv:200GiB"``. Missing ones
        are made. One store at a time has a directory. Pages are spread over several.
    page_bytes : int
        Of all parts of a page together, at most.
    fingerprint : bytes
        32 bytes that say what pages are of: model, layout, dtype, page size. Pages with another
        fingerprint are not found, and their slots are used again.
    threads : int
        That read and write.
    queue_pages : int
        That wait for one of the threads. A call that brings more waits for room, `slow_seconds` at
        most; then its pages are misses.
    segment_bytes : int
        Of a file; 0 for a 64th of the quota, at least 64 MiB.
    direct : bool
        Read and write past the page cache, where the file system can.
    breaker_failures : int
        After so many failures in a row nothing is tried for `breaker_seconds`.
    breaker_seconds, slow_seconds : float
        A read or write that takes longer than `slow_seconds` is a failure.

    Raises
    ------
    ValueError
        A parameter is out of range; the text says which.
    KVCacheError
        A directory is in use, by whom; holds slots of another size; or cannot be written.

    Notes
    -----
    Any number of threads. After ``close()``, and in a child of ``os.fork``, every call raises
    KVCacheError; such a child opens a store of its own, elsewhere. No call raises because a disk
    fails: that is a miss, and counts in `health`. Opening reads 4 KiB of each slot.

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
            raise ValueError(f"tier is {tier!r}, must be one such as 'disk:/var/cache/kv:200GiB'")
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
        """Tell of each page whether any part of it is stored. O(1) per page."""
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
            For each key writable contiguous memory with as many bytes as the page has; or a list of
            it, part by part, with None for parts that are not wanted. Fastest where it begins at a
            multiple of 4 KiB and is one long.

        Returns
        -------
        StoreHandle
            Its `result` counts the pages that were served, a prefix.

        Raises
        ------
        ValueError, TypeError
            Wrong keys or buffers, or buffers that share memory. Nothing was read.
        """
        return self._store.get(keys, buffers)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to write pages from memory; waits for room in the queue.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key contiguous memory, or a list of it, part by part.

        Returns
        -------
        StoreHandle
            Its `result` counts the pages that are stored now. Pages whose parts are all stored
            already are not written again; a page with other parts is replaced.

        Raises
        ------
        ValueError, TypeError
            Wrong keys or buffers. Nothing was written.
        """
        return self._store.put(keys, buffers)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages; return how many there were.

        For good, but for pages whose slots cannot be written at that moment, because the disk
        fails: they may be back after a restart.
        """
        return self._store.remove(keys)

    def clear(self) -> int:
        """Forget all pages, also those on their way; return how many there were.

        For good, but on a disk that cannot be written at that moment. Costs one block written to
        each directory and O(pages).
        """
        return self._store.clear()

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories."""
        return tuple(path for path, _ in self._spec.directories)

    @property
    def page_bytes(self) -> int:
        """Bytes of all parts of a page together, at most."""
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
            Those of `health` and: `slots` that the files have, `capacity` of the quotas, `stored`
            pages, `broken` slots that failed and are left alone until the store is reopened,
            `restored` pages that the start found, `foreign` ones of other fingerprints, `written`,
            `evicted`, `refused` (not tried while the breaker was open), `no_room` (every slot was
            in use or broken, and the disk gave no space for more), `queued` (waiting now),
            `direct`; `read_times` and `write_times`, lists whose item i counts pages that took less
            than 2 ** (i + 1) microseconds and no less than half of that.
        """
        return self._store.stats()

    def close(self) -> None:
        """Carry out what is under way, end the threads and let the directories go."""
        self._store.close()


_SAME_NAMES = ("breaker", "hits", "misses", "corrupt", "errors", "timeouts")
