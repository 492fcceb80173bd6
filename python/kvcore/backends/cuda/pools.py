# SPDX-License-Identifier: Apache-2.0
"""What a manager with pools on GPUs does beyond ids: staging of tables, order of streams."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda import driver
from kvcore.backends.cuda.arrays import own_array
from kvcore.backends.cuda.availability import cupy, kernels, require_devices
from kvcore.backends.cuda.last_wait import LastWait
from kvcore.backends.cuda.layer_loads import LayerLoads
from kvcore.backends.cuda.order import StreamOrder
from kvcore.backends.cuda.streams import manager_stream
from kvcore.device import Device

__all__ = ["GpuPools", "make_gpu_pools"]

_ENTRY = 4  # bytes of an entry of a table


class GpuPools:
    """Copy what a fetch writes to its devices, and order the streams that use the pools.

    Parameters
    ----------
    devices : tuple of Device
        Of each shard, replica-major.
    shards_per_replica : int
    places : int
        Of layers in a page, where loads from the host tier arrive layer by layer; else 0.

    Attributes
    ----------
    orders : dict of int to StreamOrder
        Of each device.
    loads : dict of int to LayerLoads
        Likewise, where there are places.

    Notes
    -----
    Thread-safe. A fetch costs each device one copy of its table and lengths out of pinned memory,
    on the current stream of that device; the host waits for nothing. The device's arrays come
    out of cupy's memory pool, which uses memory again in the order of that stream.
    """

    def __init__(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int = 0
    ) -> None:
        self._in_flight: list[tuple[Any, Any, Any]] = []  # an event, and what its copy reads
        self._last_wait = LastWait()
        self._devices = [each.index for each in devices]
        self._per_replica = shards_per_replica
        self.orders = {index: StreamOrder(index) for index in self._devices}
        self.loads = {index: LayerLoads(index, places) for index in self._devices if places}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        """Wait for copies out of pinned memory, which would go before they are done."""
        self._last_wait.for_events(event for event, *_ in self._in_flight)

    def pinned(self, entries: int) -> NDArray[np.uint32]:
        """Allocate uint32 [entries] of pinned memory, as an array that all views of it hold.

        By its references a fetch sees whether anyone does; ``pinned_zeros`` returns a view itself.
        """
        memory = kernels().PinnedMemory(self._devices[0], max(1, entries) * _ENTRY)
        return np.frombuffer(memory, np.uint32, entries)

    def enter(self, replica: int) -> None:
        """Order the current streams of a replica's devices behind whatever uses its pools."""
        first = replica * self._per_replica
        for index in set(self._devices[first : first + self._per_replica]):
            self.orders[index].enter()

    def stage(
        self, shard: int, lengths: NDArray[np.uint32], table: NDArray[np.uint32]
    ) -> tuple[Any, Any, Any]:
        """Return lengths and table on a shard's device, and the event of their copy.

        Parameters
        ----------
        shard : int
        lengths : uint32 [B]
        table : uint32 [B, columns]
            Behind `lengths` in one piece of pinned memory; rows may be strided.

        Returns
        -------
        uint32 [B], uint32 [B, columns], event
            Of no rows, None is the event.
        """
        device = self._devices[shard]
        stream = self.orders[device].enter(by_layer=bool(self.loads))
        begin, middle = (each.__array_interface__["data"][0] for each in (lengths, table))
        size = middle - begin + max(0, len(table) - 1) * table.strides[0]
        size += table.shape[1] * _ENTRY if len(table) else 0
        staged = driver.empty((size // _ENTRY,), np.dtype(np.uint32), device, stream)
        event = None
        if len(table):
            event = self._copy(staged, begin, size, device, stream, (lengths, table))
        rows = cupy().ndarray(
            table.shape, np.uint32, staged.data + (middle - begin), strides=table.strides
        )
        return own_array(staged[: len(lengths)]), own_array(rows), event

    def mark(self, shard: int) -> Any:
        """Return an event that stands for what the current stream of a shard's device has now."""
        device = self._devices[shard]
        event = kernels().Event(device)
        kernels().record(event.ptr, device, manager_stream(device).handle)
        return event

    def arriving(self, shard: int) -> LayerLoads | None:
        """Return what the layers of a shard's pages wait for; None where all of them are there."""
        loads = self.loads.get(self._devices[shard])
        return loads if loads is not None and loads.is_pending else None

    def _copy(
        self, target: Any, source: int, size: int, device: int, stream: int, held: Any
    ) -> Any:
        """Copy out of host memory that is not written again before the copy is done; its event."""
        event = kernels().Event(device)
        kernels().copy(target.data.ptr, source, size, device, stream)
        kernels().record(event.ptr, device, stream)
        with self._lock:
            self._in_flight = [
                each for each in self._in_flight if not kernels().query(each[0].ptr, each[0].device)
            ]
            self._in_flight.append((event, *held))
        return event

    def reuse_after(self, after: Any) -> None:
        """Let pages be written again only when a stream's work, or an event, is done.

        Raises
        ------
        TypeError
            Neither a stream nor an event.
        ValueError
            A stream by its handle alone, where several devices could be meant.
        """
        if isinstance(after, int) and len(self.orders) > 1:
            raise ValueError(
                f"after is the handle {after}, of one of {len(self.orders)} devices; "
                f"pass the stream itself, or an event"
            )
        for order in self.orders.values():
            order.put_after_work(after)


def make_gpu_pools(devices: tuple[Device, ...], shards_per_replica: int, places: int) -> GpuPools:
    """Check that the driver shows the devices, all of which are GPUs."""
    count = require_devices()
    for device in devices:
        if device.index >= count:
            raise ValueError(f"device is {device}, the driver shows cuda:0 .. cuda:{count - 1}")
    return GpuPools(devices, shards_per_replica, places)
