# SPDX-License-Identifier: Apache-2.0
"""What a prefix tree is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixRun"]


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
