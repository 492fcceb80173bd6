# SPDX-License-Identifier: Apache-2.0
"""Batches of several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["by_replica", "data_parallel_splits"]

Item = TypeVar("Item")


def data_parallel_splits(homes: Sequence[int], num_replicas: int) -> NDArray[np.int64]:
    """See ``PagedKVCacheManager.get_data_parallel_splits``; `homes`: the replica of each row."""
    rows = np.asarray(homes, dtype=np.int64)
    if np.any(rows[1:] < rows[:-1]):
        row = int(np.argmax(rows[1:] < rows[:-1])) + 1
        raise ValueError(
            f"row {row} of the batch is on replica {rows[row]}, behind one of replica "
            f"{rows[row - 1]}; sort the batch by get_replica"
        )
    return np.searchsorted(rows, np.arange(num_replicas + 1)).astype(np.int64)


def by_replica(items: Sequence[Item], homes: Sequence[int], num_replicas: int) -> list[list[Item]]:
    """Return the items of each replica, in their order."""
    parts: list[list[Item]] = [[] for _ in range(num_replicas)]
    for item, home in zip(items, homes, strict=True):
        parts[home].append(item)
    return parts
