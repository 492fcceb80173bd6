# SPDX-License-Identifier: Apache-2.0
"""What copies pages within the pools of a manager."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore._core import PageCopier
from kvcore.ops.transfer import copy_partial
from kvcore.pools import Shard, tensors_of_shards

__all__ = ["Copier", "GpuCopier", "make_copier"]


class Copier(Protocol):
    """Copy the starts of pages within the pools of a manager."""

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy pages, or put the copies in front of everything that uses the pages later.

        Parameters
        ----------
        copies : int32 [n, 4]
            Replica, source page, destination page, tokens; in any order. No page is a source and a
            destination, and none is a destination twice.
        """


class GpuCopier:
    """Copy pages within pools on GPUs: one launch for each array of a replica.

    Parameters
    ----------
    shards : list of list of Shard
        The pools by replica and device in it.
    gpus : GpuPools
    """

    def __init__(self, shards: list[list[Shard]], gpus: Any) -> None:
        self._shards = shards
        self._gpus = gpus

    def run(self, copies: NDArray[np.int32]) -> None:
        """Enqueue the copies on cupy's current stream of each device."""
        for replica in np.unique(copies[:, 0]):
            self._gpus.enter(replica)
            wanted = copies[copies[:, 0] == replica, 1:]
            for part in (part for shard in self._shards[replica] for part in shard):
                if part is not None:
                    copy_partial(part, wanted)


def make_copier(shards: list[list[Shard]], gpus: Any) -> Copier | None:
    """Answer what copies pages within these pools, None where there are none."""
    if shards[0][0][0] is None:
        return None
    if gpus is not None:
        return GpuCopier(shards, gpus)
    return PageCopier([tensors_of_shards(replica) for replica in shards])
