# SPDX-License-Identifier: Apache-2.0
"""Encode a page as one value of a server: its number of parts, their sizes, and the parts.

Little-endian: ``KVP1``, uint32 n, int64 [n] bytes of each part or -1 for a missing part, and the
bytes of the other parts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Protocol, TypeAlias

from kvcore.stores.protocol import PageBuffers

__all__ = [
    "Found",
    "Parts",
    "ValueBytes",
    "head_of",
    "pages_of",
    "read_value",
    "skip_value",
    "value_of",
]

#: The memory of a page's parts, by their numbers.
Parts: TypeAlias = dict[int, memoryview]

_MAGIC = b"KVP1"
_HEAD = struct.Struct("<4sI")
_ABSENT = -1
_MOST_PARTS = 64


def pages_of(
    names: Sequence[object], buffers: Sequence[PageBuffers], *, is_written: bool
) -> list[Parts]:
    """Read the buffers of a batch.

    Raises
    ------
    ValueError
        A number of items other than the number of names, a page without parts or with too many, or
        read-only memory although `is_written`.
    TypeError
        An item that is not contiguous memory.
    """
    if len(buffers) != len(names):
        raise ValueError(f"{len(names)} keys, but {len(buffers)} buffers; give one for each")
    return [_parts(each, is_written=is_written) for each in buffers]


def _parts(buffers: PageBuffers, *, is_written: bool) -> Parts:
    listed = buffers if isinstance(buffers, (list, tuple)) else [buffers]
    found = {i: memoryview(each).cast("B") for i, each in enumerate(listed) if each is not None}
    if not found or len(listed) > _MOST_PARTS:
        raise ValueError(f"a page of {len(found)} parts; must be 1 to {_MOST_PARTS}")
    if is_written and any(view.readonly for view in found.values()):
        raise ValueError("the memory to read a page into is read-only; give writable memory")
    return found


def value_of(parts: Parts) -> tuple[int, list[bytes | memoryview]]:
    """Return the size of a page's value in bytes, and its pieces, without a copy."""
    head = head_of(parts)
    return len(head) + sum(map(len, parts.values())), [head, *(parts[i] for i in sorted(parts))]


def head_of(parts: Parts) -> bytes:
    """Return the head of a page's value."""
    n = max(parts) + 1
    return _head(tuple(len(parts[i]) if i in parts else _ABSENT for i in range(n)))


@lru_cache(maxsize=64)
def _head(sizes: tuple[int, ...]) -> bytes:
    return _HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes)


class Found(Enum):
    """Name the results of reading a value from a server."""

    ALL = "all wanted parts"
    SOME = "some parts, but not all wanted parts"
    NONE = "no value"
    WRONG = "not a page, or a page of other sizes"


class ValueReader(Protocol):
    """Read values one after the other, as `RespConnection` does."""

    def begin_value(self) -> int | None: ...
    def read(self, size: int, /) -> bytes: ...
    def read_into(self, to: memoryview, /) -> None: ...
    def skip(self, size: int, /) -> None: ...
    def end_value(self) -> None: ...


class ValueBytes:
    """Read one value from memory.

    Parameters
    ----------
    value : memoryview
    """

    def __init__(self, value: memoryview) -> None:
        self._left = value

    def begin_value(self) -> int:
        """Return the value's bytes."""
        return len(self._left)

    def read(self, size: int) -> bytes:
        """Read the next bytes, for small sizes."""
        found = bytes(self._left[:size])
        self.skip(size)
        return found

    def read_into(self, to: memoryview) -> None:
        """Copy the next bytes."""
        to[:] = self._left[: len(to)]
        self.skip(len(to))

    def skip(self, size: int) -> None:
        """Skip bytes."""
        self._left = self._left[size:]

    def end_value(self) -> None:
        """Do nothing: no bytes follow the value."""


def read_value(connection: ValueReader, wanted: Parts) -> Found:
    """Read the next value, into memory if it has all wanted parts."""
    left = connection.begin_value()
    if left is None:
        return Found.NONE
    found, sizes = Found.WRONG, list[int]()
    if left >= _HEAD.size:
        magic, n = _HEAD.unpack(connection.read(_HEAD.size))
        left -= _HEAD.size
        if magic == _MAGIC and n <= _MOST_PARTS and left >= 8 * n:
            sizes += struct.unpack(f"<{n}q", connection.read(8 * n))
            left -= 8 * n
            found = _judged(sizes, left, wanted)
    if found is Found.ALL:
        for part, size in enumerate(sizes):
            if part in wanted:
                connection.read_into(wanted[part])
            elif size > 0:
                connection.skip(size)
    else:
        connection.skip(left)
    connection.end_value()
    return found


def _judged(sizes: Sequence[int], left: int, wanted: Parts) -> Found:
    there = {part: size for part, size in enumerate(sizes) if size != _ABSENT}
    if min(there.values(), default=-1) < 0 or sum(there.values()) != left:
        return Found.WRONG
    if any(there.get(part, len(view)) != len(view) for part, view in wanted.items()):
        return Found.WRONG
    return Found.ALL if wanted.keys() <= there.keys() else Found.SOME


def skip_value(connection: ValueReader) -> None:
    """Read past the next value."""
    left = connection.begin_value()
    if left is not None:
        connection.skip(left)
        connection.end_value()
