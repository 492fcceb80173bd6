# SPDX-License-Identifier: Apache-2.0
"""The host tier of pools in host memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcore._core import HostStore
from kvcore.backends.protocol import STORE, Shard
from kvcore.backends.shards import tensors_of_shards

__all__ = ["HostMover"]


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
    The memory is mapped; a thread makes it present 1 GiB ahead of its use. ``run`` costs the bytes,
    and other Python threads run meanwhile.
    """

    def __init__(self, shards: list[list[Shard]], num_pages: int, threads: int = 1) -> None:
        self.stores = [HostStore(num_pages, tensors_of_shards(replica)) for replica in shards]
        self.threads = threads

    def memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the host pages of a replica, [num_pages, page_bytes]."""
        return self.stores[replica].memory

    def wait(self, replica: int) -> None:
        """Return at once: copies are done when ``run`` returns."""

    def expect(self, replica: int, last: int) -> None:
        """As of Mover."""
        self.stores[replica].expect(last)

    def run(self, orders: NDArray[np.int32]) -> int:
        """Copy pages now; orders as Mover describes them."""
        is_store = bool(orders[0, 1] == STORE)
        for replica in np.unique(orders[:, 0]):
            store = self.stores[replica]
            copy = store.store if is_store else store.load
            copy(orders[orders[:, 0] == replica, 2:], self.threads)
        return 0
