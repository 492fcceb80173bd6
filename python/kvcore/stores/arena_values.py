# SPDX-License-Identifier: Apache-2.0
"""Lay the values of a batch out in memory that another process reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.stores.page_values import Parts, value_of
from kvcore.stores.shared_arena import SharedArena

__all__ = ["ArenaValues", "batches"]


class ArenaValues:
    """Values in pieces: heads, and parts of pages behind them where they are not there already.

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
        self.num_bytes = 0
        for page in pages:
            _, (head, *others) = value_of(page)
            views = [memoryview(each) for each in others]
            parts = [(arena.find(view), view) for view in views]
            self._heads.append(bytes(head))
            self._parts.append(parts)
            self.num_bytes += len(head) + sum(len(view) for at, view in parts if at is None)

    def place(self, begin: int) -> list[list[tuple[int, int]]]:
        """Lay them out from there; return where the pieces of each begin, and their bytes."""
        self._pieces: list[list[tuple[int, int]]] = []
        for head, parts in zip(self._heads, self._parts, strict=True):
            pieces = [(begin, len(head))]
            begin += len(head)
            for at, view in parts:
                pieces.append((begin if at is None else at, len(view)))
                begin += len(view) if at is None else 0
            self._pieces.append(pieces)
        return self._pieces

    def write(self) -> None:
        """Write all values."""
        for head, parts, pieces in zip(self._heads, self._parts, self._pieces, strict=True):
            self._arena.view(*pieces[0])[:] = head
            for (at, view), piece in zip(parts, pieces[1:], strict=True):
                if at is None:
                    self._arena.view(*piece)[:] = view

    def read(self, i: int, size: int) -> bool:
        """Copy the parts of a value that came with so many bytes; whether it has just these."""
        pieces = self._pieces[i]
        if size != sum(n for _, n in pieces) or self._arena.view(*pieces[0]) != self._heads[i]:
            return False
        for (at, view), piece in zip(self._parts[i], pieces[1:], strict=True):
            if at is None:
                view[:] = self._arena.view(*piece)
        return True


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
