# SPDX-License-Identifier: Apache-2.0
"""The tokens that requests with extra keys may share: the slow and obvious way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreign_context import Context

Keys = list[tuple[int, int, bytes]]
#: A token and all keys that start at it.
Mark = tuple[int, frozenset[tuple[int, bytes]]]


class KeyedContext(Context):
    """A context in plain Python with extra keys; like kvcore's, a cut removes keys."""

    extra_keys: Keys | None = None

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self.extra_keys = [key for key in self.extra_keys or [] if key[0] < n] or None


def marks(tokens: Sequence[int], keys: Iterable[tuple[int, int, bytes]] | None) -> list[Mark]:
    """Return each token with the keys that start at it.

    If the marks of two prompts agree up to n, their first n tokens are the same.
    """
    starts: dict[int, set[tuple[int, bytes]]] = {}
    for start, length, key in keys or ():
        starts.setdefault(start, set()).add((length, key))
    return [(int(t), frozenset(starts.get(i, ()))) for i, t in enumerate(tokens)]


def common(a: Sequence[Mark], b: Sequence[Mark]) -> int:
    """Return the number of marks on which two prompts agree, from the start."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class KeyedCache:
    """The prefixes, in whole pages, that were committed and are still cached."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefixes: set[tuple[Mark, ...]] = set()

    def commit(self, written: Sequence[Mark]) -> None:
        pages = len(written) // self.page_size
        self.prefixes.add(tuple(written[: pages * self.page_size]))

    def match(self, asked: Sequence[Mark]) -> int:
        """Return the cached tokens of a prompt, in whole pages."""
        best = max((common(each, asked) for each in self.prefixes), default=0)
        return best // self.page_size * self.page_size

    def hit(self, prompt: Sequence[Mark]) -> int:
        """Return the tokens that a new request reuses.

        The last page can be a partial hit; the last token is never reused.
        """
        return max((common(each, prompt[:-1]) for each in self.prefixes), default=0)
