# SPDX-License-Identifier: Apache-2.0
"""Hold the inputs of an operation: one layer's pools, the page table and lengths of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.selection import any_array
from kvcore.backends.shards import layer_rows
from kvcore.layers.layer_map import LayerPlace
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.layer_pools import AXES, NO_BATCH, LayerPools, OwnArrays, own_arrays
from kvcore.ops.model_pools import ModelBatch, ModelPools
from kvcore.params import KVCacheParams
from kvcore.support.arguments import integer

__all__ = ["LayerPools", "PagedBatch", "given_pool", "layer_pools"]

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
        An unknown layout, a wrong number of axes, scales that do not fit the pool or each other,
        arrays that do not match `params`.
    TypeError
        An argument that is not an array, scales of a wrong dtype.

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
    _bound: dict[int, LayerPools] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout not in AXES:
            raise ValueError(f"layout is {self.layout!r}, must be one of {', '.join(AXES)}")
        arrays = OwnArrays(
            *(self.key_pool, self.value_pool, self.key_scales, self.value_scales, self.layout),
            self.global_scales,
        )
        step = self.lookup_table, self.cache_lengths
        if self.params is None:
            _set(self, "_bound", {0: own_arrays(arrays, *step)})
        else:
            _set(self, "_bound", ModelBatch(ModelPools(self.params, arrays), *step))

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
        bound = self._bound
        if isinstance(bound, ModelBatch):
            bound = bound.with_tables(lookup_table, cache_lengths)
        else:
            bound = {0: bound[0].with_tables(lookup_table, cache_lengths)}
        _set(other, "key_pool", self.key_pool)
        _set(other, "value_pool", self.value_pool)
        _set(other, "lookup_table", lookup_table)
        _set(other, "cache_lengths", cache_lengths)
        _set(other, "layout", self.layout)
        _set(other, "key_scales", self.key_scales)
        _set(other, "value_scales", self.value_scales)
        _set(other, "params", self.params)
        _set(other, "global_scales", self.global_scales)
        _set(other, "_bound", bound)
        return other


def given_pool(inputs: RaggedKVCacheInputs | PagedBatch) -> Any:
    """Return an array of the library of the caller's pools; None for the manager's pools."""
    if not isinstance(inputs, PagedBatch):
        return None
    return inputs.key_pool if inputs.params is None else inputs.key_pool[0]


def layer_pools(
    inputs: RaggedKVCacheInputs | PagedBatch, layer: SupportsIndex, *, is_written: bool = False
) -> LayerPools:
    """Take one layer out of the inputs of an operation; its first use binds it to them.

    Raises
    ------
    IndexError
        A layer that the pool does not have; a PagedBatch without params has layer 0.
    ValueError
        Inputs without a pool; a layer that reads the K and V of another layer and is to be written.
    TypeError
        Inputs of another type.
    """
    index = layer if type(layer) is int else integer("layer", layer)
    if isinstance(inputs, PagedBatch):
        bound = inputs._bound.get(index) or _bind_own(inputs._bound, index)  # noqa: SLF001
    elif isinstance(inputs, RaggedKVCacheInputs):
        bound = inputs._bound_layer(index) or _bind_fetched(inputs, index)  # noqa: SLF001
    else:
        raise TypeError(
            f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs or PagedBatch"
        )
    if is_written and bound.owner is not None:
        raise ValueError(
            f"layer {layer} reads the K and V of layer {bound.owner} and has none to write; "
            f"write only those of layer {bound.owner}"
        )
    return bound


def _bind_own(bound: dict[int, LayerPools], layer: int) -> LayerPools:
    """Bind a layer of a caller's pools to their batch."""
    if isinstance(bound, ModelBatch):
        return bound.bind(layer)
    raise _no_layer(layer, len(bound))


def _bind_fetched(inputs: RaggedKVCacheInputs, layer: int) -> LayerPools:
    """Bind a layer of a manager's pool to a fetched batch."""
    if inputs.blocks is None:
        raise ValueError(
            "the inputs have no pool (blocks=None); pass kvcore.PagedBatch over your own"
        )
    rows = inputs._layer_rows(layer)  # noqa: SLF001
    if rows is None:
        rows = _view_rows(inputs, layer)
    places = inputs._layers  # noqa: SLF001
    table = inputs.tables[0 if places is None else places[layer].bundle]
    lengths = inputs.cache_lengths
    step = any_array(table, "lookup_table"), any_array(lengths, "cache_lengths")
    bound: LayerPools = rows.in_batch(*step)
    if inputs._loads is not None:  # noqa: SLF001
        bound = bound._replace(loads=inputs._loads)  # noqa: SLF001
    pairs = (table, step[0]), (lengths, step[1])
    inputs._bind_layer(layer, bound, rows, *pairs)  # noqa: SLF001
    return bound


def _view_rows(inputs: RaggedKVCacheInputs, layer: int) -> LayerPools:
    """View a layer's rows in the pool of inputs, for every batch in the pool."""
    arrays = inputs._viewed_arrays() or _view_arrays(inputs)  # noqa: SLF001
    views, count = [view for _, view in arrays], len(_parts(inputs.blocks))
    blocks, scales = views[:count], views[count:]
    places = inputs._layers  # noqa: SLF001
    own_scales: list[Any] | None = None
    if places is None:
        pools = _layer_of(blocks, "blocks", layer)
        if scales:
            own_scales = _layer_of(scales, "kv_scales", layer)
        rows = LayerPools(pools, own_scales, *NO_BATCH, len(pools) == 1, position=layer)
    else:
        place = places[layer]
        pools = _layer_in_bundle(blocks, place, 1)
        if scales:
            group = blocks[0].shape[-1] // scales[0].shape[-1]
            own_scales = _layer_in_bundle(scales, place, group)
        rows = LayerPools(
            pools,
            own_scales,
            *NO_BATCH,
            len(pools) == 1,
            window=place.window,
            chunk=place.chunk,
            owner=place.owner,
            position=place.position,
        )
    rows = rows.with_parts()
    inputs._keep_rows(layer, rows, arrays)  # noqa: SLF001
    return rows


def _view_arrays(inputs: RaggedKVCacheInputs) -> tuple[tuple[Any, Any], ...]:
    """Return (array, view) for each array of the pool: the blocks, then their scales."""
    given = {"blocks": inputs.blocks, "kv_scales": inputs.kv_scales}
    return tuple(
        (part, _seen(part, name)) for name, arrays in given.items() for part in _parts(arrays)
    )


def _parts(arrays: Any) -> list[Any]:
    if arrays is None:
        return []
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def _seen(given: Any, name: str) -> Any:
    """View an array; later changes of a numpy array's shape or flags do not show in the view."""
    seen = any_array(given, name)
    return seen.view() if seen is given and isinstance(seen, np.ndarray) else seen


def _layer_in_bundle(arrays: list[Any], place: LayerPlace, per_entry: int) -> list[NDArray[Any]]:
    """View a layer's rows in each kv entry; a last-axis entry holds `per_entry` elements."""
    entries = [part[:, kv, place.position] for part in arrays for kv in range(part.shape[1])]
    widths = place.widths if len(place.widths) == len(entries) else place.widths[:1] * len(entries)
    return [
        layer_rows(rows, (place.page_size, place.heads, width // per_entry))
        for rows, width in zip(entries, widths, strict=True)
    ]


def _layer_of(arrays: list[Any], name: str, layer: int) -> list[NDArray[Any]]:
    """Return one layer of each kv entry of arrays [pages, kv_dim, layers, page_size, ...]."""
    for part in arrays:
        if part.ndim != 6:
            raise ValueError(f"{name} has shape {part.shape}, must have 6 axes")
    if not 0 <= layer < arrays[0].shape[2]:
        raise _no_layer(layer, arrays[0].shape[2])
    return [part[:, kv, layer] for part in arrays for kv in range(part.shape[1])]


def _no_layer(layer: int, count: int) -> IndexError:
    return IndexError(f"layer is {layer}, must be at least 0 and below {count}, the layers")
