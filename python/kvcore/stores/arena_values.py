# SPDX-License-Identifier: Apache-2.0
"""Lay the values of a batch out in memory that another process reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.stores.page_values import Parts, head_of
from kvcore.stores.shared_arena import SharedArena

__all__ = ["ArenaValues", "batches"]


class ArenaValues:
    """Values: heads, and parts of pages behind them where they are not there already.

    Each value is in as few pieces as can be: the engine makes a transfer of each. A whole
    buffer of the arena has its head in front of it.

    Parameters
    ----------
    arena : SharedArena
    pages : sequence of Parts [n]

    Attributes
    ----------
    num_bytes : int
        That have to be taken for `place`.
    """

    def __init__(self, arena: SharedArena, pages: Sequence[Parts]) -> None:
        self._arena = arena
        self._heads: list[bytes] = []
        self._parts: list[list[tuple[int | None, memoryview]]] = []  # and where they are already
        # A whole buffer as a whole page: whoever puts it writes the same head there.
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
        """Lay them out from there; return where the pieces of each begin, and their bytes."""
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
        """Write all values."""
        for head, parts, places in zip(self._heads, self._parts, self._places, strict=True):
            self._arena.view(places[0], len(head))[:] = head
            for (at, view), place in zip(parts, places[1:], strict=True):
                if at is None:
                    self._arena.view(place, len(view))[:] = view

    def read(self, i: int, size: int) -> bool:
        """Copy the parts of a value that came with so many bytes; whether it has just these."""
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
    """Return pieces, of which one that begins where the last ends goes on with it."""
    found: list[tuple[int, int]] = []
    for begin, size in zip(places, sizes, strict=True):
        if found and sum(found[-1]) == begin:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((begin, size))
    return found


def batches(arena: SharedArena, pages: Sequence[Parts]) -> list[tuple[slice, ArenaValues]]:
    """Split pages so that a quarter of the memory is enough for each batch, or one page is alone.

    Raises
    ------
    ValueError
        A page alone takes more than half.
    """
    found: list[tuple[slice, ArenaValues]] = []
    first = taken = 0
    for i, parts in enumerate(pages):
        size = _HEAD_BYTES + sum(map(len, parts.values()))
        if size > arena.size // 2:
            raise ValueError(
                f"a page takes {size} bytes of {arena.size} through which pages go; give the tier "
                f"a buffer of {2 * size} or more"
            )
        if i > first and taken + size > arena.size // 4:
            found.append((slice(first, i), ArenaValues(arena, pages[first:i])))
            first, taken = i, 0
        taken += size
    if first < len(pages):
        found.append((slice(first, len(pages)), ArenaValues(arena, pages[first:])))
    return found


_HEAD_BYTES = 1 << 10  # at most, of a value
