# SPDX-License-Identifier: Apache-2.0
"""One layer's keys or values as the sequences of a batch see them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import require_own_memory
from kvcore.integrations.max.elements import host_copy, read_element, write_element
from kvcore.support.arguments import integer, number
from kvcore.support.dtypes import narrowed

__all__ = [
    "ContinuousBatchingKVCache",
    "Guard",
    "KVCacheLayer",
    "PagedKVCacheLayer",
    "require_index",
]

#: Raises when batch row `row` no longer has `page` at `column` of its table: (row, column, page).
Guard = Callable[[int, int, int], None]


def require_index(name: str, value: SupportsIndex, count: int, what: str) -> int:
    """Return the index as an int; IndexError outside ``0 .. count - 1``, TypeError for no int."""
    index = integer(name, value)
    if not 0 <= index < count:
        raise IndexError(f"{name} is {index}, must be at least 0 and below {count}, the {what}")
    return index


class KVCacheLayer(ABC):
    """See the keys or the values of one layer, without owning or copying them.

    Parameters
    ----------
    blocks : array [num_blocks, block_size, heads, dim]
        The layer's part of the pool.
    cache_lengths : uint32 [B]
        Tokens of each sequence before this step.
    lookup_table : uint32
        The blocks of each sequence; ids from ``num_blocks`` on mean "unassigned".
    max_seq_length, max_cache_length : int
        Longest count of new tokens; longest of cached and new together.
    scales : float32 [num_blocks, block_size, heads, groups], optional
        A stored element times the scale of its group is the value.
    guard : callable, optional
        Called with (row, column, page) before each access; raises where the row has lost it.

    Notes
    -----
    ``load`` and ``store`` are for looking and for tests: one element per call, and on a GPU the
    host waits for each. Kernels take ``blocks``.
    """

    __slots__ = (
        "_guard",
        "_max_cache_length",
        "_max_seq_length",
        "blocks",
        "cache_lengths",
        "lookup_table",
        "scales",
    )

    def __init__(
        self,
        blocks: NDArray[Any],
        cache_lengths: NDArray[np.uint32],
        lookup_table: NDArray[np.uint32],
        max_seq_length: int,
        max_cache_length: int,
        scales: NDArray[np.float32] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.blocks = blocks
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.scales = scales
        self._max_seq_length = max_seq_length
        self._max_cache_length = max_cache_length
        self._guard = guard

    def load(
        self, bs: SupportsIndex, head: SupportsIndex, tok: SupportsIndex, dim: SupportsIndex
    ) -> Any:
        """Return one element.

        Parameters
        ----------
        bs : int
            Row of the batch.
        head : int
        tok : int
            Position in the sequence, counted in tokens from its start.
        dim : int

        Returns
        -------
        scalar
            Of the pool's dtype; float32, multiplied by its scale, where there are scales.

        Raises
        ------
        IndexError
            An index out of range or negative, or a position without a block.
        InvalidHandleError
            The sequence was released, or has lost the block, since the view was made.
        """
        place = self._locate(bs, head, tok, dim)
        scale = self._scale(place)
        stored = read_element(self.blocks, place)
        return stored if scale is None else np.float32(stored) * scale

    def store(
        self,
        bs: SupportsIndex,
        head: SupportsIndex,
        tok: SupportsIndex,
        dim: SupportsIndex,
        value: SupportsFloat,
    ) -> None:
        """Write one element, divided by its scale where there are scales, to the nearest.

        Beyond the range of fp8 and int8 the largest finite value is stored.

        Raises
        ------
        IndexError, InvalidHandleError
            As for ``load``.
        ValueError
            A scale that is 0 or not finite: write the scale first. NaN into int8. A pool that is
            read-only, or whose elements share memory.
        TypeError
            A value that is no number, an index that is no int.
        """
        place = self._locate(bs, head, tok, dim)
        scale = self._scale(place)
        stored = number("value", value)
        require_own_memory(self.blocks, "blocks")
        if scale is not None:
            if scale == 0 or not math.isfinite(scale):
                raise ValueError(
                    f"the scale at bs {bs}, head {head}, tok {tok}, dim {dim} is {scale}, must be "
                    f"finite and not 0; write it into the view's scales first"
                )
            stored /= float(scale)
        write_element(self.blocks, place, narrowed(stored, self.blocks.dtype))

    def cache_length(self, batch_idx: SupportsIndex) -> int:
        """Return the tokens that a sequence held before this step; IndexError out of range."""
        row = require_index("batch_idx", batch_idx, len(self.cache_lengths), "rows of the batch")
        return int(read_element(self.cache_lengths, (row,)))

    def empty_cache(self) -> bool:
        """Tell whether no sequence of the batch held a token before this step."""
        return not host_copy(self.cache_lengths).any()

    def max_prompt_length(self) -> int:
        """Return the longest count of new tokens in this step."""
        return self._max_seq_length

    def max_context_length(self) -> int:
        """Return the longest of cached and new tokens together."""
        return self._max_cache_length

    @abstractmethod
    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        """Return the table's column, the page there and the place inside it."""

    def _locate(
        self, bs: SupportsIndex, head: SupportsIndex, tok: SupportsIndex, dim: SupportsIndex
    ) -> tuple[int, int, int, int]:
        num_blocks, _, heads, width = self.blocks.shape
        row = require_index("bs", bs, len(self.cache_lengths), "rows of the batch")
        column, page, offset = self._entry(row, tok)
        if page >= num_blocks:
            raise IndexError(
                f"tok {tok} of row {row} has no block: entry {column} of its table is {page}, "
                f"the pool has {num_blocks} blocks; reserve the position first"
            )
        place = (
            page,
            offset,
            require_index("head", head, heads, "heads"),
            require_index("dim", dim, width, "elements of a row"),
        )
        if self._guard is not None:
            self._guard(row, column, page)
        return place

    def _scale(self, place: tuple[int, int, int, int]) -> np.float32 | None:
        if self.scales is None:
            return None
        per_group = self.blocks.shape[3] // self.scales.shape[3]
        scale: np.float32 = read_element(self.scales, (*place[:3], place[3] // per_group))
        return scale

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(blocks={self.blocks.shape} {self.blocks.dtype}, "
            f"rows={len(self.cache_lengths)})"
        )


class ContinuousBatchingKVCache(KVCacheLayer):
    """See one layer's keys or values where a sequence has one slot; table uint32 [B]."""

    __slots__ = ()

    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        offset = require_index("tok", tok, self.blocks.shape[1], "tokens of a slot")
        return 0, int(read_element(self.lookup_table, (row,))), offset


class PagedKVCacheLayer(KVCacheLayer):
    """See one layer's keys or values where a sequence has pages; table uint32 [B, pages]."""

    __slots__ = ()

    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        page_size = self.blocks.shape[1]
        room = self.lookup_table.shape[1] * page_size
        position = require_index("tok", tok, room, "tokens that the table has columns for")
        column, offset = divmod(position, page_size)
        return column, int(read_element(self.lookup_table, (row, column))), offset
