# SPDX-License-Identifier: Apache-2.0
"""The layers that share a page, the size of that page, and checks of a model's groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from kvcore.layers.kinds import AttentionGroup, FrozenMap, FullAttention, State
from kvcore.support.arguments import integer

__all__ = [
    "Bundle",
    "PageShape",
    "bundles",
    "bundles_of",
    "check_groups",
    "frozen_groups",
    "frozen_shared",
    "page_shape",
    "row_elements",
    "row_widths",
]

_MOST_PADDING = 20  # at most 1/20 of the layer places, and of the bytes of a place, stays unused


@dataclass(frozen=True, slots=True)
class Bundle:
    """Layers of a group that share a page.

    Attributes
    ----------
    group : AttentionGroup
        The group of these layers.
    layers : tuple of int
        Indices of the model's layers; ``layers[j]`` has place ``j`` of the page.
    page_size : int
        Tokens per page: the page size of the params times a power of two.
    """

    group: AttentionGroup
    layers: tuple[int, ...]
    page_size: int


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of every page of a pool, on one device.

    Attributes
    ----------
    layers : int
        Number of places for layers in a page: the layers of the largest bundle.
    elements : tuple of int
        Elements of one place, for all tokens of a page: (K, V) or (latent,).
    """

    layers: int
    elements: tuple[int, ...]


class Params(Protocol):
    """The fields of KVCacheParams that packing reads."""

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
        One bundle for every block table of a step. With ``groups=None``, one bundle has all layers.

    Raises
    ------
    TypeError
        `params` is not a KVCacheParams.

    Notes
    -----
    Every bundle has the same number of layer places in a page. Among the numbers with which the
    empty places are at most 5 % of the layers, the choice prefers pages of several layers without
    empty places in full groups, and of these the fewest bundles. If the rows of K and V differ
    between groups, the widest group has the params' page size. The page size of another group is
    the params' page size times the power of two that makes its pages nearest in bytes.

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
    """Return the bundles of a group of the params."""
    return tuple(bundle for bundle in bundles(params) if bundle.group == group)


def page_shape(params: Params) -> PageShape:
    """Return the shape of a page; ValueError if the rows of the groups do not fit one page."""
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
    """Return the page size of each group, and the elements of a place that fits every layer."""
    widest = max(rows, key=sum)
    sizes = [params.page_size << round(math.log2(sum(widest) / sum(row))) for row in rows]
    # If K and V share an array, both have the same room.
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
                    f"other n_kv_heads and head_dim, or give these layers a cache of their own"
                )
    return sizes, room if len(room) == len(rows[0]) else room * 2


def _width(groups: Sequence[AttentionGroup]) -> int:
    """Return the number of layers that share a page."""
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


# ---- groups of one model -------------------------------------------------------------------------


Group = AttentionGroup | State


class Grouped(Params, Protocol):
    """The fields of KVCacheParams that the checks of groups read."""

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_scale_granularity(self) -> int | None: ...
    @property
    def shared(self) -> Mapping[int, int] | None: ...
    @property
    def groups(self) -> Sequence[Group] | None: ...
    @property
    def state_groups(self) -> tuple[State, ...]: ...


def frozen_groups(groups: Any) -> tuple[Group, ...] | None:
    """Return groups as a tuple; TypeError if `groups` is not a sequence of groups."""
    if groups is None:
        return None
    if isinstance(groups, (AttentionGroup, State, str)) or not isinstance(groups, Iterable):
        raise TypeError(
            f"groups is a {type(groups).__name__}, must be a sequence of FullAttention, "
            f"SlidingWindow, ChunkedLocal and State, or None"
        )
    return tuple(_group(each) for each in groups)


def _group(group: Any) -> Group:
    if isinstance(group, (AttentionGroup, State)):
        return group
    raise TypeError(
        f"groups holds a {type(group).__name__}, must hold FullAttention, SlidingWindow, "
        f"ChunkedLocal and State"
    )


def frozen_shared(shared: Any) -> FrozenMap[int, int] | None:
    """Return shared layers as a hashable mapping; None if no layers are shared."""
    if shared is None:
        return None
    if not isinstance(shared, Mapping):
        raise TypeError(f"shared is a {type(shared).__name__}, must be a dict of layer to owner")
    found = {
        integer("a layer of shared", layer): integer("an owner of shared", owner)
        for layer, owner in shared.items()
    }
    return FrozenMap(sorted(found.items())) if found else None


def check_groups(params: Grouped) -> None:
    """Raise ValueError if the groups and shared layers do not describe one model."""
    if params.groups is not None:
        _check_kinds(params.groups)
    for kind, groups in (
        ("an attention group", params.attention_groups),
        ("a State group", params.state_groups),
    ):
        _check_layers(kind, groups, params.num_layers)
    _check_shared(params)
    for group in params.attention_groups:
        _check_rows(params, group)
    _check_intervals(params, max(bundle.page_size for bundle in bundles(params)))


def _check_kinds(groups: Sequence[Group]) -> None:
    if not groups:
        raise ValueError(
            "groups is empty, must hold at least one group; None means one group of all layers"
        )
    if all(isinstance(group, State) for group in groups):
        raise ValueError(
            f"groups holds {len(groups)} State group{'s' * (len(groups) > 1)} and no attention "
            f"group: this model has no K and V to keep in pages; keep its states without kvcore"
        )


def _check_layers(kind: str, groups: Sequence[Group], num_layers: int) -> None:
    seen: set[int] = set()
    for group in groups:
        for layer in group.layers:
            if layer >= num_layers:
                raise ValueError(
                    f"layer {layer} of {type(group).__name__} is beyond the model, must be 0 .. "
                    f"{num_layers - 1}; num_layers counts all layers, also layers without a cache"
                )
            if layer in seen:
                raise ValueError(f"layer {layer} is in two groups, must be in {kind} at most once")
            seen.add(layer)


def _check_shared(params: Grouped) -> None:
    own = {layer for group in params.attention_groups for layer in group.layers}
    shared = params.shared or {}
    for layer, owner in shared.items():
        text = f"shared says that layer {layer} reads the K and V of layer {owner}"
        if not 0 <= layer < params.num_layers:
            raise ValueError(f"{text}, which must be 0 .. {params.num_layers - 1}")
        if owner in shared:
            raise ValueError(f"{text}, which is itself shared; name the layer that writes them")
        if owner not in own:
            raise ValueError(f"{text}, which is in no attention group; put the owner into one")
        if layer in own:
            raise ValueError(f"{text}, but it is in an attention group; take it out of the group")


def _check_rows(params: Grouped, group: AttentionGroup) -> None:
    heads, shards = group.n_kv_heads, params.tensor_parallel_degree
    name = type(group).__name__
    if params.is_mla and (heads is not None or group.v_head_dim is not None):
        raise ValueError(
            f"{name} has n_kv_heads {heads} and v_head_dim {group.v_head_dim} with is_mla, must "
            f"have neither: a latent row has no heads and no V"
        )
    if heads is not None and heads % shards != 0:
        raise ValueError(
            f"n_kv_heads {heads} of {name} does not divide over {shards} tensor parallel devices; "
            f"heads are not replicated, use a degree that divides them"
        )
    scale = params.kv_scale_granularity
    for width in row_widths(params, group):
        if scale is not None and width % scale != 0:
            raise ValueError(
                f"kv_scale_granularity {scale} does not divide the {width} elements of a row of "
                f"{name}; choose a granularity that divides the rows of every group"
            )


def _check_intervals(params: Grouped, page_size: int) -> None:
    for state in params.state_groups:
        if state.interval is not None and state.interval % page_size != 0:
            raise ValueError(
                f"interval {state.interval} of State must be a multiple of the page size "
                f"{page_size}: a checkpoint is at the end of a page"
            )
