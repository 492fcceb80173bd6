# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiles by architecture, head size, kind of pool and phase, in one table."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["MOST_DRAFT", "TABLE", "Row", "Settings", "no_more_than_needed", "settings_for"]

MOST_DRAFT = 8  # new tokens of a row, on average; a row with more is a prompt
_LEAST_M = 16  # rows of a matrix product
_MOST_NVFP4 = 32  # tokens of a tile in nvfp4, whose codes take more registers than other codes


class Settings(NamedTuple):
    """Hold the sizes of a program.

    `block_m` is the maximum of query rows (tokens times heads), `block_n` the tokens of a tile,
    `warps` the number of warps, `stages` the number of tiles in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


class Row(NamedTuple):
    """Hold the settings for architectures from `arch` on and at most `dim` elements of a head.

    `has_codes` is for pools of float8 or int8, whose tiles need registers for decoding. `decode`
    also serves drafts; `prompt` is for more than `MOST_DRAFT` tokens per row.
    """

    arch: int
    dim: int
    has_codes: bool
    decode: Settings
    prompt: Settings


#: For 9.0 and heads of 128 elements in 16 bits: the fastest settings on an H100. All other settings
#: compile without register spills in their loops, and are not measured.
TABLE: tuple[Row, ...] = (
    Row(80, 64, False, Settings(64, 64, 4, 3), Settings(128, 64, 8, 2)),
    Row(80, 64, True, Settings(64, 64, 4, 3), Settings(64, 64, 8, 2)),
    Row(80, 128, False, Settings(64, 64, 4, 3), Settings(64, 64, 8, 2)),
    Row(80, 128, True, Settings(64, 64, 4, 2), Settings(64, 32, 8, 2)),
    Row(80, 256, False, Settings(32, 32, 4, 2), Settings(64, 32, 8, 2)),
    Row(80, 256, True, Settings(32, 32, 8, 2), Settings(32, 32, 8, 2)),
    Row(80, 512, False, Settings(32, 32, 8, 2), Settings(32, 32, 8, 2)),
    Row(80, 512, True, Settings(16, 16, 8, 2), Settings(16, 16, 8, 2)),
    Row(90, 128, False, Settings(64, 32, 4, 3), Settings(128, 32, 4, 3)),
    Row(90, 128, True, Settings(64, 32, 4, 3), Settings(128, 64, 8, 2)),
    Row(100, 128, False, Settings(64, 32, 4, 3), Settings(64, 64, 8, 2)),
    Row(100, 128, True, Settings(64, 64, 4, 2), Settings(64, 64, 8, 2)),
    Row(90, 512, True, Settings(16, 32, 8, 2), Settings(16, 32, 8, 2)),
)
_WIDE = Settings(16, 16, 4, 1)  # products in float32, for exactness and not for speed


def _arch(row: Row) -> int:
    return row.arch


def settings_for(
    arch: int,
    dim: int,
    *,
    group: int,
    tokens_per_row: float,
    has_codes: bool,
    is_wide: bool,
    is_nvfp4: bool = False,
    measured: tuple[Row, ...] = (),
) -> Settings:
    """Return the sizes of a program.

    Parameters
    ----------
    arch : int
        Compute capability, 90 for 9.0.
    dim : int
        Elements of K, or of V if V has more.
    group : int
        Query heads that share a head of K and V.
    tokens_per_row : float
        New tokens of a row, on average.
    has_codes : bool
        True if pools are float8, int8 or nvfp4.
    is_wide : bool
        True if products are in float32.
    is_nvfp4 : bool
        True if pools are nvfp4, for which no row is measured.
    measured : tuple of Row
        Measured rows. The rows of this architecture come before the table.

    Returns
    -------
    Settings
        Settings with no more query rows than a row of the batch has.
    """
    if is_wide:
        return _WIDE
    known = (*(row for row in measured if row.arch == arch), *TABLE)
    fitting = [row for row in known if row.dim >= dim and row.has_codes == has_codes]
    narrow = min(row.dim for row in fitting)
    rows = [row for row in fitting if row.dim == narrow]
    row = max((row for row in rows if row.arch <= arch), key=_arch, default=rows[0])
    found = row.prompt if tokens_per_row > MOST_DRAFT else row.decode
    if is_nvfp4:
        found = found._replace(block_n=min(found.block_n, _MOST_NVFP4))
    return no_more_than_needed(found, group, tokens_per_row)


def no_more_than_needed(settings: Settings, group: int, tokens_per_row: float) -> Settings:
    """Return settings with no more query rows than a row of the batch has."""
    needed = math.ceil(tokens_per_row) * group
    block_m = min(settings.block_m, 1 << max(_LEAST_M - 1, needed - 1).bit_length())
    return settings._replace(block_m=block_m)
