# SPDX-License-Identifier: Apache-2.0
"""The fields of a Hugging Face ``config.json``, under the names that model families give them."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "DEFAULT_WINDOWS",
    "DTYPE",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "KV_HEADS",
    "LAYERS",
    "Config",
    "count",
    "field",
    "flag",
    "language_model",
    "load",
    "optional_count",
    "part",
]

Config = Mapping[str, Any]
_MOST_BYTES = 1 << 24  # a thousand times what models have

# What the system says of text that cannot be the name of a file.
_NO_NAMES = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP)

# One thing under the names that model families give it; the most common one first.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
DTYPE = ("dtype", "torch_dtype")
# Where a multimodal model keeps its language model; the first one may hold another.
_TEXT = ("thinker_config", "text_config", "language_config", "llm_config")

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
_DEFAULT_FIELDS = (LAYERS[0], HEADS[0], KV_HEADS[0], HIDDEN[0], HEAD_DIM[0])
#: The same of windows; null means none there.
DEFAULT_WINDOWS = {
    "gemma2": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
    "gemma3n_text": {"sliding_window": 512, "num_kv_shared_layers": 15},
    "gpt_oss": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 8192},
    "mistral": {"sliding_window": 4096},
}


def load(config: Config | str | Path) -> Config:
    """Return the config as a mapping, read from its file where it is a path."""
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


def field(config: Config, names: tuple[str, ...]) -> tuple[str, Any]:
    """Return the name that the config uses, and its value, None where it uses none."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    return name, config.get(name)


def optional_count(config: Config, names: tuple[str, ...]) -> int | None:
    """Return a count of the config, None where it has none; ValueError for what is no count."""
    name, value = field(config, names)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} of the config is {value!r}, must be an int of at least 1")
    return value


def count(config: Config, names: tuple[str, ...]) -> int:
    """Return a count of the config; ValueError where it is missing or none."""
    value = optional_count(config, names)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(
            f"the config lacks {names[0]}{also}; it may be that of another kind of model: "
            f"give KVCacheParams the numbers"
        )
    return value


def flag(config: Config, name: str, *, default: bool) -> bool:
    """Return a flag of the config; ValueError for what is no bool."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} of the config is {value!r}, must be true or false")
    return default if value is None else value


def part(config: Config, name: str) -> Config:
    """Return an object inside the config, empty where it has none; ValueError for what is none."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} of the config is {value!r}, must be an object")
    return value


def language_model(whole: Config) -> Config:
    """Return the part that generates text, with what it leaves out filled in."""
    text, is_nested = whole, False
    for name in _TEXT:
        if part(text, name):
            text, is_nested = part(text, name), True
    model_type = text.get("model_type")
    known = _DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    if known is None:
        return text
    silent = dict(zip(_DEFAULT_FIELDS, known, strict=True))
    if not is_nested:
        silent = {"head_dim": silent["head_dim"]}
    else:
        windows = DEFAULT_WINDOWS.get(str(model_type), {})
        silent |= {name: value for name, value in windows.items() if name not in text}
    return silent | {name: value for name, value in text.items() if value is not None}
