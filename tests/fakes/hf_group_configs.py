# SPDX-License-Identifier: Apache-2.0
"""Fields of published configs of models in which some layers do not keep all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_configs import CONFIGS
from kvcore import KVCacheParams

LLAMA = CONFIGS["llama-3.1-70b"]
# Only the published fields that determine the cache.
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GPT_OSS = {**CONFIGS["gpt-oss-20b"], "sliding_window": 128, "dtype": "bfloat16"}
MISTRAL = {**CONFIGS["mistral-nemo"], "sliding_window": 4096}
LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        **CONFIGS["llama-4-scout"]["text_config"],
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
    },
}
GEMMA_3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
    "dtype": "bfloat16",
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
QWEN_3_NEXT = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "dtype": "bfloat16",
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "head_dim": 128,
    "hidden_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 44,
    "num_key_value_heads": 2,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "torch_dtype": "bfloat16",
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_key_value_heads": 8,
    "swa_v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
RECURRENT_GEMMA = {
    "model_type": "recurrent_gemma",
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "head_dim": 256,
    "hidden_size": 2560,
    "lru_width": 2560,
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "torch_dtype": "bfloat16",
}


def read(config: Mapping[str, Any], **rest: Any) -> KVCacheParams:
    return KVCacheParams.from_hf_config(config, groups=True, page_size=16, **rest)


def every(layers: int, n: int) -> tuple[list[int], list[int]]:
    """Return every n-th layer, and the other layers."""
    full = [i for i in range(layers) if (i + 1) % n == 0]
    return full, [i for i in range(layers) if (i + 1) % n != 0]
