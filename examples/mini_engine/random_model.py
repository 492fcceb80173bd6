# SPDX-License-Identifier: Apache-2.0
"""A tiny model to try the engine without a downloaded model."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def write_random_model(folder: Path, *, seed: int = 0) -> Path:
    """Write an untrained Llama whose tokens are the 256 bytes, in the format of Hugging Face."""
    hidden, kv_width, ffn = 128, 2 * 32, 320
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (256, hidden),
        "model.norm": (hidden,),
        "lm_head": (256, hidden),
    }
    for n in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    _write(folder / "model.safetensors", shapes, np.random.default_rng(seed))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder


def _write(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Write norms of ones and matrices of random numbers as safetensors."""
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else 0.2 * rng.standard_normal(shape)
        begin = len(data)
        data += values.astype(np.float32).tobytes()
        place = [begin, len(data)]
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": place}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
