# SPDX-License-Identifier: Apache-2.0
"""The shape of a KV cache out of a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["cache_shape"]

# Newer names first; the second ones are GPT-2's.
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_HIDDEN = ("hidden_size", "n_embd")
_DTYPE = ("dtype", "torch_dtype")


def _load(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, must hold a JSON object")
    return loaded


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _count(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{names[0]} of the config is {value!r}, must be an int of at least 1")
    return value


def cache_shape(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read dtype, n_kv_heads, head_dim, num_layers and is_mla.

    Parameters
    ----------
    config : mapping, or path of a ``config.json`` or of the directory that holds it
        Of a multimodal model the text part is read.

    Raises
    ------
    ValueError
        A field is missing or out of range.
    OSError
        The file cannot be read.

    Notes
    -----
    Multi-head latent attention (``kv_lora_rank``) caches one row of ``kv_lora_rank +
    qk_rope_head_dim`` elements per token and layer (DeepSeek-V2, arXiv:2405.04434).
    """
    whole = _load(config)
    text = whole.get("text_config") or whole
    shape: dict[str, Any] = {
        "num_layers": _count(text, _LAYERS),
        "dtype": _first(text, _DTYPE) or _first(whole, _DTYPE),
    }
    if text.get("kv_lora_rank") is not None:
        width = _count(text, ("kv_lora_rank",)) + _count(text, ("qk_rope_head_dim",))
        return shape | {"n_kv_heads": 1, "head_dim": width, "is_mla": True}
    heads = _count(text, _HEADS)
    kv_heads = text.get("num_key_value_heads")
    head_dim = text.get("head_dim") or _count(text, _HIDDEN) // heads
    return shape | {
        "n_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "is_mla": False,
    }
