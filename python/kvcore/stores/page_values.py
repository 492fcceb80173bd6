# SPDX-License-Identifier: Apache-2.0
"""A page as one value of a server: how many parts it has, their sizes, and the parts.

Little-endian: ``KVP1``, uint32 n, int64 [n] bytes of each part or -1 where it is not there, and the
bytes of those that are.
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
        Not one item for each name, no part, too many, or memory that `is_written` and read-only.
    TypeError
        What is no contiguous memory.
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
        raise ValueError("memory that a page is to be read into is read-only")
    return found


def value_of(parts: Parts) -> tuple[int, list[bytes | memoryview]]:
    """Return the bytes of a page's value, and the value in pieces, which are not copied."""
    head = head_of(parts)
    return len(head) + sum(map(len, parts.values())), [head, *(parts[i] for i in sorted(parts))]


def head_of(parts: Parts) -> bytes:
    """Return what a page's value begins with."""
    n = max(parts) + 1
    return _head(tuple(len(parts[i]) if i in parts else _ABSENT for i in range(n)))


@lru_cache(maxsize=64)
def _head(sizes: tuple[int, ...]) -> bytes:
    return _HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes)


class Found(Enum):
    """What a server has under a name."""

    ALL = "what is wanted"
    SOME = "parts, but not all that are wanted"
    NONE = "nothing"
    WRONG = "what is no page, or one of other sizes"


class ValueReader(Protocol):
    """Where values come from, one behind the other, as of `RespConnection`."""

    def begin_value(self) -> int | None: ...
    def read(self, size: int, /) -> bytes: ...
    def read_into(self, to: memoryview, /) -> None: ...
    def skip(self, size: int, /) -> None: ...
    def end_value(self) -> None: ...


class ValueBytes:
    """One value that is in memory.

    Parameters
    ----------
    value : memoryview
    """

    def __init__(self, value: memoryview) -> None:
        self._left = value

    def begin_value(self) -> int:
        """Return its bytes."""
        return len(self._left)

    def read(self, size: int) -> bytes:
        """Read the next bytes: few of them."""
        found = bytes(self._left[:size])
        self.skip(size)
        return found

    def read_into(self, to: memoryview) -> None:
        """Copy the next bytes."""
        to[:] = self._left[: len(to)]
        self.skip(len(to))

    def skip(self, size: int) -> None:
        """Leave bytes out."""
        self._left = self._left[size:]

    def end_value(self) -> None:
        """Do nothing: nothing is behind it."""


def read_value(connection: ValueReader, wanted: Parts) -> Found:
    """Read the next value: into memory where it has all that is wanted."""
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
