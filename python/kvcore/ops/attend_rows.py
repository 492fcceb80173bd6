# SPDX-License-Identifier: Apache-2.0
"""Attend over the plain arrays of a paged cache in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.ops.attention import attention
from kvcore.ops.batch import PagedBatch
from kvcore.support.arguments import integer, number

__all__ = ["AttentionOptions", "attend_rows"]

_Array = NDArray[Any]


class AttentionOptions(NamedTuple):
    """Hold the arguments of ``attend_kv`` that are not arrays."""

    scale: float
    window: int | None
    soft_cap: float | None
    threads: int

    def checked(self) -> AttentionOptions:
        """Return the options as checked numbers; raise ValueError or TypeError for bad values."""
        scale = number("scale", self.scale)
        cap = None if self.soft_cap is None else number("soft_cap", self.soft_cap)
        if not isfinite(scale):
            raise ValueError(f"scale is {scale}, must be finite")
        if cap is not None and not (cap > 0 and isfinite(cap)):
            raise ValueError(f"soft_cap is {cap}, must be finite and above 0; None for no cap")
        window = None if self.window is None else integer("window", self.window, 1, 2**31 - 1)
        threads = integer("threads", self.threads, 1, 1024)
        return AttentionOptions(scale, window, cap, threads)


def attend_rows(
    cache: Sequence[_Array], sequence_idx: int | None, queries: _Array, options: AttentionOptions
) -> _Array:
    """Attend as ``attend_kv``, over pools, table and lengths in numpy."""
    keys, values, table, lengths = cache
    _require_table(table, lengths)
    if sequence_idx is None:
        return _attend_batch(cache, queries, options)
    row = integer("sequence_idx", sequence_idx)
    if not 0 <= row < len(table):
        raise IndexError(f"sequence_idx is {row}, must be 0 .. {len(table) - 1}")
    count = len(queries)
    if lengths[row] < count:
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, queries of its last {count} are given; append "
            f"their K and V first"
        )
    some = slice(row, row + 1)
    return _attend((keys, values, table[some], lengths[some]), count, queries, options)


def _require_table(table: _Array, lengths: _Array) -> None:
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        raise ValueError(
            f"block_table has shape {table.shape} and seq_lengths {lengths.shape}, must be (batch, "
            f"max_blocks) and (batch,)"
        )
    for name, array in (("block_table", table), ("seq_lengths", lengths)):
        if array.dtype != np.int32:
            raise TypeError(f"{name} has dtype {array.dtype}, must be int32")
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"seq_lengths has {lengths.min()}, must be 0 or more")


def _attend_batch(cache: Sequence[_Array], queries: _Array, options: AttentionOptions) -> _Array:
    keys, values, table, lengths = cache
    if len(queries) != len(table):
        raise ValueError(
            f"queries has {len(queries)} tokens, must have one for each of {len(table)} rows"
        )
    some = lengths > 0
    if some.all():
        return _attend(cache, 1, queries, options)
    seen = _attend((keys, values, table[some], lengths[some]), 1, queries[some], options)
    out = np.zeros(queries.shape, queries.dtype)
    out[some] = seen
    return out


def _attend(
    cache: Sequence[_Array], new_tokens: int, queries: _Array, options: AttentionOptions
) -> _Array:
    keys, values, table, lengths = cache
    # As uint32, the entry -1 of an unused column is the largest id; no query reads its page.
    batch = PagedBatch(
        keys,
        values,
        np.ascontiguousarray(table).view(np.uint32),
        (lengths - new_tokens).astype(np.uint32),
    )
    offsets = np.arange(len(table) + 1, dtype=np.uint32) * np.uint32(new_tokens)
    result: _Array = attention(batch, 0, queries, offsets, **options._asdict())
    return result
