# SPDX-License-Identifier: Apache-2.0
"""Hold the inputs of an operation: one layer's pools, the page table and lengths of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from numpy.typing import NDArray

from kvcore.backends.selection import any_array
from kvcore.backends.shards import layer_rows
from kvcore.layers.layer_map import LayerPlace
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.layer_pools import AXES, LayerPools, OwnArrays, own_arrays
from kvcore.ops.model_pools import ModelPools
from kvcore.params import KVCacheParams
from kvcore.support.arguments import integer

__all__ = ["LayerPools", "PagedBatch", "given_pool", "layer_pools", "own_pools"]

_set = object.__setattr__  # sets a field of a frozen dataclass


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Hold the pools of a layer or a model, in any affine layout, and the pages of a batch in them.

    Parameters
    ----------
    key_pool : array [pages, page_size, heads, head_dim]
        "NHD"; with "HND" the axes are [pages, heads, page_size, head_dim], with "MLA" they are
        [pages, page_size, dim]: latent rows, which are keys and values. An array of any DLPack
        library, in host memory or on a GPU. The last axis is contiguous; the others have any
        strides.
    value_pool : array, or None
        Likewise; its head_dim may differ. None if values are the first elements of the keys. With
        "MLA": the ends of the keys (rope) [pages, page_size, rope_dim], or None if they are part of
        the rows; ``append`` takes whole keys and ``gather`` returns them in both cases.
    lookup_table : uint32 [B, columns]
        Page ids of each row in logical order; ids from ``pages`` on mean "unassigned".
    cache_lengths : uint32 [B]
        Tokens of each row before this step.
    layout : {"NHD", "HND", "MLA", "MLA_FP8"}
        "MLA_FP8": latent rows uint8 [pages, page_size, 656], which hold 512 float8_e4m3fn, their 4
        float32 scales and 64 bfloat16 with rotary positions.
    key_scales : array float32 like `key_pool`, array float32 [heads] or float, optional
        For a float8 or int8 pool: a stored code times its scale is the value. With the axes of the
        pool, the last axis has an entry for each group of elements, and ``append`` writes these
        scales. Other scales are only read.
    value_scales : likewise, optional
        Of the same kind as `key_scales`; None with "MLA".
    global_scales : (K's, V's), each a float or an array float32 of one element, optional
        For pools in nvfp4. These pools are uint8 [pages, page_size, heads, head_dim / 2], two codes
        in a byte, and `key_scales` and `value_scales` are float8_e4m3fn [pages, page_size, heads,
        head_dim / 16] (or all in "HND"), as ``ops.quantize`` returns them. 1.0 each by default. A
        global scale on a GPU is read on the device when the work runs.
    params : KVCacheParams, optional
        For pools of all layers. With `params`, every `layer` argument is the model's layer number.
        Pools and scales are lists with one entry for each layer place in a page
        (``params.layers_per_page``; without groups, one for each layer), and `lookup_table` has a
        table for each bundle, as ``inputs.tables``. A pool whose pages are contiguous may hold rows
        of several shapes.

    Raises
    ------
    ValueError
        Another layout, another rank, scales that do not fit the pool or each other, arrays that do
        not match `params`.
    TypeError
        An argument that is not an array, scales of another dtype.

    Notes
    -----
    All arrays are in host memory, or all on one GPU. `key_scales` and `value_scales` of a pool on a
    GPU may come from the host; the host waits until they are copied.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.zeros((2, 1, 4, 3), np.float32)  # [pages, heads, page_size, head_dim]
    >>> table, lengths = np.array([[1]], np.uint32), np.array([2], np.uint32)
    >>> batch = PagedBatch(pool, None, table, lengths, layout="HND")
    >>> ops.append(batch, 0, np.ones((1, 1, 3), np.float32), None, np.array([0, 1], np.uint32))
    >>> pool[1, 0].sum(axis=-1).tolist()
    [0.0, 0.0, 3.0, 0.0]
    """

    key_pool: Any
    value_pool: Any
    lookup_table: Any
    cache_lengths: Any
    layout: str = "NHD"
    key_scales: Any = None
    value_scales: Any = None
    params: KVCacheParams | None = None
    global_scales: Any = None
    _pools: LayerPools | ModelPools = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout not in AXES:
            raise ValueError(f"layout is {self.layout!r}, must be one of {', '.join(AXES)}")
        arrays = OwnArrays(
            *(self.key_pool, self.value_pool, self.key_scales, self.value_scales, self.layout),
            self.global_scales,
        )
        step = self.lookup_table, self.cache_lengths
        pools: LayerPools | ModelPools
        if self.params is None:
            pools = own_arrays(arrays, *step)
        else:
            pools = ModelPools(self.params, arrays, *step)
        object.__setattr__(self, "_pools", pools)

    def with_tables(self, lookup_table: Any, cache_lengths: Any) -> PagedBatch:
        """Return the same pools with the pages and lengths of another batch.

        Parameters
        ----------
        lookup_table, cache_lengths
            As for the constructor: with `params`, ``inputs.tables`` and ``inputs.cache_lengths`` of
            the fetched inputs.

        Returns
        -------
        PagedBatch

        Notes
        -----
        Costs O(bundles): the pools are not checked again.
        """
        other = object.__new__(PagedBatch)
        pools = self._pools.with_tables(lookup_table, cache_lengths)
        _set(other, "key_pool", self.key_pool)
        _set(other, "value_pool", self.value_pool)
        _set(other, "lookup_table", lookup_table)
        _set(other, "cache_lengths", cache_lengths)
        _set(other, "layout", self.layout)
        _set(other, "key_scales", self.key_scales)
        _set(other, "value_scales", self.value_scales)
        _set(other, "params", self.params)
        _set(other, "global_scales", self.global_scales)
        _set(other, "_pools", pools)
        return other


def given_pool(inputs: RaggedKVCacheInputs | PagedBatch) -> Any:
    """Return an array of the library of the caller's pools; None for the manager's pools."""
    if not isinstance(inputs, PagedBatch):
        return None
    return inputs.key_pool if inputs.params is None else inputs.key_pool[0]


def layer_pools(inputs: RaggedKVCacheInputs | PagedBatch, layer: SupportsIndex) -> LayerPools:
    """Take one layer out of the inputs of an operation.

    Raises
    ------
    IndexError
        A layer that the pool does not have; a PagedBatch without params has layer 0.
    ValueError
        Inputs without a pool.
    TypeError
        Inputs of another type.
    """
    if isinstance(inputs, PagedBatch):
        if isinstance(inputs._pools, ModelPools):  # noqa: SLF001
            return inputs._pools.layer(layer)  # noqa: SLF001
        _index(layer, 1)
        return inputs._pools  # noqa: SLF001
    if not isinstance(inputs, RaggedKVCacheInputs):
        raise TypeError(
            f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs or PagedBatch"
        )
    if inputs.blocks is None:
        raise ValueError(
            "the inputs have no pool (blocks=None); pass kvcore.PagedBatch over your own"
        )
    if inputs._layers is not None:  # noqa: SLF001
        return _of_bundle(inputs, inputs._layers[integer("layer", layer)])  # noqa: SLF001
    pools = _layer_of(inputs.blocks, "blocks", layer)
    scales = inputs.kv_scales
    return LayerPools(
        pools,
        None if scales is None else _layer_of(scales, "kv_scales", layer),
        any_array(inputs.lookup_table, "lookup_table"),
        any_array(inputs.cache_lengths, "cache_lengths"),
        is_latent=len(pools) == 1,
        loads=inputs._loads,  # noqa: SLF001
        position=int(layer),
    )


def own_pools(inputs: RaggedKVCacheInputs | PagedBatch, layer: SupportsIndex) -> LayerPools:
    """Take out a layer that an operation will write.

    Raises
    ------
    IndexError, ValueError, TypeError
        As ``layer_pools``; ValueError also for a layer that reads the K and V of another layer.
    """
    pools = layer_pools(inputs, layer)
    if pools.owner is not None:
        raise ValueError(
            f"layer {layer} reads the K and V of layer {pools.owner} and has none to write; "
            f"write those of layer {pools.owner} alone"
        )
    return pools


def _of_bundle(inputs: RaggedKVCacheInputs, place: LayerPlace) -> LayerPools:
    """Take out a layer that shares pages with other layers of its group."""
    pools = _rows_of(inputs.blocks, "blocks", place, 1)
    scales = None
    if inputs.kv_scales is not None:
        first = any_array(_parts(inputs.blocks)[0], "blocks")
        groups = any_array(_parts(inputs.kv_scales)[0], "kv_scales")
        scales = _rows_of(inputs.kv_scales, "kv_scales", place, first.shape[-1] // groups.shape[-1])
    return LayerPools(
        pools,
        scales,
        any_array(inputs.tables[place.bundle], "tables"),
        any_array(inputs.cache_lengths, "cache_lengths"),
        is_latent=len(pools) == 1,
        window=place.window,
        chunk=place.chunk,
        owner=place.owner,
        loads=inputs._loads,  # noqa: SLF001
        position=place.position,
    )


def _parts(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def _rows_of(arrays: Any, name: str, place: LayerPlace, per_entry: int) -> list[NDArray[Any]]:
    """View a layer's rows in each kv entry; a last-axis entry holds `per_entry` elements."""
    seen = [any_array(part, name) for part in _parts(arrays)]
    entries = [part[:, kv, place.position] for part in seen for kv in range(part.shape[1])]
    widths = place.widths if len(place.widths) == len(entries) else place.widths[:1] * len(entries)
    return [
        layer_rows(rows, (place.page_size, place.heads, width // per_entry))
        for rows, width in zip(entries, widths, strict=True)
    ]


def _layer_of(arrays: Any, name: str, layer: SupportsIndex) -> list[NDArray[Any]]:
    """Return one layer of each kv entry of arrays [pages, kv_dim, layers, page_size, ...]."""
    parts = list(arrays) if isinstance(arrays, tuple) else [arrays]
    seen = [any_array(part, name) for part in parts]
    for part in seen:
        if part.ndim != 6:
            raise ValueError(f"{name} has shape {part.shape}, must have 6 axes")
    index = _index(layer, seen[0].shape[2])
    return [part[:, kv, index] for part in seen for kv in range(part.shape[1])]


def _index(layer: SupportsIndex, count: int) -> int:
    index = integer("layer", layer)
    if not 0 <= index < count:
        raise IndexError(f"layer is {index}, must be at least 0 and below {count}, the layers")
    return index
