# SPDX-License-Identifier: Apache-2.0
"""The places of a model's layers in the pages of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from kvcore.layers.kinds import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow
from kvcore.layers.packing import (
    Bundle,
    Params,
    bundles,
    bundles_of,
    page_shape,
    row_elements,
    row_widths,
)

__all__ = [
    "LayerMap",
    "LayerPlace",
    "column_tokens",
    "core_groups",
    "has_windows",
    "mixes_pages",
    "pages_per_column",
    "part_shapes",
]


class GroupedParams(Params, Protocol):
    """The fields of KVCacheParams that this module reads."""

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_dim(self) -> int: ...
    @property
    def shared(self) -> Mapping[int, int] | None: ...
    @property
    def groups(self) -> Any: ...


class LayerPlace(NamedTuple):
    """The place of a layer's rows, on one device.

    Attributes
    ----------
    bundle : int
        The bundle whose block table has the layer's pages.
    position : int
        The layer's place in a page of the bundle.
    page_size, heads : int
        Tokens and heads of the layer's rows in a page.
    widths : tuple of int
        Elements per head of K and V, or of a latent row.
    window, chunk : int or None
        Tokens of the layer's window or chunk.
    owner : int or None
        The layer whose K and V this layer reads; None if the layer has its own.
    """

    bundle: int
    position: int
    page_size: int
    heads: int
    widths: tuple[int, ...]
    window: int | None
    chunk: int | None
    owner: int | None = None


def _heads(params: Params, group: AttentionGroup) -> int:
    if params.is_mla:
        return 1
    return (group.n_kv_heads or params.n_kv_heads) // params.tensor_parallel_degree


def _place(params: Params, at: int, index: int, bundle: Bundle) -> LayerPlace:
    group = bundle.group
    return LayerPlace(
        at,
        index,
        bundle.page_size,
        _heads(params, group),
        row_widths(params, group),
        group.window if isinstance(group, SlidingWindow) else None,
        group.chunk if isinstance(group, ChunkedLocal) else None,
    )


class LayerMap:
    """The places of a model's layers; a layer that shares K and V has the place of its owner.

    Parameters
    ----------
    params : KVCacheParams
        Params with groups or shared layers.
    """

    __slots__ = ("_places", "num_layers")

    def __init__(self, params: GroupedParams) -> None:
        self.num_layers = params.num_layers
        self._places = {
            layer: _place(params, at, index, bundle)
            for at, bundle in enumerate(bundles(params))
            for index, layer in enumerate(bundle.layers)
        }
        for layer, owner in (params.shared or {}).items():
            self._places[layer] = self._places[owner]._replace(owner=owner)

    @classmethod
    def of(cls, params: GroupedParams) -> LayerMap | None:
        """Return the map of these params; None if every page has all layers in order."""
        return None if params.groups is None and params.shared is None else cls(params)

    @property
    def with_pages(self) -> list[int]:
        """The layers with K and V, ascending; layers of State groups only are left out."""
        return sorted(self._places)

    def __getitem__(self, layer: int) -> LayerPlace:
        """Return the place of a layer; IndexError if the layer has no K and V."""
        place = self._places.get(layer)
        if place is not None:
            return place
        if 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is in no attention group, so it has no K and V")
        raise IndexError(
            f"layer is {layer}, must be at least 0 and below {self.num_layers}, the layers"
        )


def part_shapes(params: GroupedParams, num_pages: int) -> list[tuple[int, ...]]:
    """Return the shape of each array of a device's pool, as ``kvcore.pools.shard_shapes`` does.

    Notes
    -----
    If the rows of the widest group fill a layer's place, tokens, heads and elements have separate
    axes. Otherwise they share one axis.
    """
    groups = params.attention_groups
    shape = page_shape(params)
    widest = max(groups, key=lambda group: sum(row_elements(params, group)))
    heads, widths = _heads(params, widest), row_widths(params, widest)
    rows = [row_widths(params, group) for group in groups]
    parts = [(params.kv_dim, widths[0], shape.elements[0])]
    if not params.is_mla and any(k != v for k, v in rows):
        parts = [(1, width, room) for width, room in zip(widths, shape.elements, strict=True)]
    return [
        (num_pages, kv, shape.layers, params.page_size, heads, width)
        if params.page_size * heads * width == room
        else (num_pages, kv, shape.layers, 1, 1, room)
        for kv, width, room in parts
    ]


def column_tokens(params: GroupedParams) -> int:
    """Return the tokens of a column, the unit of hits and commits: the largest page size."""
    if params.groups is None and params.shared is None:
        return params.page_size
    return max(bundle.page_size for bundle in bundles(params))


def pages_per_column(params: GroupedParams) -> tuple[int, ...]:
    """Return the number of pages of each bundle in a column."""
    if params.groups is None and params.shared is None:
        return (1,)
    tokens = column_tokens(params)
    return tuple(tokens // bundle.page_size for bundle in bundles(params))


def has_windows(params: GroupedParams) -> bool:
    """Return true if some layers drop tokens, so pages are reserved only for the next step."""
    if params.groups is None:
        return False
    return not all(isinstance(group, FullAttention) for group in params.attention_groups)


def mixes_pages(params: GroupedParams) -> bool:
    """Return true if pages of different bundles have different row layouts."""
    layers = LayerMap.of(params)
    if layers is None:
        return False
    places = [layers[bundle.layers[0]] for bundle in bundles(params)]
    return len({(place.page_size, place.heads, place.widths) for place in places}) > 1


def core_groups(params: GroupedParams) -> list[tuple[str, int, int, int]]:
    """Return the groups for the core: kind, span, number of bundles, tokens per page."""
    if params.groups is None and params.shared is None:
        return []
    found = []
    for group in params.attention_groups:
        own = bundles_of(params, group)
        kind, span = _rule(group)
        found.append((kind, span, len(own), own[0].page_size))
    return found


def _rule(group: AttentionGroup) -> tuple[str, int]:
    if isinstance(group, SlidingWindow):
        return "sliding", group.window
    if isinstance(group, ChunkedLocal):
        return "chunked", group.chunk
    if isinstance(group, FullAttention):
        return "full", 0
    raise TypeError(f"a {type(group).__name__} has no rule in the core")
