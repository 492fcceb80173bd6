# SPDX-License-Identifier: Apache-2.0
"""Know the KV-cache shape of some public models."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcore import KVCacheParams


@dataclass(frozen=True)
class ModelShape:
    """Give what a model's KV cache depends on, as its published ``config.json`` says.

    Attributes
    ----------
    layers, kv_heads, head_dim : int
        Layers, K/V heads per layer, elements per head.
    dtype : str
        The type the weights are published in.
    is_mla : bool
        Multi-head latent attention: one latent row in place of K and V; `head_dim` is its width.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_mla: bool = False

    def params(self, page_size: int, dtype: str | None = None) -> KVCacheParams:
        """Build the cache parameters for one device and pages of `page_size` tokens."""
        return KVCacheParams(
            dtype=self.dtype if dtype is None else dtype,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=self.layers,
            page_size=page_size,
            is_mla=self.is_mla,
        )


PRESETS = {
    "llama-2-7b": ModelShape(32, 32, 128, dtype="float16"),
    "llama-3.1-8b": ModelShape(32, 8, 128),
    "llama-3.1-70b": ModelShape(80, 8, 128),
    "llama-3.1-405b": ModelShape(126, 8, 128),
    "llama-3.2-1b": ModelShape(16, 8, 64),
    "llama-3.2-3b": ModelShape(28, 8, 128),
    "llama-4-scout": ModelShape(48, 8, 128),
    "mistral-7b": ModelShape(32, 8, 128),
    "mistral-small-24b": ModelShape(40, 8, 128),
    "mixtral-8x7b": ModelShape(32, 8, 128),
    "qwen2.5-7b": ModelShape(28, 4, 128),
    "qwen2.5-32b": ModelShape(64, 8, 128),
    "qwen2.5-72b": ModelShape(80, 8, 128),
    "qwen3-8b": ModelShape(36, 8, 128),
    "qwen3-32b": ModelShape(64, 8, 128),
    "qwen3-235b-a22b": ModelShape(94, 4, 128),
    "gemma-2-9b": ModelShape(42, 8, 256),
    "gemma-3-27b": ModelShape(62, 16, 128),
    "phi-4": ModelShape(40, 10, 128),
    "gpt-oss-20b": ModelShape(24, 8, 64),
    "gpt-oss-120b": ModelShape(36, 8, 64),
    "deepseek-v2-lite": ModelShape(27, 1, 576, is_mla=True),
    "deepseek-v3": ModelShape(61, 1, 576, is_mla=True),
    "deepseek-r1": ModelShape(61, 1, 576, is_mla=True),
    "kimi-k2": ModelShape(61, 1, 576, is_mla=True),
}


def model_params(model: str, page_size: int, dtype: str | None = None) -> KVCacheParams:
    """Find the cache parameters of a preset or a Hugging Face ``config.json``.

    Parameters
    ----------
    model : str
        A name of `PRESETS`, in any case, or the path of a config file or of its folder.
    page_size : int
        Tokens per page.
    dtype : str, optional
        Of the cache, in place of the model's.

    Returns
    -------
    KVCacheParams
        For one device.

    Raises
    ------
    ValueError
        If it is neither, or the file does not describe a supported model.
    """
    preset = PRESETS.get(re.sub(r"[\s_]", "-", model.lower()))
    if preset is not None:
        return preset.params(page_size, dtype)
    path = Path(model)
    if _is(path.is_dir):
        path = path / "config.json"
    if not _is(path.exists):
        raise ValueError(
            f"expected the path of a config.json or one of {', '.join(PRESETS)}, got {model!r}"
        )
    try:
        return KVCacheParams.from_hf_config(path, dtype, page_size=page_size)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from error


def _is(asked: Callable[[], bool]) -> bool:
    """Ask about a path, which may be longer than any."""
    try:
        return asked()
    except OSError:
        return False
