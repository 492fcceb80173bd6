# SPDX-License-Identifier: Apache-2.0
"""The groups of a model's layers out of its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.dtypes import WIDE
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.hf_fields import DEFAULT_WINDOWS, Config, count, optional_count
from kvcore.hf_layers import (
    CHUNKED,
    FULL,
    KEEPS,
    SLIDING,
    STATES,
    layer_kinds,
    shared_layers,
)
from kvcore.hf_states import state_arrays

__all__ = ["layer_groups"]

_WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
_ROW = ("n_kv_heads", "head_dim", "v_head_dim")
_ROW_FIELDS = ("num_key_value_heads", "head_dim", "v_head_dim")

Row = tuple[int | None, int | None, int | None]
_LIKE_PARAMS: Row = (None, None, None)


def layer_groups(
    text: Config, shape: Mapping[str, Any], activations: object, shards: int
) -> dict[str, Any]:
    """Read what KVCacheParams needs beside the shape of one layer.

    Parameters
    ----------
    text : mapping
        The config of the language model.
    shape : mapping
        Fields of KVCacheParams: num_layers, dtype, n_kv_heads, head_dim, v_head_dim, is_mla.
    activations
        The config's name of the model's dtype, if it has one.
    shards : int
        Tensor parallel devices.

    Returns
    -------
    dict
        groups, and shared where layers read the K and V of others; empty where every layer keeps
        all tokens in rows of the shape.

    Raises
    ------
    ValueError
        A layer keeps what no group describes, or a field is missing.
    """
    kinds = layer_kinds(text, shape["num_layers"])
    shared = shared_layers(text, kinds)
    rows = _rows(text, shape, kinds)
    members: dict[tuple[str, Row], list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind in KEEPS and layer not in shared:
            members.setdefault((KEEPS[kind], rows[layer]), []).append(layer)
    groups: list[AttentionGroup | State] = [
        _attention(text, kind, members[kind, row], dict(zip(_ROW, row, strict=True)))
        for kind, row in sorted(members, key=_order)
    ]
    states = [layer for layer, kind in enumerate(kinds) if kind in STATES]
    if states:
        arrays = state_arrays(text, _activations(activations, shape["dtype"]), shards)
        groups.append(State(states, arrays))
    if groups == [FullAttention(range(len(kinds)))]:
        return {}
    return {"groups": tuple(groups)} | ({"shared": shared} if shared else {})


def _order(item: tuple[str, Row]) -> tuple[bool, bool, str]:
    """Full groups come first: their table is the one that a request's length shows in."""
    kind, row = item
    return kind != FULL, row != _LIKE_PARAMS, str(item)


def _attention(
    text: Config, kind: str, layers: list[int], row: dict[str, int | None]
) -> AttentionGroup:
    if kind == FULL:
        return FullAttention(layers, **row)
    # A config that says which layers have a window may leave its size to the class.
    known = {**DEFAULT_WINDOWS.get(str(text.get("model_type")), {}), **text}
    if kind == CHUNKED:
        return ChunkedLocal(layers, count(known, ("attention_chunk_size",)), **row)
    return SlidingWindow(layers, count(known, _WINDOW), **row)


def _activations(named: object, cache: str) -> str:
    """Return the dtype of the model, whose states are not narrowed with its K and V."""
    model = str(named).removeprefix("torch.")
    return next((dtype for dtype in (model, cache) if dtype in WIDE), "bfloat16")


def _rows(text: Config, shape: Mapping[str, Any], kinds: list[str]) -> list[Row]:
    """Return for each layer what differs from the shape."""
    given = [_LIKE_PARAMS] * len(kinds)
    if shape["is_mla"]:
        if text.get("per_layer_config"):
            raise ValueError(
                "per_layer_config of the config makes latent rows differ, which kvcore does not "
                "keep in one pool; pass groups= of your own"
            )
        return given
    uniform = (shape["n_kv_heads"], shape["head_dim"], shape.get("v_head_dim"))
    for layer, kind in enumerate(kinds):
        heads, *widths = _row(text, layer, kind, uniform)
        given[layer] = (
            None if heads == uniform[0] else heads,
            *((None, None) if tuple(widths) == uniform[1:] else widths),
        )
    return given


def _row(text: Config, layer: int, kind: str, uniform: Row) -> Row:
    heads, head_dim, v_head_dim = uniform
    if KEEPS.get(kind) == SLIDING:
        heads = optional_count(text, ("swa_num_key_value_heads",)) or heads
        head_dim = optional_count(text, ("swa_head_dim",)) or head_dim
        v_head_dim = optional_count(text, ("swa_v_head_dim",)) or v_head_dim
    else:
        head_dim = optional_count(text, ("global_head_dim",)) or head_dim
        if text.get("attention_k_eq_v", True):
            heads = optional_count(text, ("num_global_key_value_heads",)) or heads
    changed = _of_layer(text, layer)
    return (
        optional_count(changed, ("num_key_value_heads",)) or heads,
        optional_count(changed, ("head_dim",)) or head_dim,
        optional_count(changed, ("v_head_dim",)) or v_head_dim,
    )


def _of_layer(text: Config, layer: int) -> Config:
    """Return the fields that the config gives for one layer."""
    changed = text.get("per_layer_config") or {}
    if not isinstance(changed, Mapping):
        raise ValueError(f"per_layer_config of the config is {changed!r}, must be an object")
    for name, fields in changed.items():
        if str(name).isdecimal() and int(name) == layer:
            unknown = set(fields) - {*_ROW_FIELDS, "num_attention_heads"}
            if unknown:
                raise ValueError(
                    f"per_layer_config of the config gives layer {layer} a {sorted(unknown)[0]}, "
                    f"must give {', '.join(_ROW_FIELDS)}: other layers are in no group"
                )
            return dict(fields)
    return {}
