# SPDX-License-Identifier: Apache-2.0
"""Lay out the values of a batch in memory that another process reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.stores.page_values import Parts, head_of
from kvcore.stores.shared_arena import SharedArena

__all__ = ["ArenaValues", "batches"]


class ArenaValues:
    """Place the values of a batch in an arena: heads, and page parts that are not in the arena yet.

    Each value has as few pieces as possible, because the engine makes a transfer of each piece. If
    a page is a whole buffer of the arena, its head is directly before the buffer.

    Parameters
    ----------
    arena : SharedArena
    pages : sequence of Parts [n]

    Attributes
    ----------
    num_bytes : int
        Number of bytes to take from the arena for `place`.
    """

    def __init__(self, arena: SharedArena, pages: Sequence[Parts]) -> None:
        self._arena = arena
        self._heads: list[bytes] = []
        self._parts: list[list[tuple[int | None, memoryview]]] = []  # with places in the arena
        # True for a page that is a whole buffer: every writer puts the same head before it.
        self._is_in_front: list[bool] = []
        self.num_bytes = 0
        for page in pages:
            head = head_of(page)
            parts = [(arena.find(page[part]), page[part]) for part in sorted(page)]
            self._heads.append(head)
            self._parts.append(parts)
            self.num_bytes += sum(len(view) for at, view in parts if at is None)
            self._is_in_front.append(page.keys() == {0} and self._is_buffer(*parts[0]))
            self.num_bytes += 0 if self._is_in_front[-1] else len(head)

    def place(self, begin: int) -> list[list[tuple[int, int]]]:
        """Lay out the values from `begin`; return the places and sizes of each value's pieces."""
        self._places: list[list[int]] = []  # of each head, and of its parts
        pieces: list[list[tuple[int, int]]] = []
        for head, parts, is_in_front in zip(
            self._heads, self._parts, self._is_in_front, strict=True
        ):
            if is_in_front:
                places = [(parts[0][0] or 0) - len(head)]
            else:
                places = [begin]
                begin += len(head)
            for at, view in parts:
                places.append(begin if at is None else at)
                begin += len(view) if at is None else 0
            self._places.append(places)
            pieces.append(_joined(places, [len(head), *(len(view) for _, view in parts)]))
        return pieces

    def write(self) -> None:
        """Write all values to the arena."""
        for head, parts, places in zip(self._heads, self._parts, self._places, strict=True):
            self._arena.view(places[0], len(head))[:] = head
            for (at, view), place in zip(parts, places[1:], strict=True):
                if at is None:
                    self._arena.view(place, len(view))[:] = view

    def read(self, i: int, size: int) -> bool:
        """Copy the parts of value i if it has exactly these parts; return True if it has."""
        head, parts, places = self._heads[i], self._parts[i], self._places[i]
        if size != len(head) + sum(len(view) for _, view in parts):
            return False
        if self._arena.view(places[0], len(head)) != head:
            return False
        for (at, view), place in zip(parts, places[1:], strict=True):
            if at is None:
                view[:] = self._arena.view(place, len(view))
        return True

    def _is_buffer(self, at: int | None, view: memoryview) -> bool:
        return at is not None and self._arena.is_buffer(at, len(view))


def _joined(places: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return pieces; a piece that begins at the end of the piece before it is joined to it."""
    found: list[tuple[int, int]] = []
    for begin, size in zip(places, sizes, strict=True):
        if found and sum(found[-1]) == begin:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((begin, size))
    return found


def batches(arena: SharedArena, pages: Sequence[Parts]) -> list[tuple[slice, ArenaValues]]:
    """Split pages into batches that take a quarter of the memory at most, or that have one page.

    Raises
    ------
    ValueError
        A single page takes more than half of the memory.
    """
    found: list[tuple[slice, ArenaValues]] = []
    first = taken = 0
    for i, parts in enumerate(pages):
        size = _HEAD_BYTES + sum(map(len, parts.values()))
        if size > arena.size // 2:
            raise ValueError(
                f"a page takes {size} bytes, more than half of the buffer of {arena.size} bytes; "
                f"give the tier a buffer of {2 * size} or more"
            )
        if i > first and taken + size > arena.size // 4:
            found.append((slice(first, i), ArenaValues(arena, pages[first:i])))
            first, taken = i, 0
        taken += size
    if first < len(pages):
        found.append((slice(first, len(pages)), ArenaValues(arena, pages[first:])))
    return found


_HEAD_BYTES = 1 << 10  # the most bytes of a value's head
