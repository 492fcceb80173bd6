# SPDX-License-Identifier: Apache-2.0
"""Hold a caller's pools of all layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.selection import any_array
from kvcore.backends.shards import layer_rows
from kvcore.layers.layer_map import LayerMap, LayerPlace, mixes_pages
from kvcore.layers.packing import bundles
from kvcore.ops.layer_pools import NO_BATCH, LayerPools, OwnArrays, own_arrays
from kvcore.params import KVCacheParams

__all__ = ["ModelBatch", "ModelPools"]

_SEQUENCES = list, tuple
_NAMES = repeat("lookup_table")


class ModelPools:
    """Find a layer's rows in arrays that each hold one layer place of every page.

    Parameters
    ----------
    params : KVCacheParams
        Its groups define which layers share a place.
    arrays : OwnArrays
        Each field is a list with one array for each place.

    Raises
    ------
    ValueError, TypeError
        Too few or too many arrays, or arrays that do not fit the layers of their places.
    """

    __slots__ = ("_is_mixed", "_layers", "_places", "_rows", "num_tables")

    def __init__(self, params: KVCacheParams, arrays: OwnArrays) -> None:
        if not isinstance(params, KVCacheParams):
            raise TypeError(f"params is a {type(params).__name__}, must be KVCacheParams")
        made, count = bundles(params), params.layers_per_page
        self._layers, self.num_tables = LayerMap(params), len(made)
        self._is_mixed = mixes_pages(params)
        each = [_one_per_place(name, getattr(arrays, name), count) for name in arrays._fields[:4]]
        self._places = [
            own_arrays(OwnArrays(k, v, k_scales, v_scales, arrays.layout), *NO_BATCH)
            for k, v, k_scales, v_scales in zip(*each, strict=True)
        ]
        is_nvfp4 = any(pools.global_scales is not None for pools in self._places)
        if is_nvfp4 or arrays.global_scales is not None:
            raise ValueError(
                "params are given with pools in nvfp4; make a PagedBatch without params for each "
                "layer"
            )
        if self._places[0].is_latent != params.is_mla:
            raise ValueError(
                f"is_mla is {params.is_mla}, but the pools have {arrays.layout} pages "
                f"{'without' if arrays.value_pool is None else 'with'} a value_pool"
            )
        for layer in (layer for bundle in made for layer in bundle.layers):
            self._seen(self._layers[layer], layer)
        self._rows: dict[int, tuple[LayerPools, int]] = {}

    def layer(self, layer: int) -> tuple[LayerPools, int]:
        """Return the rows of a layer, in no batch, and the bundle that the layer belongs to.

        Raises
        ------
        IndexError
            A layer that does not exist, or belongs to no attention group.
        """
        found = self._rows.get(layer)
        if found is None:
            place = self._layers[layer]
            rows = self._seen(place, layer)._replace(
                window=place.window, chunk=place.chunk, owner=place.owner
            )
            found = self._rows[layer] = rows, place.bundle
        return found

    def _seen(self, place: LayerPlace, layer: int) -> LayerPools:
        """View the arrays of a place as the rows of a layer at this place."""
        pools = self._places[place.position]
        wanted = [(place.page_size, place.heads, width) for width in place.widths]
        found = [pool.shape[1:] for pool in pools.pools]
        if pools.is_latent and len(found) == 2:
            found = [(*found[0][:2], found[0][2] + found[1][2])]
        if found == wanted:
            return pools
        is_plain = not pools.is_latent and pools.factors is None
        if not (self._is_mixed and is_plain and all(map(_holds, pools.pools, wanted))):
            raise ValueError(
                f"the pools of layer {layer} have pages {found}, must be {wanted} as (page_size, "
                f"heads, dim); if rows of groups differ, pages may have any axes with as many "
                f"elements in one piece"
            )
        return pools._replace(
            pools=[
                layer_rows(pool, shape) for pool, shape in zip(pools.pools, wanted, strict=True)
            ],
            scales=pools.scales and _seen_scales(pools, wanted, layer),
        ).with_parts()


class ModelBatch(dict[int, LayerPools]):
    """Hold the layers of a model that are bound to a batch so far.

    Parameters
    ----------
    pools : ModelPools
    lookup_table : list of uint32 [B, columns]
        One table for each bundle; a single table may be given without a list.
    cache_lengths : uint32 [B]
    last_tables, last_lengths : optional
        Views of another batch, which are used again where the arrays are the same.

    Raises
    ------
    ValueError
        A wrong number of tables.
    TypeError
        Values that are not arrays.
    """

    __slots__ = ("_lengths", "_pools", "_tables")

    def __init__(
        self,
        pools: ModelPools,
        lookup_table: Any,
        cache_lengths: Any,
        last_tables: Iterable[Any] = repeat(None),
        last_lengths: Any = None,
    ) -> None:
        tables = lookup_table if isinstance(lookup_table, _SEQUENCES) else (lookup_table,)
        if len(tables) != pools.num_tables:
            raise ValueError(
                f"lookup_table has {len(tables)} tables, must have one for each of the "
                f"{pools.num_tables} bundles, as inputs.tables"
            )
        seen = map(any_array, tables, _NAMES, last_tables)
        self._pools, self._tables = pools, list(seen)
        self._lengths = any_array(cache_lengths, "cache_lengths", last_lengths)

    def with_tables(self, lookup_table: Any, cache_lengths: Any) -> ModelBatch:
        """Return the same pools with the pages and lengths of another batch."""
        return ModelBatch(self._pools, lookup_table, cache_lengths, self._tables, self._lengths)

    def bind(self, layer: int) -> LayerPools:
        """Bind a layer; IndexError for a layer that has no rows."""
        rows, bundle = self._pools.layer(layer)
        bound = self[layer] = rows.in_batch(self._tables[bundle], self._lengths)
        return bound


def _one_per_place(name: str, given: Any, count: int) -> Sequence[Any]:
    if given is None:
        return [None] * count
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"{name} is a {type(given).__name__}, must be a list with one for each of the {count} "
            f"layers of a page where params are given"
        )
    if len(given) != count:
        raise ValueError(
            f"{name} has {len(given)} entries, must have one for each of the {count} layers of a "
            f"page, params.layers_per_page"
        )
    return given


def _seen_scales(
    pools: LayerPools, wanted: list[tuple[int, int, int]], layer: int
) -> list[NDArray[np.float32]]:
    seen = []
    for pool, scale, (tokens, heads, width) in zip(
        pools.pools, pools.scales or (), wanted, strict=True
    ):
        group = pool.shape[3] // scale.shape[3]
        shape = tokens, heads, width // group
        if width % group or not _holds(scale, shape):
            raise ValueError(
                f"the scales of layer {layer} are {scale.shape}, must be contiguous pages of "
                f"{shape} as (page_size, heads, groups)"
            )
        seen.append(layer_rows(scale, shape))
    return seen


def _holds(array: Any, shape: tuple[int, int, int]) -> bool:
    """Return whether every page is contiguous and large enough for rows of a shape."""
    _, tokens, heads, width = array.shape
    strides, size = array.strides, array.dtype.itemsize
    is_whole = strides[1:] == (heads * width * size, width * size, size)
    return bool(is_whole) and shape[0] * shape[1] * shape[2] <= tokens * heads * width
