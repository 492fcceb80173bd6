# SPDX-License-Identifier: Apache-2.0
"""The memory of pages and state slots: allocation, checks, copies, symbols."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_writable, kind_of, require_apart, require_own_memory
from kvcore.backends.protocol import Copier, DevicePools, Mover, Shard
from kvcore.backends.selection import backend_of
from kvcore.backends.shards import arrays_of
from kvcore.device import Device
from kvcore.layers.layer_map import mixes_pages, part_shapes
from kvcore.layers.packing import bundles
from kvcore.params import KVCacheParams
from kvcore.sizing import batch_per_replica, checkpoints_per_replica
from kvcore.support.arguments import flag, integer
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "ArraySymbol",
    "InputSymbols",
    "StateArrays",
    "WholePageCopier",
    "adopt_shard",
    "allocate_shard",
    "chosen_states",
    "input_symbols",
    "intervals",
    "make_copier",
    "make_mover",
    "make_shards",
    "pool_symbols",
    "pools_on_gpus",
    "shard_shapes",
    "whole_pages",
]


def shard_shapes(params: KVCacheParams, num_pages: int) -> list[tuple[int, ...]]:
    """Return the shape of each array of a device's pool: 1 array, or 2 if V has its own width."""
    if params.groups is not None or params.shared is not None:
        return part_shapes(params, num_pages)
    heads, page = params.n_kv_heads_per_device, params.page_size
    if params.v_head_dim is None:
        return [(num_pages, params.kv_dim, params.num_layers, page, heads, params.head_dim)]
    return [(num_pages, 1, params.num_layers, page, heads, width) for width in params.row_widths]


def _one_or_pair(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _allocate_scales(params: KVCacheParams, num_pages: int, device: Device) -> Any:
    granularity = params.kv_scale_granularity
    if granularity is None:
        return None
    shapes = [(*shape[:-1], shape[-1] // granularity) for shape in shard_shapes(params, num_pages)]
    return _one_or_pair([_zeros(shape, np.dtype(np.float32), device) for shape in shapes])


def allocate_shard(params: KVCacheParams, num_pages: int, device: Device) -> Shard:
    """Allocate one device's zeroed, pre-faulted pool and scales.

    Raises
    ------
    MemoryError
        The device has too little free memory; the message has both numbers.
    KVCacheError
        "CUDA unavailable: " and why.
    """
    dtype = numpy_dtype(params.dtype)
    arrays = [_zeros(shape, dtype, device) for shape in shard_shapes(params, num_pages)]
    return _one_or_pair(arrays), _allocate_scales(params, num_pages, device)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Any:
    return backend_of(device.kind).zeros(shape, dtype, device.index)


def _adopt_array(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Any:
    seen = _on_device(array, device)
    if seen.shape != shape or seen.dtype.itemsize != dtype.itemsize:
        raise ValueError(
            f"blocks has shape {seen.shape} and dtype {seen.dtype}, must be {shape} and {dtype}"
        )
    if seen.dtype != dtype and seen.dtype.kind not in "uV":
        raise ValueError(
            f"blocks has dtype {seen.dtype}, must be {dtype} or unsigned integers of its width"
        )
    if not is_writable(seen):
        raise ValueError("blocks is read-only, must be writable: pages are copied in it")
    if seen.shape[-1] > 1 and seen.strides[-1] != seen.itemsize:
        raise ValueError("blocks is strided along its last axis, must be contiguous there")
    require_own_memory(seen, "blocks")
    return backend_of(device.kind).own(seen.view(dtype))


def _on_device(array: Any, device: Device) -> Any:
    """Return a view of the caller's array, and check that the array is on `device`."""
    backend = backend_of(device.kind)
    seen = backend.array(array, "an array of blocks")
    found = backend.device_of(seen)
    if found != device:
        raise ValueError(f"an array of blocks is on {found}, must be on {device} as devices say")
    return seen


def adopt_shard(params: KVCacheParams, num_pages: int, blocks: Any, device: Device) -> Shard:
    """Use the caller's array, or pair of arrays, as one device's pool, without a copy.

    Raises
    ------
    TypeError, ValueError
        An array has a different shape or dtype, is read-only, has elements that share memory, or
        is of a type that numpy cannot read.
    """
    shapes = shard_shapes(params, num_pages)
    if len(shapes) == 2 and not isinstance(blocks, list | tuple):
        raise TypeError(f"blocks is a {type(blocks).__name__}, must be a pair of arrays: K and V")
    given = [blocks] if len(shapes) == 1 else list(blocks)
    if len(given) != len(shapes):
        raise ValueError(f"blocks holds {len(given)} arrays, must hold {len(shapes)}: K and V")
    dtype = numpy_dtype(params.dtype)
    arrays = [_adopt_array(a, shape, dtype, device) for a, shape in zip(given, shapes, strict=True)]
    return _one_or_pair(arrays), _allocate_scales(params, num_pages, device)


def make_shards(
    params: KVCacheParams, devices: tuple[Device, ...], num_pages: int, blocks: Any
) -> list[list[Shard]]:
    """Return the pools of each replica, in the order of the devices of the replica."""
    if blocks is None:
        shards: list[Shard] = [(None, None)] * len(devices)
    elif isinstance(blocks, str):
        if blocks != "allocate":
            raise ValueError(f"blocks is {blocks!r}, must be 'allocate', None or a list of arrays")
        shards = [allocate_shard(params, num_pages, device) for device in devices]
    else:
        if not isinstance(blocks, list | tuple):
            raise TypeError(
                f"blocks is a {type(blocks).__name__}, must be 'allocate', None or a list of arrays"
            )
        if len(blocks) != len(devices):
            raise ValueError(
                f"blocks holds {len(blocks)} pools, must hold {len(devices)}: one per device"
            )
        shards = [
            adopt_shard(params, num_pages, given, device)
            for given, device in zip(blocks, devices, strict=True)
        ]
        require_apart([array for pool, _ in shards for array in arrays_of((pool, None))], "blocks")
    tp = params.tensor_parallel_degree
    return [shards[r * tp : (r + 1) * tp] for r in range(params.data_parallel_degree)]


def pools_on_gpus(
    devices: tuple[Device, ...],
    params: KVCacheParams,
    loads_by_layer: bool,  # noqa: FBT001 - an argument of the manager
) -> DevicePools | None:
    """Return the DevicePools of a manager with pools on GPUs, None for pools in host memory.

    Raises
    ------
    TypeError
        `loads_by_layer` is not a bool.
    ValueError
        The devices are of both kinds, or the driver does not list a GPU.
    KVCacheError
        "CUDA unavailable: " and why.
    """
    if len({device.kind for device in devices}) > 1:
        raise ValueError(
            f"devices are {', '.join(map(str, devices))}; pools of one manager are all in host "
            f"memory or all on GPUs"
        )
    by_layer = flag("layerwise_loads", loads_by_layer)
    places = params.layers_per_page if by_layer else 0
    return backend_of(devices[0].kind).pools(devices, params.tensor_parallel_degree, places)


def make_copier(shards: list[list[Shard]], pools: Any) -> Copier | None:
    """Return a copier of pages within these pools, None if there are no pools.

    Parameters
    ----------
    shards : list of list of Shard
    pools : DevicePools or None
        The result of ``pools_on_gpus``.
    """
    arrays = arrays_of(shards[0][0])
    return backend_of(kind_of(arrays[0])).copier(shards, pools) if arrays else None


def whole_pages(
    copier: Copier | None, params: KVCacheParams, shards: list[list[Shard]]
) -> Copier | None:
    """Return `copier`, or a copier of whole pages if bundles lay out their rows differently."""
    if copier is None or not mixes_pages(params):
        return copier
    return WholePageCopier(copier, arrays_of(shards[0][0])[0].shape[3])


class WholePageCopier:
    """Copy whole pages with another copier: the layout of a page depends on its bundle.

    Parameters
    ----------
    copier : Copier
    page_size : int
        Tokens of a page, as counted by `copier`.
    """

    def __init__(self, copier: Copier, page_size: int) -> None:
        self._copier = copier
        self._page_size = page_size

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy pages, as ``Copier.run`` does."""
        whole = copies.copy()
        whole[:, 3] = self._page_size
        self._copier.run(whole)


def make_mover(
    shards: list[list[Shard]],
    devices: tuple[Device, ...],
    num_pages: int,
    pools: Any,
    late_reads: Callable[[int], int],
) -> Mover | None:
    """Return the mover of a host tier's pages, None without a host tier.

    `late_reads` is the argument of ``Backend.mover``.
    """
    if not num_pages:
        return None
    backend = backend_of(devices[0].kind)
    return backend.mover(shards, devices, num_pages, pools, late_reads=late_reads)


# ---- memory of states ----------------------------------------------------------------------------


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
    """Return the number of state slots of each replica.

    The default is the slots of the requests plus ``sizing.checkpoints_per_replica``.

    Raises
    ------
    ValueError
        `num_states` is below the number of requests of a replica's batch, or is not 0 for a model
        without states.
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
    """Return the tokens between checkpoints of each State group, 0 for no checkpoints."""
    return [group.interval or 0 for group in params.state_groups]


class StateArrays:
    """Own the state arrays of all devices, and copy slots within the arrays.

    Parameters
    ----------
    params : KVCacheParams
    devices : tuple of Device
        Devices in replica-major order.
    num_states : int
        State slots of each replica.
    pools : DevicePools or None
        The result of ``kvcore.pools.pools_on_gpus``.
    num_host_states : int
        State slots of each replica's host tier.

    Attributes
    ----------
    arrays : tuple of dict of str to list of array
        The arrays of each State group by name: [num_states, layers, ...] on each device,
        initialized to zero.
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
        # To the copiers, a slot is a page of one token with one head.
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
            # In the host tier, all arrays of a slot are contiguous.
            shards = self._by_replica([(tuple(arrays), None) for arrays in zip(*each, strict=True)])
            self._mover = self._backend.mover(
                shards, devices, num_host_states, pools, is_whole=True
            )

    def _by_replica(self, shards: list[Shard]) -> list[list[Shard]]:
        step = self._per_replica
        return [shards[first : first + step] for first in range(0, len(shards), step)]

    def run(self, copies: NDArray[np.int32]) -> None:
        """Copy slots, or enqueue the copies before all later uses of the slots.

        Parameters
        ----------
        copies : int32 [n, 3]
            Replica, source slot, destination slot. A slot cannot be both a source and a
            destination.
        """
        pages = np.ones((len(copies), 4), np.int32)
        pages[:, :3] = copies
        for copier in self._copiers:
            copier.run(pages)

    def move(self, orders: NDArray[np.int32]) -> None:
        """Copy slots to or from the host tier, or enqueue the copies before their later uses.

        Parameters
        ----------
        orders : int32 [n, 4]
            The argument of ``Mover.run``, with slots in place of pages.
        """
        self._host_mover().run(orders)

    def host_memory(self, replica: int) -> NDArray[np.uint8]:
        """Return the slots of a replica's host tier as bytes, [num_host_states, bytes]."""
        return self._host_mover().memory(replica)

    def wait(self, replica: int) -> None:
        """Block until all moves of a replica's slots that ``move`` was given are done."""
        self._host_mover().wait(replica)

    def _host_mover(self) -> Mover:
        if self._mover is None:
            raise ValueError("these states have no host tier; give num_host_states")
        return self._mover

    def on_device(self, index: int, slots: NDArray[np.int32]) -> Any:
        """Return `slots`, int32 [B] in host memory, as an array on the device with that index."""
        return self._backend.current_place(self._devices[index].index).from_host(slots)


# ---- symbols -------------------------------------------------------------------------------------


#: A size: a number, or the name of a number that the arrays of a step define.
Extent = int | str


@dataclass(frozen=True, slots=True)
class ArraySymbol:
    """Describe one array: ``name``, ``dtype``, ``shape`` (numbers and names), ``device``."""

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    device: Device


@dataclass(frozen=True, slots=True)
class InputSymbols:
    """Describe the fields of a ``RaggedKVCacheInputs`` on one device.

    Tables of different bundles may have different numbers of columns. `lookup_table` is the first
    table.
    """

    blocks: ArraySymbol | tuple[ArraySymbol, ...]
    cache_lengths: ArraySymbol
    lookup_table: ArraySymbol
    max_lengths: ArraySymbol
    kv_scales: ArraySymbol | tuple[ArraySymbol, ...] | None
    tables: tuple[ArraySymbol, ...]
    states: tuple[ArraySymbol, ...]


def pool_symbols(params: KVCacheParams, device: Device, count: str) -> tuple[ArraySymbol, ...]:
    """Describe the arrays of a device's pool; `count` names the number of its pages."""
    return tuple(
        ArraySymbol("blocks", params.dtype, (count, *shape[1:]), device)
        for shape in shard_shapes(params, 1)
    )


def input_symbols(params: KVCacheParams, device: Device) -> InputSymbols:
    """Describe the inputs of a device's kernels."""

    def symbol(name: str, dtype: str, *shape: Extent) -> ArraySymbol:
        return ArraySymbol(name, dtype, shape, device)

    blocks = pool_symbols(params, device, "total_num_pages")
    scales: tuple[ArraySymbol, ...] | None = None
    granularity = params.kv_scale_granularity
    if granularity is not None:
        scales = tuple(
            symbol("kv_scales", "float32", *pool.shape[:-1], int(pool.shape[-1]) // granularity)
            for pool in blocks
        )
    more = range(1, len(bundles(params)))
    table = symbol("lookup_table", "uint32", "batch_size", "max_num_pages")
    return InputSymbols(
        blocks=blocks[0] if len(blocks) == 1 else blocks,
        cache_lengths=symbol("cache_lengths", "uint32", "batch_size"),
        lookup_table=table,
        max_lengths=ArraySymbol("max_lengths", "uint32", ("steps_remaining", 2), Device("cpu")),
        kv_scales=scales[0] if scales is not None and len(scales) == 1 else scales,
        tables=(
            table,
            *(symbol("tables", "uint32", "batch_size", f"max_num_pages_{i}") for i in more),
        ),
        states=(symbol("states", "int32", "batch_size"),) * len(params.state_groups),
    )
