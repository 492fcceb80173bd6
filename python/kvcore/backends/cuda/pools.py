# SPDX-License-Identifier: Apache-2.0
"""The GPU work of a manager with pools on GPUs: staging of tables, order of streams."""

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
    """Copy the tables of a fetch to its devices, and order the streams that use the pools.

    Parameters
    ----------
    devices : tuple of Device
        The device of each shard, replica-major.
    shards_per_replica : int
    places : int
        Number of layer places in a page if loads from the host tier arrive layer by layer; else 0.

    Attributes
    ----------
    orders : dict of int to StreamOrder
        By device.
    loads : dict of int to LayerLoads
        By device; empty if `places` is 0.

    Notes
    -----
    Thread-safe. A fetch costs each device one copy of its table and lengths from pinned memory, on
    the current stream of that device; the host does not wait. The device arrays come from cupy's
    memory pool, which reuses memory in the order of that stream.
    """

    def __init__(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int = 0
    ) -> None:
        self._in_flight: list[tuple[Any, Any, Any]] = []  # an event, and the sources of its copy
        self._last_wait = LastWait()
        self._devices = [each.index for each in devices]
        self._per_replica = shards_per_replica
        self.orders = {index: StreamOrder(index) for index in self._devices}
        self.loads = {index: LayerLoads(index, places) for index in self._devices if places}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        """Wait until copies of pinned memory are done, before the memory is freed."""
        self._last_wait.for_events(event for event, *_ in self._in_flight)

    def pinned(self, entries: int) -> NDArray[np.uint32]:
        """Allocate pinned memory, uint32 [entries], as an array that all its views reference.

        A fetch reads the reference count of the array to detect views that are still in use.
        ``pinned_zeros`` is not suitable, because it returns a view.
        """
        memory = kernels().PinnedMemory(self._devices[0], max(1, entries) * _ENTRY)
        return np.frombuffer(memory, np.uint32, entries)

    def enter(self, replica: int) -> None:
        """Order the current streams of a replica's devices after all work on its pools."""
        first = replica * self._per_replica
        for index in set(self._devices[first : first + self._per_replica]):
            self.orders[index].enter()

    def stage(
        self, shard: int, lengths: NDArray[np.uint32], table: NDArray[np.uint32]
    ) -> tuple[Any, Any, Any]:
        """Copy lengths and table to a shard's device; return both, and the event of the copy.

        Parameters
        ----------
        shard : int
        lengths : uint32 [B]
        table : uint32 [B, columns]
            After `lengths` in the same block of pinned memory; rows may be strided.

        Returns
        -------
        uint32 [B], uint32 [B, columns], event
            The event is None if the table has no rows.
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
        """Return an event that is recorded on the current stream of a shard's device."""
        device = self._devices[shard]
        event = kernels().Event(device)
        kernels().record(event.ptr, device, manager_stream(device).handle)
        return event

    def arriving(self, shard: int) -> LayerLoads | None:
        """Return the pending loads that the layers of a shard wait for; None if all are done."""
        loads = self.loads.get(self._devices[shard])
        return loads if loads is not None and loads.is_pending else None

    def _copy(
        self, target: Any, source: int, size: int, device: int, stream: int, held: Any
    ) -> Any:
        """Copy host memory, and hold its arrays until the copy is done; return its event."""
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
        """Delay all later writes to pages until a stream's current work, or an event, is done.

        Raises
        ------
        TypeError
            `after` is neither a stream nor an event.
        ValueError
            `after` is a stream handle, and the manager has several devices.
        """
        if isinstance(after, int) and len(self.orders) > 1:
            raise ValueError(
                f"after is the handle {after}, which is ambiguous on {len(self.orders)} devices; "
                f"pass the stream object, or an event"
            )
        for order in self.orders.values():
            order.put_after_work(after)


def make_gpu_pools(devices: tuple[Device, ...], shards_per_replica: int, places: int) -> GpuPools:
    """Check that the driver shows the devices, which are all GPUs; return their pools."""
    count = require_devices()
    for device in devices:
        if device.index >= count:
            raise ValueError(f"device is {device}, the driver shows cuda:0 .. cuda:{count - 1}")
    return GpuPools(devices, shards_per_replica, places)
