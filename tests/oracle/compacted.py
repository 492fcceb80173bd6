# SPDX-License-Identifier: Apache-2.0
"""The expected result of ops.compact_table, in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

NOTHING = 2**32 - 1


def compacted(table: Any, lengths: Any, offsets: Any, kept: Iterable[int]) -> list[Any]:
    """Return table, lengths and row offsets: the rows `kept` first, then empty rows."""
    rows = list(kept)
    pages, left = np.full_like(table, NOTHING if table.dtype == np.uint32 else -1), lengths * 0
    pages[: len(rows)], left[: len(rows)] = table[rows], lengths[rows]
    added = np.zeros(len(lengths), np.int64)
    added[: len(rows)] = np.diff(offsets.astype(np.int64))[rows]
    return [pages, left, np.concatenate([[0], np.cumsum(added)]).astype(offsets.dtype)]
