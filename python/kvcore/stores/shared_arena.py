# SPDX-License-Identifier: Apache-2.0
"""Memory that another process maps as well, given out in pieces."""

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
_LOOK_SECONDS = 0.05  # between two looks for buffers that were dropped, which notify nobody


class SharedArena:
    """Give out pieces of one memory, first fit.

    Parameters
    ----------
    size : int
        Bytes; those that nobody has used yet take no memory.

    Attributes
    ----------
    fd : int
        What another process maps.
    size : int

    Raises
    ------
    OSError
        The system has no such memory.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("shared memory without a name needs Linux")
        self.size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.fd = os.memfd_create("kvcore", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            self._bytes = np.frombuffer(mmap(self.fd, self.size), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self._first = int(self._bytes.ctypes.data)
        self._free = [(0, self.size)]  # (begin, end) of pieces, none beside another
        # Of buffers that were dropped: maybe by a thread that is at work on the list above.
        self._dropped: deque[tuple[int, int]] = deque()
        self._buffers: dict[int, int] = {}  # where they begin, and their bytes
        self._changed = Condition()
        self._close = weakref.finalize(self, os.close, self.fd)

    def close(self) -> None:
        """Give the file back; memory stays as long as somebody has a piece of it."""
        self._close()

    @contextmanager
    def taken(self, size: int, ends: float) -> Iterator[int]:
        """Take a piece and give it back; where it begins.

        Raises
        ------
        TimeoutError
            There was no room by then.
        """
        with self._changed:
            while (begin := self._take(size)) is None:
                left = ends - monotonic()
                if left <= 0:
                    raise TimeoutError(f"nobody has given back memory; {size} bytes are wanted")
                self._changed.wait(min(left, _LOOK_SECONDS))
        try:
            yield begin
        finally:
            with self._changed:
                self._give(begin, size)
                self._changed.notify_all()

    def new_buffer(self, size: int) -> NDArray[np.uint8] | None:
        """Return memory that is taken as long as somebody has it; None where there is no room.

        In front of it are `HEAD_ROOM` bytes that belong to it. Half of all stays for `taken`.
        """
        size += HEAD_ROOM
        with self._changed:
            self._collect()
            begin = self._take(size) if self._room() - size >= self.size // 2 else None
            if begin is None:
                return None
            self._buffers[begin + HEAD_ROOM] = size - HEAD_ROOM
        # Views of an array that has no memory of its own refer to that array.
        found = np.frombuffer(self._bytes.data, np.uint8, size - HEAD_ROOM, begin + HEAD_ROOM)
        weakref.finalize(found, self._dropped.append, (begin, size)).atexit = False
        return found

    def is_buffer(self, begin: int, size: int) -> bool:
        """Tell whether a whole buffer is there, which was not dropped."""
        return self._buffers.get(begin) == size

    def view(self, begin: int, size: int) -> memoryview:
        """Return a piece."""
        return self._bytes.data[begin : begin + size]

    def find(self, view: memoryview) -> int | None:
        """Return where memory begins that is part of this one; None for any other."""
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
