# SPDX-License-Identifier: Apache-2.0
"""What requests with extra keys may share, token by token: the slow and obvious way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreign_context import Context

Keys = list[tuple[int, int, bytes]]
#: A token with all keys that start there.
Mark = tuple[int, frozenset[tuple[int, bytes]]]


class KeyedContext(Context):
    """A context in plain Python with extra keys, which a cut takes away as kvcore's does."""

    extra_keys: Keys | None = None

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self.extra_keys = [key for key in self.extra_keys or [] if key[0] < n] or None


def marks(tokens: Sequence[int], keys: Iterable[tuple[int, int, bytes]] | None) -> list[Mark]:
    """Each token with the keys that start there: equal up to n, so are the first n tokens."""
    starts: dict[int, set[tuple[int, bytes]]] = {}
    for start, length, key in keys or ():
        starts.setdefault(start, set()).add((length, key))
    return [(int(t), frozenset(starts.get(i, ()))) for i, t in enumerate(tokens)]


def common(a: Sequence[Mark], b: Sequence[Mark]) -> int:
    """Positions from the start on at which two agree."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class KeyedCache:
    """What was committed and not forgotten, as the prefixes of whole pages that it is."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefixes: set[tuple[Mark, ...]] = set()

    def commit(self, written: Sequence[Mark]) -> None:
        pages = len(written) // self.page_size
        self.prefixes.add(tuple(written[: pages * self.page_size]))

    def match(self, asked: Sequence[Mark]) -> int:
        """Tokens in whole pages."""
        best = max((common(each, asked) for each in self.prefixes), default=0)
        return best // self.page_size * self.page_size

    def hit(self, prompt: Sequence[Mark]) -> int:
        """Tokens that a new request reuses: of a last page a part, and not the last token."""
        return max((common(each, prompt[:-1]) for each in self.prefixes), default=0)
