# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiles by architecture, head size and phase, in one table."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Settings", "settings_for"]

_LEAST_ROWS = 16  # of a matrix product


class Settings(NamedTuple):
    """Hold the sizes of a program.

    `block_m` query rows (tokens times heads), `block_n` tokens of a row at a time, so many warps,
    and so many tiles in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


#: Of at most so many elements of K: for decoding and drafts, for prompts. `block_m` is the most.
_BY_DIM: tuple[tuple[int, Settings, Settings], ...] = (
    (64, Settings(64, 64, 4, 3), Settings(128, 64, 4, 3)),
    (128, Settings(64, 64, 4, 3), Settings(128, 64, 8, 2)),
    (256, Settings(32, 32, 4, 2), Settings(64, 32, 4, 2)),
    (512, Settings(16, 32, 4, 2), Settings(32, 32, 8, 1)),
)
_WIDE = Settings(16, 16, 4, 1)  # products in float32, for exactness and not for speed
_MOST_DRAFT = 8  # tokens of a row, on average, that are no prompt


def settings_for(dim: int, group: int, tokens_per_row: float, *, is_wide: bool) -> Settings:
    """Return the sizes of a program.

    Parameters
    ----------
    dim : int
        Elements of K, or of V where those are more.
    group : int
        Query heads that share a head of K and V.
    tokens_per_row : float
        New tokens of a row, on average.
    is_wide : bool
        Whether products are taken in float32.
    """
    if is_wide:
        return _WIDE
    is_prompt = tokens_per_row > _MOST_DRAFT
    found = next(both for both in _BY_DIM if dim <= both[0] or both is _BY_DIM[-1])[1 + is_prompt]
    needed = math.ceil(tokens_per_row) * group
    block_m = min(found.block_m, 1 << max(_LEAST_ROWS - 1, needed - 1).bit_length())
    return found._replace(block_m=block_m)
