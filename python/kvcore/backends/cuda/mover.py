# SPDX-License-Identifier: Apache-2.0
"""The host tier of pools on GPUs: pinned memory, and a copy stream for each direction."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda.arrays import over_memory
from kvcore.backends.cuda.availability import kernels
from kvcore.backends.cuda.last_wait import LastWait
from kvcore.backends.cuda.late_stores import LateStores
from kvcore.backends.cuda.place import DevicePlace
from kvcore.backends.cuda.pools import GpuPools
from kvcore.backends.protocol import STORE, Shard
from kvcore.backends.shards import arrays_of, tensors_of
from kvcore.device import Device

__all__ = ["GpuMover"]

# A kernel moves smaller pieces: the published cost of a copy call is 2.3 us, and a PCIe 4 bus moves
# about 64 KiB in this time. Not measured yet.
_ENGINE_BYTES = 64 << 10

# Thread blocks of that kernel, each with 16 KiB in flight: more than a bus needs, and few of the
# multiprocessors that the model runs on. Not measured yet.
_MOST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Part:
    """Hold an array of a device as bytes, and its part of each host page."""

    device: int
    pool: Any  # uint8 [pages, 1, 1, 1, 1, bytes], axes as of a pool
    host: Any  # uint8 [host pages, 1, 1, 1, 1, bytes], pinned
    shape: tuple[int, int]  # number of K and V, number of layer places

    def by_layer(self) -> tuple[Any, Any]:
        """Return host and pool as uint8 [pages, kv, places, 1, 1, bytes of a layer]."""
        return _split(self.host, self.shape), _split(self.pool, self.shape)


class _Lane:
    """Copy pages of one device in one direction, on its own stream."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream = kernels().Stream(device)
        self.done = kernels().Event(device)
        kernels().record(self.done.ptr, device, self.stream.ptr)

    def wait(self, event: Any) -> None:
        """Make all later copies wait for an event."""
        kernels().wait(event.ptr, self.device, self.stream.ptr)

    def copy(self, source: Any, target: Any, pairs: NDArray[np.int32]) -> None:
        """Copy pages pairs[i, 0] of `source` to pages pairs[i, 1] of `target`."""
        size = source.shape[-1]
        if size < _ENGINE_BYTES:
            self._copy_by_kernel(source, target, pairs)
            return
        ends = [
            array.data.ptr + ids.astype(np.uint64) * np.uint64(array.strides[0])
            for array, ids in ((target, pairs[:, 1]), (source, pairs[:, 0]))
        ]
        kernels().copy_batch(*_runs(ends[0], ends[1], size), self.device, self.stream.ptr)

    def _copy_by_kernel(self, source: Any, target: Any, pairs: NDArray[np.int32]) -> None:
        self.copy_layer(source, target, self.indices(pairs), 0)

    def indices(self, pairs: NDArray[np.int32]) -> Any:
        """Return pairs of pages as kernels take them."""
        place = DevicePlace(self.device, self.stream.ptr)
        return place.index_array(pairs.astype(np.int64, order="C"), "pairs")

    def copy_layer(self, source: Any, target: Any, pairs: Any, layer: int) -> None:
        """Copy one layer of the pages with a kernel."""
        caches = (tensors_of(source), False), (tensors_of(target), False)
        place = DevicePlace(self.device, self.stream.ptr)
        place.transfer(*caches, pairs, layers=(layer, 1), most_blocks=_MOST_BLOCKS, threads=1)

    def finish(self) -> None:
        """Record `done` after the copies so far."""
        kernels().record(self.done.ptr, self.device, self.stream.ptr)

    def wait_for_all(self) -> None:
        """Block until the copies so far are done."""
        kernels().synchronize(self.device, self.stream.ptr)


class GpuMover:
    """Move pages between pools on GPUs and pinned host memory, in stream order.

    Parameters
    ----------
    shards : list of list of Shard
        The pools, by replica and by device of the replica; the bytes of a page are contiguous.
    devices : tuple of Device
        The device of each shard, replica-major.
    num_pages : int
        Host pages of each replica, at least 1.
    gpus : GpuPools
        Orders the streams that use the pools; has ``loads`` if loads arrive layer by layer.
    is_whole : bool
        Load all layers of a page together, even if `gpus` has ``loads``.
    late_reads : callable (replica) -> int, optional
        Returns the highest mark of ``run`` whose pages the replica reallocated since.

    Raises
    ------
    ValueError
        The bytes of a page are not contiguous.
    KVCacheError
        The host memory cannot be pinned.

    Notes
    -----
    Thread-safe. ``run`` never makes the host wait. A store reads the page after the work of the
    current stream, and the next owner of the page writes it after the store. No other stream waits
    for the store, but without `late_reads` every stream that enters later does. A load reads after
    the stores of its pages, writes after all work that may still read the page, and the current
    stream goes on after the load. If pages are loaded layer by layer, the work on a layer waits
    only for the load of this layer.
    """

    def __init__(
        self,
        shards: list[list[Shard]],
        devices: tuple[Device, ...],
        num_pages: int,
        gpus: GpuPools,
        *,
        is_whole: bool = False,
        late_reads: Callable[[int], int] | None = None,
    ) -> None:
        self._gpus = gpus
        self._by_layer = bool(gpus.loads) and not is_whole
        self._lanes: list[_Lane] = []
        self._last_wait = LastWait()
        per_replica = len(devices) // len(shards)
        made = [
            _make_parts(replica, devices[i * per_replica :], num_pages)
            for i, replica in enumerate(shards)
        ]
        self._parts = [parts for parts, _ in made]
        self._memory = [memory for _, memory in made]
        indices = sorted({each.index for each in devices})
        self._stores = {index: _Lane(index) for index in indices}
        self._loads = {index: _Lane(index) for index in indices}
        self._lanes = [*self._stores.values(), *self._loads.values()]
        self._ready = {index: kernels().Event(index) for index in indices}
        self._lock = threading.Lock()
        self._mark = 0  # of the latest stores
        # For each host page, the mark of the store that wrote it.
        self._written = [np.zeros(num_pages, np.int64) for _ in shards]
        self._late = {
            index: LateStores(index, self._late_reads_of(index, late_reads)) for index in indices
        }
        for index, late in self._late.items():
            gpus.orders[index].follow(late)

    def __del__(self) -> None:
        """Wait until copies of pinned memory are done, before the memory is freed."""
        self._last_wait.for_streams(lane.stream for lane in self._lanes)

    def memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the host pages of a replica, [num_pages, page_bytes], pinned."""
        return self._memory[replica]

    def wait(self, replica: int) -> None:
        """Block until all copies of a replica's pages so far are done."""
        for device in sorted({part.device for part in self._parts[replica]}):
            self._stores[device].wait_for_all()
            self._loads[device].wait_for_all()

    def expect(self, replica: int, last: int) -> None:
        """Return at once: pinned memory is resident."""

    def run(self, orders: NDArray[np.int32]) -> int:
        """Enqueue copies before all later uses of the pages; see ``Mover.run``."""
        by_replica = [
            (int(replica), orders[orders[:, 0] == replica, 2:])
            for replica in np.unique(orders[:, 0])
        ]
        with self._lock:  # one thread at a time uses the lanes and their events
            if orders[0, 1] == STORE:
                return self._store_all(by_replica)
            for replica, pages in by_replica:
                self._load(replica, pages)
        return 0

    def _late_reads_of(
        self, device: int, late_reads: Callable[[int], int] | None
    ) -> Callable[[], int] | None:
        """Return a function for the maximum of `late_reads` over the replicas on a device."""
        if late_reads is None:
            return None
        on_device = [
            partial(late_reads, replica)
            for replica, parts in enumerate(self._parts)
            if any(part.device == device for part in parts)
        ]
        return lambda: max(ask() for ask in on_device)

    def _behind_current(self, lane: _Lane) -> int:
        """Make a lane wait for the current stream; return the handle of that stream."""
        stream = self._gpus.orders[lane.device].enter(by_layer=bool(self._gpus.loads))
        ready = self._ready[lane.device]
        kernels().record(ready.ptr, lane.device, stream)
        lane.wait(ready)
        return stream

    def _store_all(self, by_replica: list[tuple[int, NDArray[np.int32]]]) -> int:
        """Store pages of replicas; return the mark of these stores."""
        self._mark += 1
        for replica, pages in by_replica:
            self._store(self._parts[replica], pages)
            self._written[replica][pages[:, 1]] = self._mark
        used = {part.device for replica, _ in by_replica for part in self._parts[replica]}
        for device in used:
            self._late[device].add(self._mark, self._stores[device].stream.ptr)
        return self._mark

    def _store(self, parts: list[_Part], pages: NDArray[np.int32]) -> None:
        for device in sorted({part.device for part in parts}):
            lane = self._stores[device]
            self._behind_current(lane)
            # Loads may still read the host page or, layer by layer, write the page of the pool.
            lane.wait(self._loads[device].done)
            for part in (each for each in parts if each.device == device):
                lane.copy(part.pool, part.host, pages)

    def _load(self, replica: int, pages: NDArray[np.int32]) -> None:
        parts = self._parts[replica]
        stored_by = int(self._written[replica][pages[:, 1]].max())
        for device in sorted({part.device for part in parts}):
            lane = self._loads[device]
            stream = self._behind_current(lane)
            self._late[device].put_behind(stored_by, lane.stream.ptr)
            own = [each for each in parts if each.device == device]
            if self._by_layer:
                self._load_by_layer(lane, own, pages[:, ::-1])
                continue
            for part in own:
                lane.copy(part.host, part.pool, pages[:, ::-1])
            lane.finish()
            kernels().wait(lane.done.ptr, device, stream)

    def _load_by_layer(self, lane: _Lane, parts: list[_Part], pairs: NDArray[np.int32]) -> None:
        """Load pages layer by layer; the work on a layer waits for that layer."""
        wanted = lane.indices(pairs)
        views = [part.by_layer() for part in parts]
        for layer in range(parts[0].shape[1]):
            for host, pool in views:
                lane.copy_layer(host, pool, wanted, layer)
            self._gpus.loads[lane.device].arrived(layer, lane.stream.ptr)
        lane.finish()
        self._gpus.orders[lane.device].put_after_loads(lane.done)


def _runs(
    targets: NDArray[np.uint64], sources: NDArray[np.uint64], size: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Join copies of `size` bytes that are adjacent on both sides.

    All pages of a side are in one allocation, because a run must not cross allocations.
    """
    begins = np.ones(len(targets), bool)
    begins[1:] = (np.diff(targets) != size) | (np.diff(sources) != size)
    first = np.flatnonzero(begins)
    return targets[first], sources[first], np.diff(first, append=len(targets)) * size


def _make_parts(
    replica: list[Shard], devices: tuple[Device, ...], num_pages: int
) -> tuple[list[_Part], NDArray[np.uint8]]:
    """Lay out the parts of a replica's pages in pinned memory; return the parts and the memory."""
    pools: list[tuple[int, Any, tuple[int, int]]] = []
    for shard, device in zip(replica, devices, strict=False):
        pools += [(device.index, _as_rows(each), each.shape[1:3]) for each in arrays_of(shard)]
    page_bytes = sum(pool.shape[-1] for _, pool, _ in pools)
    memory = kernels().PinnedMemory(pools[0][0], num_pages * page_bytes)
    parts = []
    address = memory.ptr
    for index, pool, shape in pools:
        host = _rows(address, num_pages, page_bytes, pool.shape[-1], index, memory)
        parts.append(_Part(index, pool, host, shape))
        address += pool.shape[-1]
    pages = np.frombuffer(memory, np.uint8, num_pages * page_bytes)
    return parts, pages.reshape(num_pages, page_bytes)


def _as_rows(pool: Any) -> Any:
    """View the pages of a pool as bytes."""
    size = math.prod(pool.shape[1:]) * pool.itemsize
    if not pool[0].flags.c_contiguous:
        raise ValueError(
            f"the pages of blocks {pool.shape} with strides {pool.strides} are not contiguous, "
            f"but a host tier needs contiguous pages; pass pools in C order"
        )
    return _rows(pool.data.ptr, len(pool), pool.strides[0], size, pool.data.device_id, pool)


def _split(rows: Any, shape: tuple[int, int]) -> Any:
    """View pages [n, 1, 1, 1, 1, bytes] as [n, kv, places, 1, 1, bytes of a layer]."""
    kv, places = shape
    size = rows.shape[-1] // (kv * places)
    return over_memory(
        rows.data.ptr,
        (len(rows), kv, places, 1, 1, size),
        rows.dtype,
        rows.data.device_id,
        rows,
        (rows.strides[0], places * size, size, size, size, 1),
    )


def _rows(address: int, count: int, stride: int, size: int, device: int, owner: Any) -> Any:
    shape, strides = (count, 1, 1, 1, 1, size), (stride, size, size, size, size, 1)
    return over_memory(address, shape, np.dtype(np.uint8), device, owner, strides)
