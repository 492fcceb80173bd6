# SPDX-License-Identifier: Apache-2.0
"""The bytes of the host tier: what moves pages between it and the pools."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore._core import HostStore
from kvcore.device import Device
from kvcore.pools import Shard, tensors_of_shards

__all__ = ["STORE", "HostMover", "Mover", "make_mover"]

#: Direction of an order: from the device to the host.
STORE = 0


class Mover(Protocol):
    """Move pages between the pools of a manager and its host tier."""

    def run(self, orders: NDArray[np.int32]) -> None:
        """Copy pages, or put the copies in front of everything that uses the pages later.

        Parameters
        ----------
        orders : int32 [n, 4]
            Replica, direction (0: device to host, 1: back), page of the pool, page of the host
            tier. Of one call all have the same direction, and no destination is named twice.
        """


class HostMover:
    """Copy pages between pools in host memory and the host tier at once.

    Parameters
    ----------
    shards : list of list of Shard
        The pools by replica and device in it.
    num_pages : int
        Host pages of each replica, at least 1.
    threads : int
        Threads to use, the caller's included.

    Raises
    ------
    CapacityError
        So much memory cannot be mapped.

    Notes
    -----
    The memory is mapped, not touched: it becomes present as pages are stored. ``run`` costs the
    bytes, and other Python threads run meanwhile.
    """

    def __init__(self, shards: list[list[Shard]], num_pages: int, threads: int = 1) -> None:
        self.stores = [HostStore(num_pages, tensors_of_shards(replica)) for replica in shards]
        self.threads = threads

    def run(self, orders: NDArray[np.int32]) -> None:
        """Copy pages now; orders as Mover describes them."""
        is_store = bool(orders[0, 1] == STORE)
        for replica in np.unique(orders[:, 0]):
            store = self.stores[replica]
            copy = store.store if is_store else store.load
            copy(orders[orders[:, 0] == replica, 2:], self.threads)


def make_mover(
    shards: list[list[Shard]], devices: tuple[Device, ...], num_pages: int, gpus: Any
) -> Mover | None:
    """Answer what moves the pages of a host tier, None where there is none."""
    if not num_pages:
        return None
    if gpus is None:
        return HostMover(shards, num_pages)
    from kvcore.gpu_swap import GpuMover

    return GpuMover(shards, devices, num_pages, gpus)
