# SPDX-License-Identifier: Apache-2.0
"""The shape of a KV cache out of a Hugging Face ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcore.dtypes import itemsize
from kvcore.hf_fields import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Config,
    count,
    field,
    flag,
    language_model,
    load,
    optional_count,
    part,
)
from kvcore.hf_groups import layer_groups
from kvcore.hf_layers import STATE_FIELDS, layer_kinds

__all__ = ["cache_shape"]

# These make layers differ.
_PER_LAYER = ("num_key_value_heads_per_layer", "block_configs", "per_layer_config")


def _check_decoder(text: Config) -> None:
    if text.get("is_encoder_decoder"):
        raise ValueError(
            f"is_encoder_decoder of the config is true: {text.get('model_type', 'this model')} "
            f"caches cross attention too, which kvcore does not"
        )
    if text.get("n_recurrent_loops") is not None:
        raise ValueError(
            f"n_recurrent_loops of the config is {text['n_recurrent_loops']}: "
            f"{text.get('model_type', 'this model')} runs layers again and again, each time with K "
            f"and V of their own, of which kvcore does not keep count"
        )


def _check_grouped(text: Config) -> None:
    crossing = [n for n in ("cross_attention_layers", "add_cross_attention") if text.get(n)]
    if crossing:
        raise ValueError(
            f"{crossing[0]} of the config: {text.get('model_type', 'this model')} caches cross "
            f"attention too, which kvcore does not"
        )
    layer_kinds(text, _layers(text))  # before its heads are missed, where it has none
    _refuse_uneven(text, [name for name in _PER_LAYER[:2] if text.get(name)])


def _refuse_uneven(text: Config, uneven: list[str]) -> None:
    if uneven:
        raise ValueError(
            f"{uneven[0]} of the config makes the layers of {text.get('model_type', 'this model')} "
            f"differ, a page holds K and V of one shape"
        )


def _check_uniform(text: Config) -> None:
    kind = text.get("model_type", "this model")
    types = text.get("layer_types") or []
    if not isinstance(types, list):
        raise ValueError(f"layer_types of the config is {types!r}, must be a list")
    state = [name for name in types if not str(name).endswith("attention")]
    state += [name for name in types if name == "linear_attention"]
    state += [name for name in STATE_FIELDS if text.get(name) is not None and not types]
    if state:
        raise ValueError(
            f"{kind} keeps a recurrent state ({state[0]} of the config), "
            f"kvcore caches K and V of attention layers only"
        )
    uneven = [name for name in _PER_LAYER if text.get(name)]
    if text.get("global_head_dim") not in (None, text.get("head_dim")):
        uneven.append("global_head_dim")
    _refuse_uneven(text, uneven)


def _layers(text: Config) -> int:
    blocks = text.get("layers_block_type")
    if isinstance(blocks, list) and all(text.get(name) is None for name in LAYERS):
        return len(blocks)
    layers = count(text, LAYERS)
    # Each of LongCat's num_layers attends twice.
    attends_twice = text.get("model_type") == "longcat_flash" and LAYERS[0] not in text
    return 2 * layers if attends_twice else layers


def _kv_heads(text: Config, heads: int) -> int:
    """Return the K/V heads, by the rule of the model's family."""
    attention = part(text, "attn_config")  # MPT, DBRX
    if "multi_query_group_num" in text:  # ChatGLM
        shares = flag(text, "multi_query_attention", default=True)
        return count(text, ("multi_query_group_num",)) if shares else heads
    if str(text.get("model_type")).lower() in ("falcon", "refinedweb", "refinedwebmodel"):
        grouped = flag(text, "new_decoder_architecture", default="n_head_kv" in text)
        if not grouped:
            return 1 if flag(text, "multi_query", default=True) else heads
    elif flag(text, "multi_query", default=False):  # GPT-BigCode
        return 1
    if attention.get("attn_type") == "multiquery_attention":
        return 1
    found = optional_count(text, KV_HEADS) or optional_count(attention, ("kv_n_heads",))
    if found is not None and heads % found != 0:
        raise ValueError(
            f"{field(text, KV_HEADS)[0]} of the config is {found}, "
            f"must divide the {heads} of {field(text, HEADS)[0]}"
        )
    return heads if found is None else found


def _head_dim(text: Config, heads: int) -> int:
    explicit = optional_count(text, HEAD_DIM)
    if explicit is not None:
        return explicit
    hidden = count(text, HIDDEN)
    if hidden % heads != 0:
        raise ValueError(
            f"{field(text, HIDDEN)[0]} of the config is {hidden}, no multiple of the {heads} "
            f"of {field(text, HEADS)[0]}; such a config needs head_dim"
        )
    return hidden // heads


def _heads(text: Config) -> dict[str, Any]:
    heads = count(text, HEADS)
    head_dim = _head_dim(text, heads)
    shape = {"is_mla": False, "n_kv_heads": _kv_heads(text, heads), "head_dim": head_dim}
    if text.get("v_head_dim") not in (None, 0, head_dim):
        shape["v_head_dim"] = count(text, ("v_head_dim",))
    return shape


def _dtype(text: Config, whole: Config) -> str:
    name, value = field(text, DTYPE)
    if value is None:
        name, value = field(whole, DTYPE)
    if value is None:
        raise ValueError("the config names no dtype; pass dtype= of the cache")
    try:
        found = str(value).removeprefix("torch.")
        itemsize(found)
    except ValueError as error:
        raise ValueError(f"{name} of the config: {error}; or pass dtype= of the cache") from error
    return found


def cache_shape(
    config: Config | str | Path,
    dtype: str | None = None,
    *,
    groups: bool = False,
    shards: int = 1,
) -> dict[str, Any]:
    """Read the fields of KVCacheParams that a model decides.

    Parameters
    ----------
    config : mapping, or path of a ``config.json`` or of the directory that holds it
        Of a multimodal model the language model is read.
    dtype : str, optional
        In place of the config's ``dtype`` or ``torch_dtype``.
    groups : bool
        Tell which layers keep which tokens, and take models with states.
    shards : int
        Devices that a replica's states are spread over.

    Returns
    -------
    dict
        dtype, n_kv_heads, head_dim, num_layers, is_mla, and v_head_dim where V has its own width;
        with `groups` also groups and shared, where the layers are not all alike.

    Raises
    ------
    ValueError
        A field is missing or out of range, or the model's layers are not all K and V of one shape;
        what no file can be called, a file that holds no JSON.
    TypeError
        Neither mapping nor path.
    OSError
        The file cannot be read.

    Notes
    -----
    Multi-head latent attention (``kv_lora_rank``) caches one row of ``kv_lora_rank +
    qk_rope_head_dim`` elements per token and layer (DeepSeek-V2, arXiv:2405.04434). Without
    `groups` every layer keeps every token.
    """
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype is a {type(dtype).__name__}, must be a str")
    whole = load(config)
    text = language_model(whole)
    _check_decoder(text)
    (_check_grouped if groups else _check_uniform)(text)
    shape: dict[str, Any] = {"num_layers": _layers(text)}
    if text.get("kv_lora_rank") is not None:
        width = count(text, ("kv_lora_rank",)) + count(text, ("qk_rope_head_dim",))
        shape |= {"is_mla": True, "n_kv_heads": 1, "head_dim": width}
    else:
        shape |= _heads(text)
    shape["dtype"] = _dtype(text, whole) if dtype is None else dtype
    if not groups:
        return shape
    named = next((each for each in (field(text, DTYPE)[1], field(whole, DTYPE)[1]) if each), None)
    return shape | layer_groups(text, shape, named, shards)
