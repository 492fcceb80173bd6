# SPDX-License-Identifier: Apache-2.0
"""A mapping that can be hashed, for fields of frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

__all__ = ["FrozenMap"]

Key = TypeVar("Key")
Value = TypeVar("Value", covariant=True)


class FrozenMap(Mapping[Key, Value]):
    """Map hashable keys to hashable values, in the order given; equal to a dict of the same."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[Key, Value]]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Key) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
