# SPDX-License-Identifier: Apache-2.0
"""Whole pages of a replica as bytes: what all its devices have of a page, one behind the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import Place
from kvcore.backends.selection import place_of
from kvcore.backends.shards import arrays_of, tensors_of
from kvcore.snapshots.rows import Pools

__all__ = ["PageBytes"]


class PageBytes:
    """Read and write pages, or slots of states, of one replica.

    Parameters
    ----------
    pools : Pools
    replica : int
    arrays : list of array
        With a row of six axes for each page, of any strides: device by device and in one of these
        array by array.

    Attributes
    ----------
    size : int
        Bytes of a page, of all arrays.

    Notes
    -----
    The pages are held by who names them. On GPUs what is copied is ordered behind everything that
    uses the pools, and the host waits for it.
    """

    def __init__(self, pools: Pools, replica: int, arrays: list[Any]) -> None:
        self._pools = pools
        self._replica = replica
        # Bytes are moved as they are: the dtype does not matter.
        self._arrays = [array.view(f"u{array.itemsize}") for array in arrays]
        self._sizes = [math.prod(array.shape[1:]) * array.itemsize for array in arrays]
        self.size = sum(self._sizes)

    @classmethod
    def of_pages(cls, pools: Pools, replica: int) -> PageBytes:
        """Return the pages of a replica: K, V and their scales."""
        shards = pools.shards[replica]
        return cls(pools, replica, [array for shard in shards for array in arrays_of(shard)])

    @classmethod
    def of_states(cls, pools: Pools, replica: int) -> PageBytes:
        """Return the slots of its states: those of all groups, by group, name and device."""
        tp = pools.params.tensor_parallel_degree
        return cls(
            pools,
            replica,
            [
                array.reshape(len(array), 1, 1, 1, 1, -1)
                for group in pools.states
                for arrays in group.values()
                for array in arrays[replica * tp : (replica + 1) * tp]
            ],
        )

    def read(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy pages.

        Parameters
        ----------
        ids : int32 [n]

        Returns
        -------
        uint8 [n, size]
        """
        found = np.empty((len(ids), self.size), np.uint8)
        if not found.size:
            return found
        self._pools.enter(self._replica)
        begin = 0
        for array, size in zip(self._arrays, self._sizes, strict=True):
            place = place_of(None, {"pool": array})
            staged = place.empty((len(ids), *array.shape[1:]), array.dtype)
            _copy(place, array, staged, np.stack([ids, np.arange(len(ids))], axis=1))
            rows = place.to_host(staged).reshape(len(ids), -1).view(np.uint8)
            found[:, begin : begin + size] = rows
            begin += size
        return found

    def write(self, ids: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Fill pages, and wait until that is done.

        Parameters
        ----------
        ids : int32 [n]
            Each once.
        content : uint8 [n, size]
        """
        if not content.size:
            return
        self._pools.enter(self._replica)
        begin = 0
        for array, size in zip(self._arrays, self._sizes, strict=True):
            place = place_of(None, {"pool": array})
            rows = np.ascontiguousarray(content[:, begin : begin + size]).view(array.dtype)
            staged = place.from_host(rows.reshape(len(ids), *array.shape[1:]))
            _copy(place, staged, array, np.stack([np.arange(len(ids)), ids], axis=1))
            place.wait()
            begin += size


def _copy(place: Place, source: Any, target: Any, pairs: NDArray[Any]) -> None:
    wanted = place.index_array(np.ascontiguousarray(pairs, np.int64), "pairs")
    caches = (tensors_of(source), False), (tensors_of(target), False)
    place.transfer(*caches, wanted, (0, source.shape[2]), 0, 1)
