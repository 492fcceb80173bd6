# SPDX-License-Identifier: Apache-2.0
"""How far stores get with a prompt: which of them has which column, and what of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcore.stores.tiers.adapters import StoreAdapter

__all__ = ["Found", "Search", "StoreDepth"]

_FIRST_BATCH, _MOST_BATCH = 8, 256


class Search(Protocol):
    """Say what is asked of a `kvcore._hot.below.BelowSearch`."""

    @property
    def replica(self) -> int:
        """Of the pages."""

    @property
    def have(self) -> int:
        """Columns that the device or the host tier has."""

    @property
    def most(self) -> int:
        """Columns that a hit could have."""

    @property
    def has_gaps(self) -> bool:
        """Whether a hit does without some of its columns."""

    def keys(self, first: int, last: int) -> list[bytes]:
        """Return the keys of columns ``first .. last - 1``."""

    def needed(self, end: int) -> list[tuple[int, int]]:
        """Return what a hit of `end` columns lacks: columns, and parts as bits."""


#: A store, and the parts it has of a column as bits.
Found = tuple[StoreAdapter, int]


class StoreDepth:
    """Find columns of a prompt in stores.

    Parameters
    ----------
    search : BelowSearch
    stores : sequence of StoreAdapter
        A column is that of the first one that has it.
    """

    def __init__(self, search: Search, stores: Sequence[StoreAdapter]) -> None:
        self._search, self._stores = search, stores
        self._found: dict[int, Found | None] = {}
        self._bad: set[tuple[int, str]] = set()

    def reach(self) -> int:
        """Return the columns up to the first that no store has and the tiers above have not.

        Where a hit does without some, those up to the last that a store has.
        """
        if self._search.has_gaps:
            return self._reach_over_gaps()
        end, batch = self._search.have, 1
        while end < self._search.most:
            last = min(end + batch, self._search.most)
            self._look(range(end, last))
            for column in range(end, last):
                if self._found[column] is None:
                    return column
            end, batch = last, min(_MOST_BATCH, max(_FIRST_BATCH, 2 * batch))
        return end

    def _reach_over_gaps(self) -> int:
        columns = range(self._search.have, self._search.most)
        self._look(columns)
        found = [column for column in columns if self._found[column] is not None]
        return found[-1] + 1 if found else self._search.have

    def best(self, end: int, least: int) -> list[tuple[int, int]]:
        """Return what stores have to bring for the longest hit of at most `end` columns.

        None but longer ones than `least`. It is as of `BelowSearch.needed`, and all of it is there
        as far as stores say.
        """
        while end > least:
            needed = self._search.needed(end)
            self._look([column for column, _ in needed])
            lacking = [column for column, parts in needed if parts & ~self._parts(column)]
            if not lacking:
                return needed
            # Whatever needs the last of them: a hit that ends in front of it, or further back.
            end = lacking[-1]
        return []

    def store_of(self, column: int) -> StoreAdapter | None:
        """Return the store that has a column that was asked for."""
        found = self._found.get(column)
        return found[0] if found is not None else None

    def learn(self, column: int, parts: int) -> None:
        """Note what a store has of a column, which it could not say before."""
        found = self._found[column]
        if found is not None:
            self._found[column] = (found[0], parts)

    def lose(self, column: int) -> bool:
        """Note that a store has not got a column; return whether another one has."""
        found = self._found.pop(column)
        if found is not None:
            self._bad.add((column, found[0].name))
        self._look([column])
        return self._found[column] is not None

    def _parts(self, column: int) -> int:
        found = self._found[column]
        return 0 if found is None else found[1]

    def _look(self, columns: Sequence[int]) -> None:
        """Ask stores for columns that they were not asked for yet."""
        open_columns = {column for column in columns if column not in self._found}
        if not open_columns:
            return
        keys = dict(self._keys(sorted(open_columns)))
        for store in self._stores:
            asked = [column for column in keys if (column, store.name) not in self._bad]
            answers = store.parts_of([keys[column] for column in asked]) if asked else []
            for column, parts in zip(asked, answers, strict=True):
                if parts:
                    self._found[column] = (store, parts)
                    del keys[column]
            if not keys:
                return
        self._found.update(dict.fromkeys(keys))

    def _keys(self, columns: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the keys of columns, one call for each run of them."""
        first = 0
        for i in range(1, len(columns) + 1):
            if i == len(columns) or columns[i] != columns[i - 1] + 1:
                run = columns[first:i]
                yield from zip(run, self._search.keys(run[0], run[-1] + 1), strict=True)
                first = i
