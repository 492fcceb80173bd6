# SPDX-License-Identifier: Apache-2.0
"""List the KV-cache shapes of some public models."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvcore import KVCacheParams
from kvcore.layers.hf.config import ConfigReading, read_config
from kvcore.layers.hf.fields import load

Read = TypeVar("Read")

_ROPE = 64  # elements of a latent row with positions


@dataclass(frozen=True)
class ModelShape:
    """Describe the shape of a model's KV cache, from its published ``config.json``.

    Attributes
    ----------
    layers, kv_heads, head_dim : int
        Layers, K/V heads per layer, elements per head.
    dtype : str
        Dtype of the published weights.
    is_mla : bool
        Multi-head latent attention: one latent row in place of K and V; `head_dim` is its width.
    mixed : mapping
        Config fields for layers with windows, chunks or states, and for their sizes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_mla: bool = False
    mixed: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """Return the fields of a ``config.json``."""
        row: dict[str, Any] = {"head_dim": self.head_dim}
        if self.is_mla:
            row = {"kv_lora_rank": self.head_dim - _ROPE, "qk_rope_head_dim": _ROPE}
        heads = {"num_attention_heads": self.kv_heads, "num_key_value_heads": self.kv_heads}
        return {
            "num_hidden_layers": self.layers,
            "dtype": self.dtype,
            **heads,
            **row,
            **self.mixed,
        }

    def params(
        self, page_size: int, dtype: str | None = None, *, groups: bool | None = None
    ) -> KVCacheParams:
        """Build the cache parameters for one device and pages of `page_size` tokens."""
        return KVCacheParams.from_hf_config(
            self.config(), dtype, groups=groups, page_size=page_size
        )


def _windows(model_type: str, window: int, **rest: Any) -> dict[str, Any]:
    return {"model_type": model_type, "sliding_window": window, **rest}


def _jamba(hidden_size: int) -> dict[str, Any]:
    return {
        "model_type": "jamba",
        "hidden_size": hidden_size,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


def _nemotron(pattern: str, mamba_heads: int, mamba_head_dim: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": mamba_head_dim,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    }


def _gated_delta(model_type: str, value_heads: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "full_attention_interval": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_conv_kernel_dim": 4,
    }


_LLAMA_4 = {"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layer_interval": 4}
_GRANITE_4_SMALL = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
_KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}

PRESETS = {
    "llama-2-7b": ModelShape(32, 32, 128, dtype="float16"),
    "llama-3.1-8b": ModelShape(32, 8, 128),
    "llama-3.1-70b": ModelShape(80, 8, 128),
    "llama-3.1-405b": ModelShape(126, 8, 128),
    "llama-3.2-1b": ModelShape(16, 8, 64),
    "llama-3.2-3b": ModelShape(28, 8, 128),
    "llama-4-scout": ModelShape(48, 8, 128, mixed=_LLAMA_4),
    "llama-4-maverick": ModelShape(48, 8, 128, mixed=_LLAMA_4),
    "mistral-7b": ModelShape(32, 8, 128),
    "mistral-7b-v0.1": ModelShape(32, 8, 128, mixed=_windows("mistral", 4096)),
    "mistral-small-24b": ModelShape(40, 8, 128),
    "mixtral-8x7b": ModelShape(32, 8, 128),
    "qwen2.5-7b": ModelShape(28, 4, 128),
    "qwen2.5-32b": ModelShape(64, 8, 128),
    "qwen2.5-72b": ModelShape(80, 8, 128),
    "qwen3-8b": ModelShape(36, 8, 128),
    "qwen3-32b": ModelShape(64, 8, 128),
    "qwen3-235b-a22b": ModelShape(94, 4, 128),
    "qwen3-next-80b-a3b": ModelShape(48, 2, 256, mixed=_gated_delta("qwen3_next", 32)),
    "qwen3.5-27b": ModelShape(64, 4, 256, mixed=_gated_delta("qwen3_5_text", 48)),
    "gemma-2-9b": ModelShape(42, 8, 256, mixed=_windows("gemma2", 4096)),
    "gemma-2-27b": ModelShape(46, 16, 128, mixed=_windows("gemma2", 4096)),
    "gemma-3-1b": ModelShape(26, 1, 256, mixed=_windows("gemma3_text", 512)),
    "gemma-3-4b": ModelShape(34, 4, 256, mixed=_windows("gemma3_text", 1024)),
    "gemma-3-12b": ModelShape(48, 8, 256, mixed=_windows("gemma3_text", 1024)),
    "gemma-3-27b": ModelShape(62, 16, 128, mixed=_windows("gemma3_text", 1024)),
    "gemma-3n-e2b": ModelShape(
        30, 2, 256, mixed=_windows("gemma3n_text", 512, num_kv_shared_layers=10)
    ),
    "gemma-3n-e4b": ModelShape(
        35, 2, 256, mixed=_windows("gemma3n_text", 512, num_kv_shared_layers=15)
    ),
    "phi-4": ModelShape(40, 10, 128),
    "phi-3-mini-4k": ModelShape(32, 32, 96, mixed=_windows("phi3", 2047)),
    "gpt-oss-20b": ModelShape(24, 8, 64, mixed=_windows("gpt_oss", 128)),
    "gpt-oss-120b": ModelShape(36, 8, 64, mixed=_windows("gpt_oss", 128)),
    "command-a": ModelShape(64, 8, 128, mixed=_windows("cohere2", 4096)),
    "jamba-1.5-mini": ModelShape(32, 8, 128, mixed=_jamba(4096)),
    "jamba-1.5-large": ModelShape(72, 8, 128, mixed=_jamba(8192)),
    "nemotron-h-8b": ModelShape(
        52,
        8,
        128,
        mixed=_nemotron("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 128, 64),
    ),
    "nemotron-3-nano-30b-a3b": ModelShape(
        52,
        2,
        128,
        mixed=_nemotron("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 64, 64),
    ),
    "granite-4.0-h-small": ModelShape(40, 8, 128, mixed=_GRANITE_4_SMALL),
    "deepseek-v2-lite": ModelShape(27, 1, 576, is_mla=True),
    "deepseek-v3": ModelShape(61, 1, 576, is_mla=True),
    "deepseek-r1": ModelShape(61, 1, 576, is_mla=True),
    "kimi-k2": ModelShape(61, 1, 576, is_mla=True),
    "kimi-linear-48b-a3b": ModelShape(27, 1, 576, is_mla=True, mixed=_KIMI_LINEAR),
}


@dataclass(frozen=True)
class Model:
    """Hold the config of a model, so that the file is read only once.

    Attributes
    ----------
    config : mapping
        The fields of its ``config.json``.
    path : Path, optional
        Path of this file; None for presets.
    """

    config: Mapping[str, Any]
    path: Path | None = None

    def params(
        self, page_size: int, dtype: str | None = None, *, groups: bool | None = None, **rest: Any
    ) -> KVCacheParams:
        """Build the cache parameters; ValueError with the path if the config describes no cache."""
        return self._checked(
            KVCacheParams.from_hf_config,
            self.config,
            dtype,
            groups=groups,
            page_size=page_size,
            **rest,
        )

    def read(self, dtype: str | None, *, shards: int = 1, **rest: Any) -> ConfigReading:
        """Read the shape for `shards` devices; ValueError with the path, as in `params`."""
        return self._checked(read_config, self.config, dtype, shards=shards, **rest)

    def _checked(self, read: Callable[..., Read], *arguments: Any, **options: Any) -> Read:
        try:
            return read(*arguments, **options)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(_named(self.path, error)) from error


def find_model(model: str) -> Model:
    """Find a preset or a Hugging Face ``config.json``.

    Parameters
    ----------
    model : str
        A name of `PRESETS` (any case), or the path of a config file or its folder.

    Raises
    ------
    ValueError
        `model` is neither a preset nor a path, or the file contains no config.
    """
    preset = PRESETS.get(re.sub(r"[\s_]", "-", model.lower()))
    if preset is not None:
        return Model(preset.config())
    path = Path(model)
    if _is(path.is_dir):
        path = path / "config.json"
    if not _is(path.exists):
        raise ValueError(
            f"expected the path of a config.json or one of {', '.join(PRESETS)}, got {model!r}"
        )
    try:
        return Model(load(path), path)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(_named(path, error)) from error


def model_params(model: str, page_size: int, dtype: str | None = None) -> KVCacheParams:
    """Find the cache parameters of a model for one device.

    Parameters
    ----------
    model : str
        As for `find_model`.
    page_size : int
        Tokens per page.
    dtype : str, optional
        Dtype of the cache, in place of the model's dtype.

    Raises
    ------
    ValueError
        The model does not exist, or kvcore does not support the model of the file.
    """
    return find_model(model).params(page_size, dtype)


def _named(path: Path | None, error: Exception) -> str:
    text = str(error)
    return text if path is None or str(path) in text else f"{path}: {text}"


def _is(asked: Callable[[], bool]) -> bool:
    """Return the result of a path test; false if the system refuses the path as too long."""
    try:
        return asked()
    except OSError:
        return False
