# SPDX-License-Identifier: Apache-2.0
"""The groups of a model's layers out of its Hugging Face config."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.layers.hf.defaults import CLASS_DEFAULTS
from kvcore.layers.hf.fields import count, optional_count, require_agreement
from kvcore.layers.hf.layers import (
    CHUNKED,
    FULL,
    KEEPS,
    SHARING_FIELDS,
    SLIDING,
    STATE_FIELDS,
    STATES,
    shared_layers,
)
from kvcore.layers.hf.reading import Fields
from kvcore.layers.hf.rows import LIKE_PARAMS, Row, layer_rows
from kvcore.layers.hf.states import SIZE_FIELDS, Arrays, state_arrays
from kvcore.support.dtypes import WIDE

__all__ = ["check_alike", "layer_groups"]

_WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
_SLIDING_ROW = (
    *("swa_num_key_value_heads", "num_swa_key_value_heads", "swa_num_attention_heads"),
    *("num_swa_attention_heads", "num_sliding_attention_heads", "swa_head_dim", "swa_v_head_dim"),
)
_ROW = ("n_kv_heads", "head_dim", "v_head_dim")


def layer_groups(
    text: Fields,
    shape: Mapping[str, Any],
    kinds: list[str],
    *,
    activations: object,
    shards: int,
    mtp: int,
) -> dict[str, Any]:
    """Read what KVCacheParams needs beside the shape of one layer.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    shape : mapping
        Fields of KVCacheParams: dtype, n_kv_heads, head_dim, v_head_dim, is_mla.
    kinds : list of str
        Of each layer.
    activations
        The config's name of the model's dtype, if it has one.
    shards : int
        Tensor parallel devices.
    mtp : int
        Layers at the end that predict further tokens.

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
    shared = shared_layers(text, kinds[: len(kinds) - mtp])
    rows = layer_rows(text, shape, kinds)
    members: dict[tuple[str, Row], list[int]] = {}
    states: dict[Row, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind in KEEPS and layer not in shared:
            members.setdefault((KEEPS[kind], rows[layer]), []).append(layer)
        if kind in STATES:
            states.setdefault(rows[layer], []).append(layer)
    groups: list[AttentionGroup | State] = [
        _attention(text, kind, members[kind, row], dict(zip(_ROW, row, strict=True)))
        for kind, row in sorted(members, key=_order)
    ]
    groups += _states(text, shape, _activations(activations, shape["dtype"]), shards, states)
    _ignore_unused(text, {kind for kind, _ in members}, has_states=bool(states))
    if groups == [FullAttention(range(len(kinds)))]:
        return {}
    return {"groups": tuple(groups)} | ({"shared": shared} if shared else {})


def check_alike(text: Fields, shape: Mapping[str, Any], kinds: list[str]) -> None:
    """Refuse layers whose rows differ, for a cache that gives every layer every token.

    Raises
    ------
    ValueError
    """
    rows = layer_rows(text, shape, kinds)
    text.ignore("every layer keeps K and V of its own", *SHARING_FIELDS)
    other = next((layer for layer, row in enumerate(rows) if row != LIKE_PARAMS), None)
    if other is not None:
        heads, width, _ = rows[other]
        raise ValueError(
            f"layer {other} of {text.get('model_type', 'this model')} has rows of "
            f"{heads or shape['n_kv_heads']} heads of {width or shape['head_dim']}, most others of "
            f"{shape['n_kv_heads']} heads of {shape['head_dim']}: a page without groups holds K "
            f"and V of one shape; use groups"
        )
    _ignore_unused(text, (), has_states=False)


def _states(
    text: Fields, shape: Mapping[str, Any], dtype: str, shards: int, states: dict[Row, list[int]]
) -> list[State]:
    """Return a group for each set of arrays that layers keep as their state."""
    found: list[tuple[Arrays, list[int]]] = []
    for row, layers in states.items():
        heads, width = row[0] or shape["n_kv_heads"], row[1] or shape["head_dim"]
        arrays = state_arrays(text, dtype, shards, (heads, width))
        alike = next((own for other, own in found if other == arrays), None)
        if alike is None:
            found.append((arrays, list(layers)))
        else:
            alike.extend(layers)
    return [State(sorted(layers), arrays) for arrays, layers in found]


def _ignore_unused(text: Fields, kinds: Container[str], *, has_states: bool) -> None:
    """Note that sizes of windows, chunks and states do not matter without such layers."""
    if SLIDING not in kinds:
        text.ignore("no layer has a window", *_WINDOW, *_SLIDING_ROW)
    if CHUNKED not in kinds:
        text.ignore("no layer has a chunk", "attention_chunk_size")
    if not has_states:
        text.ignore("no layer keeps a state", *SIZE_FIELDS, *STATE_FIELDS)


def _order(item: tuple[str, Row]) -> tuple[bool, bool, str]:
    """Full groups come first: their table is the one that a request's length shows in."""
    kind, row = item
    return kind != FULL, row != LIKE_PARAMS, str(item)


def _attention(
    text: Fields, kind: str, layers: list[int], row: dict[str, int | None]
) -> AttentionGroup:
    if kind == FULL:
        return FullAttention(layers, **row)
    if kind == CHUNKED:
        return ChunkedLocal(layers, _span(text, ("attention_chunk_size",)), **row)
    return SlidingWindow(layers, _span(text, _WINDOW), **row)


def _span(text: Fields, names: tuple[str, ...]) -> int:
    """Return the size of a window or chunk; by default it is that of the model's class."""
    known = CLASS_DEFAULTS.get(str(text.get("model_type")), {})
    silent = {name: known[name] for name in names if name in known and not text.says(name)}
    require_agreement(text, names)
    return optional_count(text, names) or count(text.with_defaults(silent), names)


def _activations(named: object, cache: str) -> str:
    """Return the dtype of the model, whose states are not narrowed with its K and V."""
    model = str(named).removeprefix("torch.")
    return next((dtype for dtype in (model, cache) if dtype in WIDE), "bfloat16")
