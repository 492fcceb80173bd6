# SPDX-License-Identifier: Apache-2.0
"""Define the protocol of every store of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "BlockStore",
    "FinishedHandle",
    "PageBuffers",
    "StoreCapacity",
    "StoreHandle",
    "StoreHealth",
]

#: The memory of a page: a contiguous object with the buffer protocol, such as a uint8 array; or a
#: list of these objects, part by part (bundle by bundle), with None for missing parts.
PageBuffers: TypeAlias = Any


@dataclass(frozen=True)
class StoreCapacity:
    """Hold the capacity of a store, and its use.

    Parameters
    ----------
    bytes : int or None
        The most bytes; None if unknown.
    used_bytes : int
        Bytes in use now.
    pages : int
        Pages stored now.
    """

    bytes: int | None
    used_bytes: int
    pages: int


@dataclass(frozen=True)
class StoreHealth:
    """Hold a store's state, and its counters since it was opened.

    Parameters
    ----------
    breaker : str
        ``"closed"``: the store works; ``"open"``: it failed, and no call is made for some time;
        ``"half-open"``: one page at a time tests whether it works again.
    hits, misses : int
        Pages that were read, and requested pages that were not read, for any reason.
    bytes_in, bytes_out : int
        Bytes written to the store, and read from it.
    corrupt : int
        Pages whose bytes differ from the stored bytes; these pages are removed.
    errors, timeouts : int
        Reads and writes that failed, and reads and writes that took too long.
    """

    breaker: Literal["closed", "open", "half-open"] = "closed"
    hits: int = 0
    misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    corrupt: int = 0
    errors: int = 0
    timeouts: int = 0


@runtime_checkable
class StoreHandle(Protocol):
    """Follow a batch in flight.

    Until the batch is done, the caller neither frees nor changes its memory.
    """

    def done(self) -> bool:
        """Return whether the batch is done, without waiting."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds, or without limit; return whether the batch is done."""
        ...

    def result(self) -> int:
        """Wait; return the number of pages that were read, a prefix of the batch, or are stored."""
        ...


@dataclass(frozen=True)
class FinishedHandle:
    """Return the result of a batch that is already done, for stores without background work.

    Parameters
    ----------
    pages : int
        The value that `result` returns.
    """

    pages: int

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Return True at once."""
        return True

    def result(self) -> int:
        """Return the number of pages."""
        return self.pages


@runtime_checkable
class BlockStore(Protocol):
    """Store pages by key.

    A key is 32 bytes that name a page's content. Equal keys mean equal bytes, so a stored page need
    not be stored again. A store never interprets keys.

    Notes
    -----
    Every store keeps these rules:

    - A page is found only after all its bytes are stored.
    - `get_into` reads all pages or a prefix: the first page that is not stored, or whose bytes
      differ from the stored bytes, ends the batch. The buffers after the prefix may hold any bytes.
    - A failure is a miss. Only wrong arguments, and calls after `close`, raise.
    - Calls come from any thread, several at a time.

    `MemoryStore` is a complete store in a few lines.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether any part of it is stored."""
        ...

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to read pages into memory, one item of `buffers` for each key."""
        ...

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to store pages from memory, one item of `buffers` for each key."""
        ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; return the number of removed pages."""
        ...

    def clear(self) -> int:
        """Remove all pages; return the number of removed pages.

        In a store with several users, only pages of this user are counted, possibly zero.
        """
        ...

    def capacity(self) -> StoreCapacity:
        """Return the capacity of the store, and its use."""
        ...

    def health(self) -> StoreHealth:
        """Return the store's state and counters, without waiting for the store."""
        ...

    def close(self) -> None:
        """Finish the calls in flight and release all resources. A second call does nothing."""
        ...
