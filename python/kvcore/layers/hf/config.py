# SPDX-License-Identifier: Apache-2.0
"""The shape and the dtype of a KV cache, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.groups import State
from kvcore.layers.hf.fields import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Config,
    Fields,
    Notes,
    count,
    field,
    flag,
    language_model,
    load,
    optional_count,
    require_agreement,
)
from kvcore.layers.hf.groups import check_alike, layer_groups
from kvcore.layers.hf.layers import (
    INDEXED,
    MTP_FIELDS,
    STATE_FIELDS,
    index_width,
    layer_heads,
    layer_kinds,
    mtp_layers,
)
from kvcore.layers.hf.unread import refuse_unread, without_assumed
from kvcore.support.dtypes import itemsize

__all__ = ["ConfigReading", "quantized_dtype", "read_config", "with_copied_heads"]

_REMEDY = "pass dtype= of the cache"
# Type and bits of `kv_cache_scheme`, which compressed-tensors and ModelOpt write.
_SCHEMES: dict[tuple[Any, Any], str] = {("float", 8): "float8_e4m3fn", ("int", 8): "int8"}
_PLAIN = (None, "tensor", "attn_head")  # scales that do not grow with the tokens
# Names of ModelOpt.
_ALGORITHMS = {"FP8": "float8_e4m3fn", "INT8": "int8"}


def quantized_dtype(whole: Fields, text: Fields) -> str | None:
    """Return the dtype of K and V in ``quantization_config``; None if it has no such dtype.

    Parameters
    ----------
    whole, text : Fields
        The whole config, and the config of the language model in it.

    Raises
    ------
    ValueError
        No dtype of a cache matches the quantization of K and V.

    Notes
    -----
    Reads ``kv_cache_scheme`` of compressed-tensors and ``kv_cache_quant_algo`` of ModelOpt.
    """
    for fields in (text, whole):
        section = fields.part("quantization_config")
        for part in (section, section.part("quantization")):
            found = _by_scheme(part.get("kv_cache_scheme")) or _by_algorithm(
                part.get("kv_cache_quant_algo")
            )
            if found is not None:
                return found
    return None


def _by_scheme(scheme: Any) -> str | None:
    if scheme is None:
        return None
    name = f"kv_cache_scheme of the config's quantization_config is {scheme!r}"
    if not isinstance(scheme, dict):
        raise ValueError(f"{name}, must be an object; {_REMEDY}")
    found = _SCHEMES.get((scheme.get("type", "float"), scheme.get("num_bits")))
    if found is None:
        raise ValueError(f"{name}, must have a type and num_bits of {list(_SCHEMES)}; {_REMEDY}")
    if scheme.get("strategy") not in _PLAIN:
        raise ValueError(
            f"{name}, whose scales are kept with every token; {_REMEDY}, and kv_scale_granularity="
        )
    return found


def _by_algorithm(name: Any) -> str | None:
    if name is None:
        return None
    if name not in _ALGORITHMS:
        raise ValueError(
            f"kv_cache_quant_algo of the config's quantization_config is {name!r}, must be one of "
            f"{', '.join(_ALGORITHMS)}; {_REMEDY}"
        )
    return _ALGORITHMS[name]


# Fields that make layers differ.
_PER_LAYER = ("num_key_value_heads_per_layer", "block_configs", "per_layer_config")
_CROSSING = ("cross_attention_layers", "add_cross_attention")
# Classes that have cross-attention layers even if the config does not list them.
_CROSSING_CLASSES = ("mllama", "mllama_text_model")


@dataclass(frozen=True)
class ConfigReading:
    """The shape of a cache by a config, and the fields that it was read from.

    Attributes
    ----------
    shape : dict
        Fields of KVCacheParams.
    read : dict of str to object
        Values of the fields that were read, by name; the name of an inner field is "object.field".
    defaults : dict of str to object
        Values that the config leaves to the model's class.
    ignored : dict of str to str
        Fields whose names suggest the cache but that do not change it, with the reasons.
    assumed : tuple of str
        Fields that the caller told to ignore.
    mtp_layers : int
        MTP layers of the shape.
    """

    shape: dict[str, Any]
    read: dict[str, Any]
    defaults: dict[str, Any]
    ignored: dict[str, str]
    assumed: tuple[str, ...]
    mtp_layers: int


def _check_decoder(text: Fields) -> None:
    kind = text.get("model_type", "this model")
    if text.get("is_encoder_decoder"):
        raise ValueError(
            f"is_encoder_decoder of the config is true: {kind} caches cross attention, which "
            f"kvcore does not"
        )
    crossing = [name for name in _CROSSING if text.get(name)]
    if crossing:
        raise ValueError(
            f"{crossing[0]} of the config: {kind} caches cross attention, which kvcore does not"
        )
    if kind in _CROSSING_CLASSES and text.get(_CROSSING[0]) is None:
        raise ValueError(
            f"{_CROSSING[0]} is missing from the config, and {kind} has these layers by default: "
            f"it caches cross attention, which kvcore does not; write the list, [] for no layers"
        )
    if text.get("n_recurrent_loops") is not None:
        raise ValueError(
            f"n_recurrent_loops of the config is {text['n_recurrent_loops']}: {kind} runs layers "
            f"several times with new K and V each time, which kvcore does not count"
        )


def _check_uniform(text: Fields) -> None:
    """Refuse models that a cache without groups does not support."""
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
    if uneven:
        raise ValueError(
            f"{uneven[0]} of the config makes the layers of {kind} differ, a page holds K and V of "
            f"one shape"
        )


def _layers(text: Fields) -> int:
    blocks = text.get("layers_block_type")
    if isinstance(blocks, list) and all(text.get(name) is None for name in LAYERS):
        return len(blocks)
    require_agreement(text, LAYERS)
    layers = count(text, LAYERS)
    # Each layer of LongCat attends twice.
    attends_twice = text.get("model_type") == "longcat_flash" and not text.says(LAYERS[0])
    return 2 * layers if attends_twice else layers


# -- heads ---------------------------------------------------------------------------------------
def _most(listed: list[int]) -> int:
    return max(sorted(set(listed), reverse=True), key=listed.count)


def _check_shares(name: str, heads: Sequence[Any], kv_heads: list[int]) -> None:
    """Refuse lists of heads and K/V heads that do not match."""
    if len(heads) != len(kv_heads):
        raise ValueError(
            f"{name} of the config is {heads!r}: it has {len(heads)} entries, must have "
            f"{len(kv_heads)}"
        )
    for layer, (own, shared) in enumerate(zip(heads, kv_heads, strict=True)):
        if type(own) is not int or own < 1 or own % shared != 0:
            raise ValueError(
                f"{name} of the config is {own!r} for layer {layer}, must be a multiple of its "
                f"{shared} K/V heads"
            )


def _kv_heads(text: Fields, heads: int) -> int:
    """Return the K/V heads, by the rule of the model's family."""
    attention = text.part("attn_config")  # MPT, DBRX
    if text.says("multi_query_group_num"):  # ChatGLM
        shares = flag(text, "multi_query_attention", default=True)
        return count(text, ("multi_query_group_num",)) if shares else heads
    if str(text.get("model_type")).lower() in ("falcon", "refinedweb", "refinedwebmodel"):
        grouped = flag(text, "new_decoder_architecture", default="n_head_kv" in text)
        if not grouped:
            text.ignore("new_decoder_architecture is off", *KV_HEADS)
            return 1 if flag(text, "multi_query", default=True) else heads
        text.ignore("new_decoder_architecture is on", "multi_query")
    elif flag(text, "multi_query", default=False):  # GPT-BigCode
        return 1
    if flag(text, "multi_query_attention", default=False):  # OLMo
        return 1
    if attention.get("attn_type") == "multiquery_attention":
        return 1
    require_agreement(text, KV_HEADS)
    inside = optional_count(attention, ("kv_n_heads",))
    found = optional_count(text, KV_HEADS) or inside
    if found is not None and heads % found != 0:
        raise ValueError(
            f"{field(text, KV_HEADS)[0]} of the config is {found}, "
            f"must divide the {heads} of {field(text, HEADS)[0]}"
        )
    return heads if found is None else found


def _heads(text: Fields, layers: int) -> dict[str, Any]:
    """Return the fields of rows that hold K and V of heads."""
    listed = layer_heads(text, layers)
    require_agreement(text, HEADS)
    name, given = field(text, HEADS)
    if isinstance(given, (list, tuple)) and listed is not None:  # OpenELM
        kv_heads, head_dim = _most(listed), count(text, HEAD_DIM)
        _check_shares(name, given, listed)
    else:
        heads = count(text, HEADS)
        head_dim = _head_dim(text, heads)
        kv_heads = _kv_heads(text, heads) if listed is None else _most(listed)
    shape = {"is_mla": False, "n_kv_heads": kv_heads, "head_dim": head_dim}
    if text.get("v_head_dim") not in (None, 0, head_dim):
        shape["v_head_dim"] = count(text, ("v_head_dim",))
    text.ignore("rows hold K and V of heads", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim")
    return shape


def _head_dim(text: Fields, heads: int) -> int:
    explicit, named = optional_count(text, HEAD_DIM), field(text, HEAD_DIM)[0]
    if explicit is not None:
        others = (name for name in HEAD_DIM if name != named and text.holds(name, explicit))
        text.ignore(f"the same as {named}", *others)
        return explicit
    hidden = count(text, HIDDEN)
    if hidden % heads != 0:
        raise ValueError(
            f"{field(text, HIDDEN)[0]} of the config is {hidden}, not a multiple of the {heads} "
            f"of {field(text, HEADS)[0]}; the config needs head_dim"
        )
    return hidden // heads


def _latent(text: Fields, kinds: list[str]) -> dict[str, Any]:
    """Return the fields of rows with a latent, and with an indexer's key if layers have one."""
    width = count(text, ("kv_lora_rank",)) + count(text, ("qk_rope_head_dim",))
    if INDEXED in kinds:
        width += index_width(text)
    text.ignore(
        "a latent row serves all heads",
        *(*HEADS, *KV_HEADS, *HEAD_DIM, "v_head_dim", "qk_nope_head_dim", "qk_head_dim"),
    )
    return {"is_mla": True, "n_kv_heads": 1, "head_dim": width}


def _dtype(text: Fields, whole: Fields) -> str:
    quantized = quantized_dtype(whole, text)
    if quantized is not None:
        return quantized
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


# -- the whole config ----------------------------------------------------------------------------
def read_config(
    config: Config | str | Path,
    dtype: str | None = None,
    *,
    groups: bool = False,
    shards: int = 1,
    mtp: bool = False,
    assume: Mapping[str, str] | None = None,
    refuse: bool = True,
) -> ConfigReading:
    """Read the fields of KVCacheParams that a model decides.

    Parameters
    ----------
    config : mapping, or path of a ``config.json`` or of the directory that holds it
        For a multimodal model, the config of its language model is read.
    dtype : str, optional
        Dtype of the cache. By default, the dtype of K and V in ``quantization_config``, or the
        config's ``dtype`` or ``torch_dtype``.
    groups : bool
        Return the groups of layers, and accept models with states.
    shards : int
        Devices that a replica's states are spread over.
    mtp : bool
        Also count the MTP layers.
    assume : mapping of str to str, optional
        Names of fields and "ignored": the config is read as if it lacked these fields.
    refuse : bool
        Refuse fields that no rule reads and that may change the cache. False is for callers that
        compare the shape with the K and V of the model.

    Returns
    -------
    ConfigReading
        Its shape has dtype, n_kv_heads, head_dim, num_layers, is_mla, and v_head_dim if V has its
        own width. With `groups` it also has groups and shared, if the layers are not all alike.

    Raises
    ------
    ValueError
        A field is missing or out of range; without `groups`, the layers do not all keep K and V of
        one shape; no rule reads a field that may change the cache; `assume` has a field that the
        config does not have; `config` cannot be a file name, or the file is not JSON.
    TypeError
        `config` is neither a mapping nor a path.
    OSError
        The file cannot be read.

    Notes
    -----
    Multi-head latent attention (``kv_lora_rank``) caches one row of ``kv_lora_rank +
    qk_rope_head_dim`` elements per token and layer (DeepSeek-V2, arXiv:2405.04434), and
    ``index_head_dim`` more if layers have an indexer. Without `groups`, every layer keeps every
    token.
    """
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype is a {type(dtype).__name__}, must be a str")
    loaded, assumed = without_assumed(load(config), assume)
    notes = Notes()
    whole = Fields(loaded, notes)
    whole.get("model_type")
    text = language_model(whole)
    if dtype is not None:
        for fields in (text, whole):
            fields.ignore("dtype is given", "quantization_config")
    _check_decoder(text)
    if not groups:
        _check_uniform(text)
    layers, more = _layers(text), mtp_layers(text)
    if mtp and not more:
        raise ValueError(
            f"the config has no number of MTP layers ({', '.join(MTP_FIELDS)}); leave out mtp, or "
            f"add the number"
        )
    more = more if mtp else 0
    kinds = layer_kinds(text, layers, more)
    is_latent = flag(text, "use_mla", default=text.get("kv_lora_rank") is not None)
    shape = _latent(text, kinds) if is_latent else _heads(text, len(kinds))
    shape |= {"dtype": dtype or _dtype(text, whole), "num_layers": len(kinds)}
    if groups:
        named = next((each for each in (field(f, DTYPE)[1] for f in (text, whole)) if each), None)
        shape |= layer_groups(text, shape, kinds, activations=named, shards=shards, mtp=more)
    else:
        check_alike(text, shape, kinds)
    if refuse:
        refuse_unread(loaded, notes, text, mtp=mtp)
    return ConfigReading(shape, notes.read, notes.defaults, notes.ignored, assumed, more)


def with_copied_heads(shape: dict[str, Any], shards: int) -> dict[str, Any]:
    """Return the shape with copies of K/V heads, for more devices than K/V heads.

    Parameters
    ----------
    shape : dict
        The shape of a `ConfigReading`.
    shards : int
        Tensor parallel devices: a divisor or a multiple of the K/V heads of each group.

    Raises
    ------
    ValueError
        `shards` is neither a divisor nor a multiple of the K/V heads.
    """
    if shape["is_mla"]:
        return shape

    def copied(heads: int) -> int:
        if heads % shards != 0 and shards % heads != 0:
            raise ValueError(
                f"n_kv_heads {heads} does not divide over {shards} tensor parallel devices; use a "
                f"degree that is a divisor or a multiple of the heads"
            )
        return max(heads, shards)

    groups = shape.get("groups")
    own = {"n_kv_heads": copied(shape["n_kv_heads"])}
    if groups is None:
        return shape | own
    return (
        shape
        | own
        | {
            "groups": tuple(
                group
                if isinstance(group, State) or group.n_kv_heads is None
                else replace(group, n_kv_heads=copied(group.n_kv_heads))
                for group in groups
            )
        }
    )
