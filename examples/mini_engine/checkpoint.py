# SPDX-License-Identifier: Apache-2.0
"""Reads a model's folder as Hugging Face writes it: config.json and safetensors."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
#: The values that this model supports; the first value is the default of a config without the key.
_SERVED: dict[str, list[Any]] = {
    "architectures": [["LlamaForCausalLM"]],
    "hidden_act": ["silu"],
    "attention_bias": [False],
    "mlp_bias": [False],
    "rope_type": ["default", "llama3"],
    "partial_rotary_factor": [1.0],
    "quantization_config": [None],
}


@dataclass(frozen=True)
class Config:
    """The values of config.json that a LlamaForCausalLM needs."""

    layers: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    epsilon: float
    rope: dict[str, Any]
    eos: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read config.json; raise ValueError for values that this model does not support."""
        given = json.loads((folder / "config.json").read_text())
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        rope = {"rope_type": rope.get("type", "default"), **rope}  # older files have "type"
        rope.setdefault("rope_theta", given.get("rope_theta", 10_000.0))
        for name, values in _SERVED.items():
            found = rope.get(name, given.get(name, values[0]))
            if found not in values:
                raise ValueError(f"{folder}: {name} is {found!r}, must be one of {values}")
        generation = folder / "generation_config.json"
        ends = json.loads(generation.read_text()) if generation.exists() else given
        eos = ends.get("eos_token_id")
        return cls(
            layers=given["num_hidden_layers"],
            hidden=given["hidden_size"],
            ffn=given["intermediate_size"],
            q_heads=given["num_attention_heads"],
            kv_heads=given.get("num_key_value_heads") or given["num_attention_heads"],
            head_dim=given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
            vocabulary=given["vocab_size"],
            max_positions=given["max_position_embeddings"],
            epsilon=given["rms_norm_eps"],
            rope=rope,
            eos=frozenset(() if eos is None else np.atleast_1d(eos).tolist()),
        )

    def frequencies(self) -> NDArray[np.float32]:
        """Return the angle per position of each pair of a head, float32 [head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = (np.float32(self.rope["rope_theta"]) ** -exponents).astype(np.float32)
        if self.rope["rope_type"] == "default":
            return plain
        # Llama 3.1: slow pairs turn `factor` times slower, with a ramp between slow and fast pairs.
        low, high = self.rope["low_freq_factor"], self.rope["high_freq_factor"]
        turns = self.rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        mixed: NDArray[np.floating] = plain * (kept + (1 - kept) / self.rope["factor"])
        return mixed.astype(np.float32)


def read_tensors(folder: Path) -> dict[str, NDArray[Any]]:
    """Map the tensors of a folder into memory; data is read at its first use."""
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, NDArray[Any]] = {}
    for name in sorted(names):
        data = np.memmap(folder / name, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        for key, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if key != "__metadata__" and entry["dtype"] in _DTYPES:
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                part = data[begin:end].view(_DTYPES[entry["dtype"]])
                tensors[key] = part.reshape(entry["shape"])
    return tensors
