# SPDX-License-Identifier: Apache-2.0
"""What groups and shared layers must be to describe one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvcore.layers.frozen_map import FrozenMap
from kvcore.layers.kinds import AttentionGroup
from kvcore.layers.packing import Params, bundles, row_widths
from kvcore.layers.state import State
from kvcore.support.arguments import integer

__all__ = ["check_groups", "frozen_groups", "frozen_shared"]

Group = AttentionGroup | State


class Grouped(Params, Protocol):
    """What is read of KVCacheParams."""

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
    """Return groups as a tuple; TypeError for what is none."""
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
    """Return shared layers as a mapping that can be hashed; None where there are none."""
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
    """Raise ValueError where the groups and shared layers do not describe one model."""
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
        raise ValueError("groups is empty, must hold at least one; None is one of all layers")
    if all(isinstance(group, State) for group in groups):
        raise ValueError(
            f"groups holds {len(groups)} State group{'s' * (len(groups) > 1)} and no attention "
            f"group: such a model has no K and V to keep in pages, and kvcore no use for it; keep "
            f"its states yourself"
        )


def _check_layers(kind: str, groups: Sequence[Group], num_layers: int) -> None:
    seen: set[int] = set()
    for group in groups:
        for layer in group.layers:
            if layer >= num_layers:
                raise ValueError(
                    f"layer {layer} of {type(group).__name__} is beyond the model, must be 0 .. "
                    f"{num_layers - 1}; num_layers counts all layers, those without a cache too"
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
            raise ValueError(f"{text}, which has none itself; name the layer that writes them")
        if owner not in own:
            raise ValueError(f"{text}, which is in no attention group; put the owner into one")
        if layer in own:
            raise ValueError(f"{text}, but it is in an attention group; take it out of there")


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
                f"{name}; choose one that divides the rows of every group"
            )


def _check_intervals(params: Grouped, page_size: int) -> None:
    for state in params.state_groups:
        if state.interval is not None and state.interval % page_size != 0:
            raise ValueError(
                f"interval {state.interval} of State is no multiple of the page size, must be one "
                f"of {page_size}: a checkpoint lies at the end of a page"
            )
