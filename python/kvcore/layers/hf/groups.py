# SPDX-License-Identifier: Apache-2.0
"""The groups of a model's layers, and the arrays of recurrent layers, by its config."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.layers.hf.defaults import CLASS_DEFAULTS
from kvcore.layers.hf.fields import HEADS, HIDDEN, Fields, count, optional_count, require_agreement
from kvcore.layers.hf.layers import (
    CHUNKED,
    FULL,
    KEEPS,
    LIKE_PARAMS,
    SHARING_FIELDS,
    SLIDING,
    STATE_FIELDS,
    STATES,
    Row,
    layer_rows,
    shared_layers,
)
from kvcore.support.dtypes import WIDE

__all__ = ["SIZE_FIELDS", "Arrays", "check_alike", "layer_groups", "state_arrays"]

# ---- arrays of recurrent layers ------------------------------------------------------------------


Arrays = dict[str, tuple[tuple[int, ...], str]]

_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_MAMBA_HEAD_DIM = ("mamba_head_dim", "mamba_headdim", "mamba_d_head")
_MAMBA_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_MAMBA_STATE = ("mamba_d_state", "ssm_state_size")
_MAMBA_KERNEL = ("mamba_d_conv", "conv_kernel")
_MAMBA_EXPAND = ("mamba_expand", "expand")
_ACCUMULATED = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
#: The fields that determine the size of states.
SIZE_FIELDS = (
    *(*_MAMBA_HEADS, *_MAMBA_HEAD_DIM, *_MAMBA_GROUPS, *_MAMBA_STATE, *_MAMBA_KERNEL),
    *(*_MAMBA_EXPAND, *_ACCUMULATED, "mamba_d_ssm", "mamba_dt_rank", "conv1d_width"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"),
    *("linear_attn_config", "short_conv_kernel_size", "conv_L_cache", "lru_width"),
)


def state_arrays(text: Fields, dtype: str, shards: int, row: tuple[int, int]) -> Arrays:
    """Return the arrays that one recurrent layer keeps for a request on one of `shards` devices.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    dtype : str
        Dtype of the activations. Sums over all tokens are float32, unless the config has a dtype
        for them.
    shards : int
        Tensor parallel devices, over which heads and channels are spread.
    row : tuple of int
        K/V heads of the layer, and the width of a head, for a layer that also has K and V.

    Returns
    -------
    dict of str to (shape, dtype)
        Names, shapes and dtypes as in the transformers library's caches: "conv_states"
        [channels, kernel] and "recurrent_states".

    Raises
    ------
    ValueError
        A field is missing or does not divide over the devices, or the kind is unknown.
    """
    if text.get("model_type") == "baichuan_m1":
        shapes = _key_value_conv(text, shards, row)
    else:
        shapes = _kind(text)(text, shards)
    summed = next((text[name] for name in _ACCUMULATED if text.get(name) in WIDE), "float32")
    dtypes = {"conv_states": dtype, "linear_cache": dtype, "recurrent_states": summed}
    return {name: (shape, dtypes[name]) for name, shape in shapes.items()}


Shapes = dict[str, tuple[int, ...]]


def _kind(text: Fields) -> Callable[[Fields, int], Shapes]:
    kind = text.get("model_type")
    by_model = _MODELS.get(str(kind))
    if by_model is not None:
        return by_model
    for name, rule in _FIELDS.items():
        if text.get(name) is not None:
            return rule
    raise ValueError(
        f"kvcore has no rule for the arrays of the states of {kind or 'this model'}; give "
        f"KVCacheParams a State with these arrays in groups="
    )


def _spread(name: str, value: int, shards: int) -> int:
    if value % shards != 0:
        raise ValueError(
            f"{name} {value} of the recurrent layers does not divide over {shards} tensor parallel "
            f"devices; use a degree that divides it"
        )
    return value // shards


def _mamba_width(text: Fields) -> int:
    """Return the channels of a Mamba layer."""
    width = optional_count(text, ("mamba_d_ssm",))
    if width is not None:
        text.ignore("mamba_d_ssm decides", *_MAMBA_EXPAND)
        return width
    return (optional_count(text, _MAMBA_EXPAND) or 2) * count(text, HIDDEN)


def _mamba(text: Fields, shards: int) -> Shapes:
    width = _spread("intermediate size", _mamba_width(text), shards)
    kernel, state = count(text, _MAMBA_KERNEL), count(text, _MAMBA_STATE)
    return {"conv_states": (width, kernel), "recurrent_states": (width, state)}


def _zamba(text: Fields, shards: int) -> Shapes:
    heads, width = count(text, ("n_mamba_heads",)), _mamba_width(text)
    state, here = count(text, _MAMBA_STATE), _spread("n_mamba_heads", heads, shards)
    return {
        "conv_states": (_spread("intermediate size", width, shards), count(text, _MAMBA_KERNEL)),
        "recurrent_states": (here, width // heads, state),
    }


def _mamba2(text: Fields, shards: int) -> Shapes:
    heads = count(text, _MAMBA_HEADS)
    head_dim = _explicit_head_dim(text) or _mamba_width(text) // heads
    groups, state = optional_count(text, _MAMBA_GROUPS) or 1, count(text, _MAMBA_STATE)
    here = _spread(_MAMBA_HEADS[0], heads, shards)
    # If there are fewer groups than devices, several devices have copies of a group.
    groups_here = 1 if shards % groups == 0 else _spread(_MAMBA_GROUPS[0], groups, shards)
    channels = here * head_dim + 2 * groups_here * state
    return {
        "conv_states": (channels, count(text, _MAMBA_KERNEL)),
        "recurrent_states": (here, head_dim, state),
    }


def _explicit_head_dim(text: Fields) -> int | None:
    given = {name: text.get(name) for name in _MAMBA_HEAD_DIM if text.get(name) != "auto"}
    found = optional_count(given, _MAMBA_HEAD_DIM)
    if found is not None:
        text.ignore("the size of a head decides", *_MAMBA_EXPAND, "mamba_d_ssm")
    return found


def _gated_delta(text: Fields, shards: int) -> Shapes:
    k_heads = _spread("linear_num_key_heads", count(text, ("linear_num_key_heads",)), shards)
    v_heads = _spread("linear_num_value_heads", count(text, ("linear_num_value_heads",)), shards)
    k_dim, v_dim = count(text, ("linear_key_head_dim",)), count(text, ("linear_value_head_dim",))
    return {
        "conv_states": (2 * k_heads * k_dim + v_heads * v_dim, count(text, (_LINEAR_KERNEL,))),
        "recurrent_states": (v_heads, k_dim, v_dim),
    }


_LINEAR_KERNEL = "linear_conv_kernel_dim"


def _kimi_delta(text: Fields, shards: int) -> Shapes:
    own = text.part("linear_attn_config")
    given = {name: own.get(name, text.get(f"linear_{name}")) for name in ("head_dim", "num_heads")}
    kernels = (own.get("short_conv_kernel_size"), text.get("short_conv_kernel_size"))
    kernel = next((each for each in kernels if each is not None), text.get(_LINEAR_KERNEL))
    if text.get("model_type") == "bailing_hybrid":
        given = {"head_dim": text.get("head_dim"), "num_heads": count(text, HEADS)}
    head_dim = count(given, ("head_dim",))
    heads = _spread("num_heads", count(given, ("num_heads",)), shards)
    return {
        "conv_states": (3 * heads * head_dim, count({_LINEAR_KERNEL: kernel}, (_LINEAR_KERNEL,))),
        "recurrent_states": (heads, head_dim, head_dim),
    }


def _short_conv(text: Fields, shards: int) -> Shapes:
    channels = _spread(HIDDEN[0], count(text, HIDDEN), shards)
    return {"conv_states": (channels, count(text, ("conv_L_cache",)))}


def _key_value_conv(text: Fields, shards: int, row: tuple[int, int]) -> Shapes:
    # The last tokens of K and of V, which the convolution over both reads.
    heads, width = row
    channels = 2 * _spread("K/V heads", heads, shards) * width
    return {"conv_states": (channels, max(1, count(text, ("conv_window",)) - 1))}


def _lightning(text: Fields, shards: int) -> Shapes:
    heads = count(text, HEADS)
    head_dim = optional_count(text, ("head_dim",)) or count(text, HIDDEN) // heads
    return {"linear_cache": (_spread(HEADS[0], heads, shards), head_dim, head_dim)}


def _griffin(text: Fields, shards: int) -> Shapes:
    width = optional_count(text, ("lru_width",)) or count(text, HIDDEN)
    here = _spread("lru_width", width, shards)
    kernel = optional_count(text, ("conv1d_width",)) or 4
    return {"conv_states": (here, kernel - 1), "recurrent_states": (here,)}


_MODELS = {
    "bailing_hybrid": _kimi_delta,
    "minimax": _lightning,
    "minimax_text_01": _lightning,
    "recurrent_gemma": _griffin,
    "zamba": _zamba,
}
# The kind of state by field; the first field that the config has decides.
_FIELDS = {
    "linear_num_key_heads": _gated_delta,
    "linear_attn_config": _kimi_delta,
    "linear_num_heads": _kimi_delta,
    "conv_L_cache": _short_conv,
    "mamba_n_heads": _mamba2,
    "mamba_num_heads": _mamba2,
    "n_mamba_heads": _mamba2,
    "mamba_d_state": _mamba,
}


# ---- groups --------------------------------------------------------------------------------------


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
    """Read the groups and shared layers of a model for KVCacheParams.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    shape : mapping
        Fields of KVCacheParams: dtype, n_kv_heads, head_dim, v_head_dim, is_mla.
    kinds : list of str
        The kind of each layer.
    activations
        The config's name of the model's dtype, if it has one.
    shards : int
        Tensor parallel devices.
    mtp : int
        Layers at the end that predict further tokens.

    Returns
    -------
    dict
        ``groups``, and ``shared`` if layers read the K and V of other layers. Empty if every layer
        keeps all tokens in rows of the shape.

    Raises
    ------
    ValueError
        No group describes a layer, or a field is missing.
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
    """Refuse layers with different rows, for a cache in which every layer keeps every token.

    Raises
    ------
    ValueError
        The rows of a layer differ from the shape.
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
    """Return a State group for each different set of arrays."""
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
    """Note that sizes of windows, chunks and states do not matter if no layer has them."""
    if SLIDING not in kinds:
        text.ignore("no layer has a window", *_WINDOW, *_SLIDING_ROW)
    if CHUNKED not in kinds:
        text.ignore("no layer has a chunk", "attention_chunk_size")
    if not has_states:
        text.ignore("no layer keeps a state", *SIZE_FIELDS, *STATE_FIELDS)


def _order(item: tuple[str, Row]) -> tuple[bool, bool, str]:
    """Order full groups first: the table of a full group shows the length of a request."""
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
    """Return the size of a window or chunk; the default is that of the model's class."""
    known = CLASS_DEFAULTS.get(str(text.get("model_type")), {})
    silent = {name: known[name] for name in names if name in known and not text.says(name)}
    require_agreement(text, names)
    return optional_count(text, names) or count(text.with_defaults(silent), names)


def _activations(named: object, cache: str) -> str:
    """Return the dtype of the model; states keep it even if K and V are quantized."""
    model = str(named).removeprefix("torch.")
    return next((dtype for dtype in (model, cache) if dtype in WIDE), "bfloat16")
