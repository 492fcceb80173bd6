# SPDX-License-Identifier: Apache-2.0
"""Frozen results of queries: a reservation plan, a shared prefix, a run of the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixRun", "ReservePlan", "SharedPrefix"]


@dataclass(frozen=True, slots=True)
class ReservePlan:
    """Describe the effects that ``maybe_reserve`` would have now.

    Attributes
    ----------
    hit_tokens : int
        Tokens that the request would take from the prefix cache, including copied tokens.
    new_pages : int
        Pages that the call would allocate.
    evicted_pages : int
        Cached pages that the call would evict for the new pages.
    copied_tokens : int
        Part of `hit_tokens`: tokens copied out of a cached page of which only the first tokens
        match.
    fits : bool
        False if the pages do not fit now, or can never fit.
    active_idx : int or None
        If layers keep a state: the end of the tokens that would run next. The end is cut at the
        position where a checkpoint is due. None if no layer keeps a state.
    evictable_hit_pages : int
        Pages of the hit that are evictable now: they count as free until the request holds them.
        If the request had no pages before the call, its replica has
        ``new_pages + evictable_hit_pages`` fewer pages available after the call.
    """

    hit_tokens: int
    new_pages: int
    evicted_pages: int
    copied_tokens: int
    fits: bool
    active_idx: int | None = None
    evictable_hit_pages: int = 0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """List the rows of a batch that hold the same leading pages.

    Attributes
    ----------
    rows : tuple of int
        Rows of the replica's part of the batch, ascending, at least two.
    num_tokens : int
        Tokens of the shared pages that all of the rows have written.
    replica : int
        The replica that the rows are on.
    """

    rows: tuple[int, ...]
    num_tokens: int
    replica: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRun:
    """Describe a run of pages in the prefix tree, without a branch inside.

    Attributes
    ----------
    parent : int or None
        Index, in the same list, of the run that this run continues; None if it begins a prefix.
    start : int
        Number of pages before this run in its prefix.
    tokens : int32 or int64 [n * page_size]
        Token ids as the tree stores them: tokens with extra keys have ids below -2**30. In a tree
        of pairs the array has 1 more token: its first token begins the first pair.
    pages : int32 [n]
    extra_key, cache_salt : str or None
        Namespace.
    is_pinned : bool
        Whether a pin protects it.
    """

    parent: int | None
    start: int
    tokens: NDArray[np.int32] | NDArray[np.int64]
    pages: NDArray[np.int32]
    extra_key: str | None
    cache_salt: str | None
    is_pinned: bool
