# SPDX-License-Identifier: Apache-2.0
"""Copies of pages within the pools of a manager on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda.place import ManagerPlace
from kvcore.backends.cuda.pools import GpuPools
from kvcore.backends.protocol import Shard
from kvcore.backends.shards import tensors_of

__all__ = ["GpuCopier"]


class GpuCopier:
    """Copy pages within pools on GPUs: one launch for each array of a replica.

    Parameters
    ----------
    shards : list of list of Shard
        The pools, by replica and by device of the replica.
    pools : GpuPools
    """

    def __init__(self, shards: list[list[Shard]], pools: GpuPools) -> None:
        self._shards = shards
        self._pools = pools

    def run(self, copies: NDArray[np.int32]) -> None:
        """Enqueue the copies on the current stream of each device."""
        for replica in np.unique(copies[:, 0]):
            self._pools.enter(replica)
            wanted = copies[copies[:, 0] == replica, 1:].astype(np.int64, order="C")
            for part in (part for shard in self._shards[replica] for part in shard):
                if part is not None:
                    _copy(part, wanted)


def _copy(part: Any, copies: NDArray[np.int64]) -> None:
    """Copy within an array of a pool, or within K and V."""
    arrays = part if isinstance(part, tuple) else (part,)
    place = ManagerPlace(arrays[0].data.device_id)
    cache = [tensor for array in arrays for tensor in tensors_of(array)]
    place.copy_partial(cache, place.index_array(copies, "copies"), threads=1)
