# SPDX-License-Identifier: Apache-2.0
"""Allocate pieces of memory that another process also maps."""

from __future__ import annotations

import bisect
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from threading import Condition
from time import monotonic

import numpy as np
from numpy.typing import NDArray

__all__ = ["HEAD_ROOM", "SharedArena"]

HEAD_ROOM = _ALIGNMENT = 64
_LOOK_SECONDS = 0.05  # between two checks for dropped buffers, which wake no thread


class SharedArena:
    """Allocate pieces of one memory, first fit.

    Parameters
    ----------
    size : int
        Bytes; bytes that were never used take no memory.

    Attributes
    ----------
    fd : int
        The file descriptor that another process maps.
    size : int

    Raises
    ------
    OSError
        The system has no such memory.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("shared memory without a name (memfd) needs Linux")
        self.size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.fd = os.memfd_create("kvcore", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            self._bytes = np.frombuffer(mmap(self.fd, self.size), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self._first = int(self._bytes.ctypes.data)
        self._free = [(0, self.size)]  # (begin, end) of pieces, never adjacent
        # Dropped buffers: a thread may drop a buffer while it changes the list above.
        self._dropped: deque[tuple[int, int]] = deque()
        self._buffers: dict[int, int] = {}  # begin and bytes of each buffer
        self._changed = Condition()
        self._close = weakref.finalize(self, os.close, self.fd)

    def close(self) -> None:
        """Close the file; the memory stays as long as a piece of it is in use."""
        self._close()

    @contextmanager
    def taken(self, size: int, ends: float) -> Iterator[int]:
        """Take a piece, yield its begin, and return the piece to the arena.

        Raises
        ------
        TimeoutError
            The arena had no room before the deadline.
        """
        with self._changed:
            while (begin := self._take(size)) is None:
                left = ends - monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"the buffer had no room for {size} bytes; give the tier a larger buffer"
                    )
                self._changed.wait(min(left, _LOOK_SECONDS))
        try:
            yield begin
        finally:
            with self._changed:
                self._give(begin, size)
                self._changed.notify_all()

    def new_buffer(self, size: int) -> NDArray[np.uint8] | None:
        """Return memory that stays taken while it is in use; return None without room.

        The `HEAD_ROOM` bytes before the buffer belong to it. Half of the arena stays free for
        `taken`.
        """
        size += HEAD_ROOM
        with self._changed:
            self._collect()
            begin = self._take(size) if self._room() - size >= self.size // 2 else None
            if begin is None:
                return None
            self._buffers[begin + HEAD_ROOM] = size - HEAD_ROOM
        # Views of this array refer to this array, because it does not own its memory.
        found = np.frombuffer(self._bytes.data, np.uint8, size - HEAD_ROOM, begin + HEAD_ROOM)
        weakref.finalize(found, self._dropped.append, (begin, size)).atexit = False
        return found

    def is_buffer(self, begin: int, size: int) -> bool:
        """Return whether a whole buffer, not dropped, begins here with this size."""
        return self._buffers.get(begin) == size

    def view(self, begin: int, size: int) -> memoryview:
        """Return a piece."""
        return self._bytes.data[begin : begin + size]

    def find(self, view: memoryview) -> int | None:
        """Return the begin of memory that is part of the arena; return None for other memory."""
        if not view:
            return None
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        begin = address - self._first
        return begin if 0 <= begin < self.size else None

    def _room(self) -> int:
        return sum(end - begin for begin, end in self._free)

    def _collect(self) -> None:
        while self._dropped:
            begin, size = self._dropped.popleft()
            del self._buffers[begin + HEAD_ROOM]
            self._give(begin, size)

    def _take(self, size: int) -> int | None:
        self._collect()
        size = _rounded(size)
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                left = [(begin + size, end)] if end - begin > size else []
                self._free[i : i + 1] = left
                return begin
        return None

    def _give(self, begin: int, size: int) -> None:
        end = begin + _rounded(size)
        i = bisect.bisect(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (begin, end))


def _rounded(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
