# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and symbolic shapes of what a fetch hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.device import Device
from kvcore.layers.packing import bundles
from kvcore.pools import shard_shapes

if TYPE_CHECKING:
    from kvcore.params import KVCacheParams

__all__ = ["ArraySymbol", "InputSymbols", "input_symbols", "pool_symbols"]

#: A number, or the name of one that is known when arrays arrive.
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

    Tables of several bundles may differ in their columns; the first one is `lookup_table`.
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
    """Describe what a device's kernels are given."""

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
