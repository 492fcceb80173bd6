# SPDX-License-Identifier: Apache-2.0
"""The shape of a KV cache out of a Hugging Face ``config.json``."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcore.dtypes import itemsize

__all__ = ["cache_shape"]

Config = Mapping[str, Any]
_MOST_BYTES = 1 << 24  # a thousand times what models have

# What the system says of text that cannot be the name of a file.
_NO_NAMES = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)

# One thing under the names that model families give it; the most common one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEAD_DIM = ("head_dim", "kv_channels")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_DTYPE = ("dtype", "torch_dtype")
# Where a multimodal model keeps its language model; the first one may hold another.
_TEXT = ("thinker_config", "text_config", "language_config", "llm_config")

# These cannot be one pool of equal pages of K and V: a recurrent state, or layers that differ.
_STATE = (
    "state_size",  # Mamba
    "ssm_state_size",
    "mamba_d_state",
    "conv_L_cache",
    "lru_width",
    "linear_num_key_heads",
    "linear_attn_config",
    "attention_hidden_size",  # RWKV
)
_PER_LAYER = ("num_key_value_heads_per_layer", "block_configs", "per_layer_config")

# What the transformers library takes where a config is silent: layers, heads, K/V heads, hidden
# size, head_dim. A text_config inside a multimodal one leaves out whatever equals these.
_DEFAULTS: dict[str, tuple[int | None, ...]] = {
    "gemma": (28, 16, 16, 3072, 256),
    "gemma2": (26, 8, 4, 2304, 256),
    "gemma3_text": (26, 8, 4, 2304, 256),
    "gemma3n_text": (35, 8, 2, 2048, 256),
    "glm": (40, 32, 2, 4096, 128),
    "glm4": (40, 32, 2, 4096, 128),
    "gpt_oss": (36, 64, 8, 2880, 64),
    "llama": (32, 32, None, 4096, None),
    "llama4_text": (48, 40, 8, 5120, 128),
    "mistral": (32, 32, 8, 4096, None),
    "mixtral": (32, 32, 8, 4096, None),
    "mllama_text_model": (40, 32, 8, 4096, None),
    "phi3": (32, 32, None, 3072, None),
    "qwen2": (32, 32, 32, 4096, None),
    "qwen2_5_vl_text": (80, 64, 8, 8192, None),
    "qwen2_vl_text": (80, 64, 8, 8192, None),
    "qwen3": (32, 32, 32, 4096, 128),
    "qwen3_vl_text": (32, 32, 32, 4096, 128),
}
_DEFAULT_FIELDS = (_LAYERS[0], _HEADS[0], _KV_HEADS[0], _HIDDEN[0], _HEAD_DIM[0])


def _load(config: Config | str | Path) -> Config:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        raise TypeError(
            f"config is a {type(config).__name__}, must be a mapping or a path; "
            f"of a transformers config pass config.to_dict()"
        )
    path = Path(config)
    try:
        if path.is_dir():
            path = path / "config.json"
        loaded = json.loads(_text(path))
    except OSError as error:
        if error.errno not in _NO_NAMES:
            raise
        raise ValueError(
            f"config is no path, {error.strerror}: {str(config)[:50]!r}...; pass a mapping, or the "
            f"path of a config.json"
        ) from None
    except RecursionError as error:
        raise ValueError(f"{path}: no config: its JSON is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: holds a {type(loaded).__name__}, must hold a JSON object")
    return loaded


def _text(path: Path) -> str:
    """Read a file, which may be a pipe or a device, within bounds."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes")
    return data.decode("utf-8")


def _field(config: Config, names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the name that the config uses, and its value, None where it uses none."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    return name, config.get(name)


def _optional_count(config: Config, names: tuple[str, ...]) -> int | None:
    name, value = _field(config, names)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} of the config is {value!r}, must be an int of at least 1")
    return value


def _count(config: Config, names: tuple[str, ...]) -> int:
    value = _optional_count(config, names)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(
            f"the config lacks {names[0]}{also}; it may be that of another kind of model: "
            f"give KVCacheParams the numbers"
        )
    return value


def _flag(config: Config, name: str, *, default: bool) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} of the config is {value!r}, must be true or false")
    return default if value is None else value


def _part(config: Config, name: str) -> Config:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} of the config is {value!r}, must be an object")
    return value


def _language_model(whole: Config) -> Config:
    """Return the part that generates text, with what it leaves out filled in."""
    text, is_nested = whole, False
    for name in _TEXT:
        if _part(text, name):
            text, is_nested = _part(text, name), True
    model_type = text.get("model_type")
    known = _DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    if known is None:
        return text
    silent = dict(zip(_DEFAULT_FIELDS, known, strict=True))
    if not is_nested:
        silent = {_HEAD_DIM[0]: silent[_HEAD_DIM[0]]}
    return silent | {name: value for name, value in text.items() if value is not None}


def _check_uniform(text: Config) -> None:
    kind = text.get("model_type", "this model")
    if text.get("is_encoder_decoder"):
        raise ValueError(
            f"is_encoder_decoder of the config is true: {kind} caches cross attention too, "
            f"which kvcore does not"
        )
    types = text.get("layer_types") or []
    if not isinstance(types, list):
        raise ValueError(f"layer_types of the config is {types!r}, must be a list")
    state = [name for name in types if not str(name).endswith("attention")]
    state += [name for name in types if name == "linear_attention"]
    state += [name for name in _STATE if text.get(name) is not None and not types]
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
            f"{uneven[0]} of the config makes the layers of {kind} differ, "
            f"a page holds K and V of one shape"
        )


def _layers(text: Config) -> int:
    layers = _count(text, _LAYERS)
    # Each of LongCat's num_layers attends twice.
    attends_twice = text.get("model_type") == "longcat_flash" and _LAYERS[0] not in text
    return 2 * layers if attends_twice else layers


def _kv_heads(text: Config, heads: int) -> int:
    """Return the K/V heads, by the rule of the model's family."""
    attention = _part(text, "attn_config")  # MPT, DBRX
    if "multi_query_group_num" in text:  # ChatGLM
        shares = _flag(text, "multi_query_attention", default=True)
        return _count(text, ("multi_query_group_num",)) if shares else heads
    if str(text.get("model_type")).lower() in ("falcon", "refinedweb", "refinedwebmodel"):
        grouped = _flag(text, "new_decoder_architecture", default="n_head_kv" in text)
        if not grouped:
            return 1 if _flag(text, "multi_query", default=True) else heads
    elif _flag(text, "multi_query", default=False):  # GPT-BigCode
        return 1
    if attention.get("attn_type") == "multiquery_attention":
        return 1
    found = _optional_count(text, _KV_HEADS) or _optional_count(attention, ("kv_n_heads",))
    if found is not None and heads % found != 0:
        raise ValueError(
            f"{_field(text, _KV_HEADS)[0]} of the config is {found}, "
            f"must divide the {heads} of {_field(text, _HEADS)[0]}"
        )
    return heads if found is None else found


def _head_dim(text: Config, heads: int) -> int:
    explicit = _optional_count(text, _HEAD_DIM)
    if explicit is not None:
        return explicit
    hidden = _count(text, _HIDDEN)
    if hidden % heads != 0:
        raise ValueError(
            f"{_field(text, _HIDDEN)[0]} of the config is {hidden}, no multiple of the {heads} "
            f"of {_field(text, _HEADS)[0]}; such a config needs head_dim"
        )
    return hidden // heads


def _heads(text: Config) -> dict[str, Any]:
    heads = _count(text, _HEADS)
    head_dim = _head_dim(text, heads)
    shape = {"is_mla": False, "n_kv_heads": _kv_heads(text, heads), "head_dim": head_dim}
    if text.get("v_head_dim") not in (None, 0, head_dim):
        shape["v_head_dim"] = _count(text, ("v_head_dim",))
    return shape


def _dtype(text: Config, whole: Config) -> str:
    name, value = _field(text, _DTYPE)
    if value is None:
        name, value = _field(whole, _DTYPE)
    if value is None:
        raise ValueError("the config names no dtype; pass dtype= of the cache")
    try:
        found = str(value).removeprefix("torch.")
        itemsize(found)
    except ValueError as error:
        raise ValueError(f"{name} of the config: {error}; or pass dtype= of the cache") from error
    return found


def cache_shape(config: Config | str | Path, dtype: str | None = None) -> dict[str, Any]:
    """Read the fields of KVCacheParams that a model decides.

    Parameters
    ----------
    config : mapping, or path of a ``config.json`` or of the directory that holds it
        Of a multimodal model the language model is read.
    dtype : str, optional
        In place of the config's ``dtype`` or ``torch_dtype``.

    Returns
    -------
    dict
        dtype, n_kv_heads, head_dim, num_layers, is_mla, and v_head_dim where V has its own width.

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
    qk_rope_head_dim`` elements per token and layer (DeepSeek-V2, arXiv:2405.04434). Sliding windows
    are not subtracted: every layer keeps every token.
    """
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype is a {type(dtype).__name__}, must be a str")
    whole = _load(config)
    text = _language_model(whole)
    _check_uniform(text)
    shape: dict[str, Any] = {"num_layers": _layers(text)}
    if text.get("kv_lora_rank") is not None:
        width = _count(text, ("kv_lora_rank",)) + _count(text, ("qk_rope_head_dim",))
        shape |= {"is_mla": True, "n_kv_heads": 1, "head_dim": width}
    else:
        shape |= _heads(text)
    return shape | {"dtype": _dtype(text, whole) if dtype is None else dtype}
