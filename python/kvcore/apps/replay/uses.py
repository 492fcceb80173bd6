# SPDX-License-Identifier: Apache-2.0
"""List the pages that each prompt uses, without a manager, as the input of the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.siblings import longest_partial_hits

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcore.apps.replay.workload import Workload

__all__ = ["MOST_PAGE_USES", "PageUses", "PageUsesError", "page_uses"]

MOST_PAGE_USES = 2**26  # of all prompts; a use takes about 80 bytes of memory
_PROGRESS_EVERY = 64

_Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]


class PageUsesError(ValueError):
    """Raised if the prompts have more than `MOST_PAGE_USES` pages."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PageUses:
    """List the whole pages of every prompt, in the order of the requests.

    Attributes
    ----------
    page_size : int
        Tokens per page.
    lengths : numpy.ndarray
        int64 ``[n]``, prompt tokens of each request.
    starts : numpy.ndarray
        int64 ``[n + 1]``, index of the first page of each request in `nodes`.
    nodes : numpy.ndarray
        int64 ``[m]``, number of each page in the prefix tree of all prompts: equal for prompts
        that are equal up to the end of that page.
    partial_hits : numpy.ndarray
        int64 ``[n]``, maximum tokens that a request could copy from a partly equal page, for any
        set of cached pages.
    best_hits : numpy.ndarray
        int64 ``[n]``, tokens that a request finds if no page is ever evicted.
    """

    page_size: int
    lengths: _Ints
    starts: _Ints
    nodes: _Ints
    partial_hits: _Ints
    best_hits: _Ints

    @cached_property
    def requests(self) -> _Ints:
        """int64 ``[m]``, the request of each entry of `nodes`."""
        return np.repeat(np.arange(len(self.lengths)), np.diff(self.starts))

    @cached_property
    def can_hit(self) -> NDArray[np.bool_]:
        """Bool ``[m]``, true if a page can be a hit: it is without the last token of its prompt."""
        levels = np.arange(len(self.nodes)) - self.starts[self.requests]
        return (levels + 1) * self.page_size < self.lengths[self.requests]

    @cached_property
    def order(self) -> _Ints:
        """int64 ``[m]``, indices into `nodes`, sorted by node and within a node by request."""
        return np.argsort(self.nodes, kind="stable")


def page_uses(
    workload: Workload, page_size: int, *, on_progress: Callable[[int], None] | None = None
) -> PageUses:
    """List the pages of all prompts of a workload.

    Parameters
    ----------
    workload : Workload
        The requests. Every prompt is read once; a prompt that may share a part of a page with
        another prompt is read twice.
    page_size : int
        Tokens per page.
    on_progress : callable, optional
        Called from time to time with the number of finished requests.

    Raises
    ------
    PageUsesError
        The prompts have more than `MOST_PAGE_USES` whole pages.

    Notes
    -----
    A 64-bit key of all tokens up to its end identifies a page. Costs O(tokens + m log m).
    """
    lengths = workload.prompt_lengths
    starts = np.concatenate(([0], np.cumsum(lengths // page_size)))
    if starts[-1] > MOST_PAGE_USES:
        raise PageUsesError(
            f"{len(lengths):,} requests have {starts[-1]:,} pages of {page_size:,} tokens, an "
            f"optimum is computed for at most {MOST_PAGE_USES:,}; expected larger pages or a limit"
        )
    keys = _keys(workload, page_size, starts, on_progress)
    _, first, nodes = np.unique(keys, return_index=True, return_inverse=True)
    first_uses = np.repeat(np.arange(len(lengths)), np.diff(starts))[first]
    most, best = longest_partial_hits(workload, page_size, starts, nodes, first_uses)
    return PageUses(
        page_size=page_size,
        lengths=lengths,
        starts=starts,
        nodes=nodes,
        partial_hits=most,
        best_hits=best,
    )


def _keys(
    workload: Workload,
    page_size: int,
    starts: _Ints,
    on_progress: Callable[[int], None] | None,
) -> _Words:
    """Return a key for each whole page: a sum of the pages up to it, weighted by their places."""
    longest = int(np.diff(starts).max(initial=0))
    draw = np.random.default_rng(0)
    in_page = draw.integers(1, 2**64 - 1, page_size, np.uint64)
    in_prompt = draw.integers(1, 2**64 - 1, longest, np.uint64) | np.uint64(1)
    keys = np.empty(int(starts[-1]), np.uint64)
    for index in range(len(workload)):
        count = int(starts[index + 1] - starts[index])
        if count:
            tokens = workload.prompt(index)[: count * page_size]
            pages = _mixed(tokens.astype(np.uint64)).reshape(count, page_size)
            sums = np.einsum("ij,j->i", pages, in_page)
            keys[starts[index] : starts[index + 1]] = np.cumsum(_mixed(sums) * in_prompt[:count])
        if on_progress is not None and index % _PROGRESS_EVERY == 0:
            on_progress(index)
    return keys


def _mixed(words: _Words) -> _Words:
    """Mix the bits of each word; different words stay different."""
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    return words
