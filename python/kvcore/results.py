# SPDX-License-Identifier: Apache-2.0
"""Frozen results of queries: a plan of a reservation, a shared prefix, a run of the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixRun", "ReservePlan", "SharedPrefix"]


@dataclass(frozen=True, slots=True)
class ReservePlan:
    """Tell what ``maybe_reserve`` would do now.

    Attributes
    ----------
    hit_tokens : int
        Tokens that would be taken from the prefix cache, copied ones included.
    new_pages : int
        Pages that would be allocated.
    evicted_pages : int
        Cached pages that would be given up for them.
    copied_tokens : int
        Of `hit_tokens`, those copied out of a page that is equal in part.
    fits : bool
        False when the pages cannot be had, now or ever.
    active_idx : int or None
        Where layers keep a state: the end of what would run next, which is cut where a checkpoint
        is due. None without such layers.
    evictable_hit_pages : int
        Of the hit, pages that are evictable now: they count as free until the request has them. So
        its replica has `new_pages` and these fewer afterwards, for a request without pages before.
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
    """Tell which rows of a batch hold the same leading pages.

    Attributes
    ----------
    rows : tuple of int
        Rows of the replica's part of the batch, ascending, at least two.
    num_tokens : int
        Tokens of those pages that all of the rows have written.
    replica : int
        The replica that the rows are on.
    """

    rows: tuple[int, ...]
    num_tokens: int
    replica: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefixRun:
    """A run of pages that only go on together.

    Attributes
    ----------
    parent : int or None
        Index, in the same list, of the run that it continues; None where it begins a prefix.
    start : int
        Pages in front of it.
    tokens : int32 or int64 [n * page_size]
        As the tree has them: under extra keys they are ids below -2**30. In a tree of pairs one
        more: the first one begins the first pair.
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
