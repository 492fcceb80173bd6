# SPDX-License-Identifier: Apache-2.0
"""Which layers share a page, and how large that page is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvcore.layers.kinds import AttentionGroup, FullAttention

__all__ = [
    "Bundle",
    "PageShape",
    "bundles",
    "bundles_of",
    "page_shape",
    "row_elements",
    "row_widths",
]

_MOST_PADDING = 20  # one layer's place in so many may stay empty, or so many bytes of a layer's


@dataclass(frozen=True, slots=True)
class Bundle:
    """Layers of a group that share a page.

    Attributes
    ----------
    group : AttentionGroup
        The group that they are of.
    layers : tuple of int
        The model's layers; ``layers[j]`` lies at place ``j`` of the page.
    page_size : int
        Tokens per page: that of the params times a power of two.
    """

    group: AttentionGroup
    layers: tuple[int, ...]
    page_size: int


@dataclass(frozen=True, slots=True)
class PageShape:
    """Tell what every page of a pool holds, on one device.

    Attributes
    ----------
    layers : int
        Places for layers, the width of the widest bundle.
    elements : tuple of int
        Of one place, over the tokens of a page: (K, V) or (latent,).
    """

    layers: int
    elements: tuple[int, ...]


class Params(Protocol):
    """What is read of KVCacheParams."""

    def __hash__(self) -> int: ...
    @property
    def attention_groups(self) -> tuple[AttentionGroup, ...]: ...
    @property
    def page_size(self) -> int: ...
    @property
    def is_mla(self) -> bool: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int | None: ...
    @property
    def tensor_parallel_degree(self) -> int: ...


def bundles(params: Params) -> tuple[Bundle, ...]:
    """Return the bundles of a model's layers, in the order of the params' groups.

    Parameters
    ----------
    params : KVCacheParams

    Returns
    -------
    tuple of Bundle
        One for every table that a step has. With ``groups=None`` it is one, of all layers.

    Raises
    ------
    TypeError
        No KVCacheParams.

    Notes
    -----
    A page has as many places for layers in every bundle. Their number is chosen so that at most 5 %
    as many places stay empty as there are layers, none of them in full groups where a page of
    several layers can do that, and then so that the bundles are fewest. Where rows of K and V
    differ between groups, the widest has the params' page size and the others the power of two of
    it with which their bytes are nearest.

    Examples
    --------
    >>> from kvcore import KVCacheParams
    >>> from kvcore.groups import FullAttention, SlidingWindow, bundles
    >>> full = [layer for layer in range(62) if layer % 6 == 5]  # Gemma 3 27B
    >>> window = SlidingWindow(sorted(set(range(62)) - set(full)), 1024)
    >>> groups = (FullAttention(full), window)
    >>> params = KVCacheParams("bfloat16", 16, 128, 62, page_size=16, groups=groups)
    >>> len(bundles(params)), bundles(params)[0].layers
    (13, (5, 11, 17, 23, 29))
    """
    if not hasattr(params, "attention_groups"):
        raise TypeError(f"params is a {type(params).__name__}, must be a KVCacheParams")
    return _packed(params)[0]


def bundles_of(params: Params, group: AttentionGroup) -> tuple[Bundle, ...]:
    """Return the bundles of one of the params' groups."""
    return tuple(bundle for bundle in bundles(params) if bundle.group == group)


def page_shape(params: Params) -> PageShape:
    """Return what a page of the pool holds; ValueError where the groups' rows do not agree."""
    return _packed(params)[1]


def row_widths(params: Params, group: AttentionGroup) -> tuple[int, ...]:
    """Return the elements per token, layer and head of a group: (K, V), or (latent,)."""
    if params.is_mla:
        return (group.head_dim or params.head_dim,)
    if group.head_dim is not None:
        return group.head_dim, group.v_head_dim or group.head_dim
    return params.head_dim, group.v_head_dim or params.v_head_dim or params.head_dim


def row_elements(params: Params, group: AttentionGroup) -> tuple[int, ...]:
    """Return the elements per token and layer on one device."""
    heads = 1
    if not params.is_mla:
        heads = (group.n_kv_heads or params.n_kv_heads) // params.tensor_parallel_degree
    return tuple(heads * width for width in row_widths(params, group))


@lru_cache(maxsize=256)
def _packed(params: Params) -> tuple[tuple[Bundle, ...], PageShape]:
    groups = params.attention_groups
    sizes, elements = _page_sizes(params, [row_elements(params, group) for group in groups])
    width = _width(groups)
    packed = tuple(
        Bundle(group, tuple(group.layers[first : first + width]), size)
        for group, size in zip(groups, sizes, strict=True)
        for first in range(0, len(group.layers), width)
    )
    return packed, PageShape(width, elements)


def _page_sizes(
    params: Params, rows: Sequence[tuple[int, ...]]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the page size of each group, and the elements of a layer's place that hold all."""
    widest = max(rows, key=sum)
    sizes = [params.page_size << round(math.log2(sum(widest) / sum(row))) for row in rows]
    # In one array K and V have the same room.
    if not params.is_mla and all(k == v for k, v in rows):
        parts = [[k] for k, _ in rows]
    else:
        parts = [list(row) for row in rows]
    places = [[size * part for part in row] for size, row in zip(sizes, parts, strict=True)]
    room = tuple(max(part) for part in zip(*places, strict=True))
    for group, place, size in zip(params.attention_groups, places, sizes, strict=True):
        for most, here in zip(room, place, strict=True):
            if (most - here) * _MOST_PADDING > here:
                raise ValueError(
                    f"the layers of {type(group).__name__} from layer {group.layers[0]} on have "
                    f"{here} elements in a page of {size} tokens, others {most}, must agree within "
                    f"5 % with a page size that is {params.page_size} times a power of two; choose "
                    f"n_kv_heads and head_dim of the groups so, or give such layers a cache of "
                    f"their own"
                )
    return sizes, room if len(room) == len(rows[0]) else room * 2


def _width(groups: Sequence[AttentionGroup]) -> int:
    """Return how many layers share a page."""
    counts = [len(group.layers) for group in groups]
    full = [len(group.layers) for group in groups if isinstance(group, FullAttention)]

    def empty(counts: list[int], width: int) -> int:
        return sum(-count % width for count in counts)

    padded = [
        width
        for width in range(1, max(counts) + 1)
        if empty(counts, width) * _MOST_PADDING <= sum(counts)
    ]
    unpadded = [width for width in padded if width > 1 and not empty(full, width)]
    return min(
        unpadded or padded,
        key=lambda width: (sum(-(-count // width) for count in counts), empty(counts, width)),
    )
