# SPDX-License-Identifier: Apache-2.0
"""Find partial hits: the leading tokens of a page that it shares with another page."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcore.apps.replay.workload import Workload

__all__ = ["longest_partial_hits"]

_Ints = NDArray[np.int64]
_ROOT = -1
_NO_NODE = -1


def longest_partial_hits(
    workload: Workload, page_size: int, starts: _Ints, nodes: _Ints, first_uses: _Ints
) -> tuple[_Ints, _Ints]:
    """Bound the tokens that each request can take from the cache.

    Parameters
    ----------
    workload : Workload
        The requests.
    page_size : int
        Tokens per page.
    starts, nodes : numpy.ndarray
        As in `PageUses`.
    first_uses : numpy.ndarray
        int64 ``[nodes]``, the first request with the page.

    Returns
    -------
    most, best : numpy.ndarray
        int64 ``[n]``: the maximum tokens of a partial hit, at any page of the prompt; the tokens
        of the whole hit, including its partial end, if no page is ever evicted.
    """
    entries = _Entries(workload.prompt_lengths, page_size, starts, nodes)
    lengths = workload.prompt_lengths
    is_old = first_uses[nodes] < np.repeat(np.arange(len(lengths)), np.diff(starts))
    whole = _leading(is_old, starts, (lengths - 1) // page_size)
    most = np.zeros(len(lengths), np.int64)
    best = whole * page_size
    if page_size == 1:
        return most, best
    siblings: dict[int, _Siblings] = {}
    for index, below in entries.that_meet_others():
        tokens = workload.prompt(index)
        for level, parent, is_whole in below:
            place = level * page_size
            page = tokens[place : place + page_size].tobytes()
            known = siblings.setdefault(parent, _Siblings())
            limit = len(tokens) - 1 - place
            shared = min(known.longest_shared(page, may_be_itself=limit < page_size), limit)
            most[index] = max(most[index], shared)
            if level == whole[index]:
                best[index] += shared
            if is_whole:
                known.add(page)
    return most, best


def _leading(is_old: NDArray[np.bool_], starts: _Ints, limits: _Ints) -> _Ints:
    """Count the pages of each request before its first new page, up to its limit."""
    lengths = np.diff(starts)
    new = np.flatnonzero(~is_old)
    following = np.append(new, len(is_old))[np.searchsorted(new, starts[:-1])]
    counted: _Ints = np.minimum(np.minimum(following - starts[:-1], lengths), limits)
    return counted


class _Entries:
    """Every page of every prompt, including partial last pages, with its parent."""

    def __init__(self, lengths: _Ints, page_size: int, starts: _Ints, nodes: _Ints) -> None:
        counts = np.diff(starts)
        requests = np.repeat(np.arange(len(lengths)), counts)
        levels = np.arange(len(nodes)) - np.repeat(starts[:-1], counts)
        tails = np.flatnonzero(lengths % page_size)
        shifted = np.concatenate(([_ROOT], nodes))
        parents = np.concatenate((shifted[:-1], shifted[starts[1:]][tails]))
        self._requests = np.concatenate((requests, tails))
        self._levels = np.concatenate((levels, counts[tails]))
        self._parents = np.where(self._levels == 0, _ROOT, parents)
        self._nodes = np.concatenate((nodes, np.full(len(tails), _NO_NODE)))
        self._is_last = (self._levels + 1) * page_size >= lengths[self._requests]

    def that_meet_others(self) -> Iterator[tuple[int, list[tuple[int, int, bool]]]]:
        """Yield each request with the pages that may share leading tokens with another page.

        A page is a tuple: its level, its parent, and true if it is whole.
        """
        found = np.flatnonzero(self._has_company()[self._parents + 1])
        found = found[np.argsort(self._requests[found], kind="stable")]
        requests = self._requests[found]
        rows = zip(
            self._levels[found].tolist(),
            self._parents[found].tolist(),
            (self._nodes[found] != _NO_NODE).tolist(),
            strict=True,
        )
        for index, count in zip(*np.unique(requests, return_counts=True), strict=True):
            yield int(index), list(islice(rows, int(count)))

    def _has_company(self) -> NDArray[np.bool_]:
        """Return for each parent, the root first, whether a partial hit may end below it.

        This is true if it has several children, or if prompts end in its only child.
        """
        whole = self._nodes != _NO_NODE
        parents = self._parents + 1
        highest = int(parents.max(initial=0)) + 1
        _, first = np.unique(self._nodes[whole], return_index=True)
        children = np.bincount(parents[whole][first], minlength=highest)
        ends = np.bincount(parents[self._is_last], minlength=highest)
        company: NDArray[np.bool_] = (children > 1) | ((children > 0) & (ends > 0))
        return company


@dataclass(slots=True)
class _Siblings:
    """Pages with the same parent, in the order of their bytes."""

    pages: list[bytes] = field(default_factory=list)

    def longest_shared(self, page: bytes, *, may_be_itself: bool) -> int:
        """Return the maximum number of leading tokens that `page` shares with a sibling."""
        at = bisect_left(self.pages, page)
        behind = at
        if not may_be_itself and at < len(self.pages) and self.pages[at] == page:
            behind += 1
        neighbours = self.pages[max(at - 1, 0) : at] + self.pages[behind : behind + 1]
        return max((_shared(page, each) for each in neighbours), default=0)

    def add(self, page: bytes) -> None:
        """Add a page if it is new."""
        at = bisect_left(self.pages, page)
        if at == len(self.pages) or self.pages[at] != page:
            self.pages.insert(at, page)


def _shared(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    a, b = (np.frombuffer(each[:length], np.int32) for each in (one, other))
    differing = a != b
    first = int(differing.argmax())
    return first if differing[first] else length // a.itemsize
