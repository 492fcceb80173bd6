# SPDX-License-Identifier: Apache-2.0
"""What a store of pages has to do, whoever writes it."""

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

#: The memory of a page: what has the buffer protocol and is contiguous, such as a uint8 array; or a
#: list of them, one for each part (bundle) of the page, with None for parts that are not there.
PageBuffers: TypeAlias = Any


@dataclass(frozen=True)
class StoreCapacity:
    """How much a store holds.

    Parameters
    ----------
    bytes : int or None
        At most; None where nobody knows.
    used_bytes : int
        Now.
    pages : int
        Stored now.
    """

    bytes: int | None
    used_bytes: int
    pages: int


@dataclass(frozen=True)
class StoreHealth:
    """How a store is, and what it has done since it was opened.

    Parameters
    ----------
    breaker : str
        ``"closed"``: it works; ``"open"``: it failed and is not asked for some time;
        ``"half-open"``: one page at a time shows whether it works again.
    hits, misses : int
        Pages that were served, and pages that were asked for and were not, for whatever reason.
    bytes_in, bytes_out : int
        Bytes written to the store, and read from it.
    corrupt : int
        Pages whose bytes were not those that were stored; they are gone.
    errors, timeouts : int
        Reads and writes that failed, and that took too long.
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
    """A batch under way.

    Until it is done, the caller neither frees nor changes the batch's memory.
    """

    def done(self) -> bool:
        """Return whether the batch is over, without waiting."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for so many seconds, or without end; return whether the batch is over."""
        ...

    def result(self) -> int:
        """Wait; return the pages that were read, a prefix of the batch, or that are stored."""
        ...


@dataclass(frozen=True)
class FinishedHandle:
    """A batch that was over when the call returned, for stores that do not work in the background.

    Parameters
    ----------
    pages : int
        What `result` returns.
    """

    pages: int

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Return True at once."""
        return True

    def result(self) -> int:
        """Return the pages."""
        return self.pages


@runtime_checkable
class BlockStore(Protocol):
    """A store of pages by key.

    A key is 32 bytes that name a page's content: equal keys are equal bytes, so a page that is
    stored need not be stored again. A store never looks into keys.

    Notes
    -----
    The rules that every store keeps:

    - A page can be found once all its bytes are stored, not before.
    - `get_into` serves all pages or a prefix: the first that is not there, or whose bytes are not
      those that were stored, ends the batch. The buffers behind it may hold anything.
    - What fails is a miss. Nothing raises but wrong arguments, and calls after `close`.
    - Calls come from any thread, several at a time.

    `MemoryStore` is a whole store in a few lines.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell of each page whether any part of it is stored."""
        ...

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to read pages into memory, one item of `buffers` for each key."""
        ...

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Begin to store pages from memory, one item of `buffers` for each key."""
        ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages; return how many there were."""
        ...

    def clear(self) -> int:
        """Forget all pages; return how many there were.

        For a store that others use too, as many as are this user's alone: maybe none.
        """
        ...

    def capacity(self) -> StoreCapacity:
        """Return how much the store holds."""
        ...

    def health(self) -> StoreHealth:
        """Return how the store is. Never waits for it."""
        ...

    def close(self) -> None:
        """Carry out what is under way and give everything back. A second call does nothing."""
        ...
