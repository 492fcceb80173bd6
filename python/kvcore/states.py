# SPDX-License-Identifier: Apache-2.0
"""The memory of layers that keep a state: arrays by group, name and device, and their copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import Copier, Mover, Shard
from kvcore.backends.selection import backend_of
from kvcore.device import Device
from kvcore.params import KVCacheParams
from kvcore.sizing import batch_per_replica, checkpoints_per_replica
from kvcore.support.arguments import integer
from kvcore.support.dtypes import numpy_dtype

__all__ = ["StateArrays", "chosen_states", "intervals"]


def chosen_states(
    params: KVCacheParams,
    max_batch_size: int,
    num_states: int | None,
    *,
    max_seq_len: int,
    max_draft_tokens: int = 0,
    available_cache_memory: int | None = None,
    num_pages: int | None = None,
) -> int:
    """Return the slots of states of each replica.

    By default those of the requests, and ``sizing.checkpoints_per_replica``.

    Raises
    ------
    ValueError
        Less than one for each request of the batch, or slots for a model without states.
    """
    batch = batch_per_replica(params, max_batch_size)
    each = 2 if max_draft_tokens > 0 else 1
    if not params.state_groups:
        if num_states:
            raise ValueError(
                f"num_states is {num_states}, must be left out: the params have no State group"
            )
        return 0
    if num_states is None:
        return each * batch + checkpoints_per_replica(
            params, max_batch_size, max_seq_len, each, available_cache_memory, num_pages
        )
    found = integer("num_states", num_states)
    if found < batch:
        raise ValueError(
            f"num_states is {found}, must be at least {batch}: one for each request that a replica "
            f"takes of max_batch_size {max_batch_size}"
        )
    return found


def intervals(params: KVCacheParams) -> list[int]:
    """Return the tokens between checkpoints of each State group, 0 for none."""
    return [group.interval or 0 for group in params.state_groups]


class StateArrays:
    """Hold the arrays of states of all devices, and copy slots in them.

    Parameters
    ----------
    params : KVCacheParams
    devices : tuple of Device
        Replica-major.
    num_states : int
        Slots of each replica.
    pools : DevicePools or None
        As of ``kvcore.pools.pools_on_gpus``.
    num_host_states : int
        Slots of each replica's host tier.

    Attributes
    ----------
    arrays : tuple of dict of str to list of array
        For each State group, by name: [num_states, layers, ...] on each device, zeroed.
    """

    def __init__(
        self,
        params: KVCacheParams,
        devices: tuple[Device, ...],
        num_states: int,
        pools: Any,
        num_host_states: int = 0,
    ) -> None:
        self._devices = devices
        self._backend = backend_of(devices[0].kind)
        self.arrays: tuple[dict[str, list[Any]], ...] = tuple(
            {
                name: [
                    self._backend.zeros(
                        (num_states, len(group.layers), *shape), numpy_dtype(dtype), device.index
                    )
                    for device in devices
                ]
                for name, (shape, dtype) in group.arrays.items()
            }
            for group in params.state_groups
        )
        # A slot is a page of one token with one head.
        each = [
            [array.reshape(len(array), 1, 1, 1, 1, -1) for array in arrays]
            for group in self.arrays
            for arrays in group.values()
        ]
        self._per_replica = params.tensor_parallel_degree
        self._copiers: list[Copier] = [
            self._backend.copier(self._by_replica([(array, None) for array in arrays]), pools)
            for arrays in each
        ]
        self._mover: Mover | None = None
        if num_host_states:
            # All arrays of a slot lie together there.
            shards = self._by_replica([(tuple(arrays), None) for arrays in zip(*each, strict=True)])
            self._mover = self._backend.mover(
                shards, devices, num_host_states, pools, is_whole=True
            )

    def _by_replica(self, shards: list[Shard]) -> list[list[Shard]]:
        step = self._per_replica
        return [shards[first : first + step] for first in range(0, len(shards), step)]

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy slots, or put the copies in front of everything that uses the slots later.

        Parameters
        ----------
        copies : int32 [n, 3]
            Replica, source slot, destination slot. No slot is a source and a destination.
        """
        pages = np.ones((len(copies), 4), np.int32)
        pages[:, :3] = copies
        for copier in self._copiers:
            copier.run(pages)

    def move(self, orders: NDArray[np.int32]) -> None:
        """Copy slots to the host tier or back, or put that in front of their later uses.

        Parameters
        ----------
        orders : int32 [n, 4]
            As ``Mover.run`` takes them, with slots in place of pages.
        """
        self._host_mover().run(orders)

    def host_memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the slots of a replica's host tier as bytes, [num_host_states, bytes]."""
        return self._host_mover().memory(replica)

    def wait(self, replica: int) -> None:
        """Block until the moves of a replica's slots given so far are done."""
        self._host_mover().wait(replica)

    def _host_mover(self) -> Mover:
        if self._mover is None:
            raise ValueError("these states have no host tier; give num_host_states")
        return self._mover

    def on_device(self, index: int, slots: NDArray[np.int32]) -> Any:
        """Return slots, int32 [B] of the host's, on the device of that index."""
        return self._backend.current_place(self._devices[index].index).from_host(slots)
