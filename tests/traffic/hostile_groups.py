# SPDX-License-Identifier: Apache-2.0
"""Calls with groups of layers, configs of models with groups, and the arguments of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvcore
from hostile_inputs import config, params
from kvcore import groups
from kvcore.sizing import max_supported_sequence_length, pages_per_sequence

Scene = tuple[Callable[..., object], dict[str, Any]]

ROWS = {"n_kv_heads": 1, "head_dim": 4, "v_head_dim": 4}
FULL, WINDOW = groups.FullAttention([0]), groups.SlidingWindow([1], 4)
STATE = groups.State([0], {"ssm": ((2, 3), "float32")})
MAMBA = {
    "model_type": "jamba",
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 2,
    "mamba_d_conv": 2,
    "mamba_expand": 2,
}
MAMBA_2 = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*",
    "mamba_num_heads": 2,
    "mamba_head_dim": 4,
    "n_groups": 1,
    "ssm_state_size": 2,
    "conv_kernel": 2,
    "mamba_ssm_cache_dtype": "float32",
}
DELTA = {
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 2,
}
KIMI = {
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [1],
        "head_dim": 2,
        "num_heads": 2,
        "short_conv_kernel_size": 2,
    },
}


def mixed() -> kvcore.KVCacheParams:
    return params(groups=[FULL, WINDOW, STATE])


def of_config(**fields: Any) -> Callable[[], Scene]:
    def read(**given: Any) -> kvcore.KVCacheParams:
        return kvcore.KVCacheParams.from_hf_config(given, groups=True)

    return lambda: (read, config() | fields)


GROUP_SCENES: dict[str, Callable[[], Scene]] = {
    "FullAttention": lambda: (groups.FullAttention, {"layers": [0, 1], **ROWS}),
    "SlidingWindow": lambda: (groups.SlidingWindow, {"layers": [0, 1], "window": 4, **ROWS}),
    "ChunkedLocal": lambda: (groups.ChunkedLocal, {"layers": [0, 1], "chunk": 4, **ROWS}),
    "State": lambda: (
        groups.State,
        {"layers": [0], "arrays": {"ssm": ((2, 3), "float32")}, "interval": 16},
    ),
    "a shape": lambda: (
        lambda shape, dtype: groups.State([0], {"ssm": (shape, dtype)}),
        {"shape": (2, 3), "dtype": "float32"},
    ),
    "longest_hit": lambda: (WINDOW.longest_hit, {"present": "110", "page_size": 2}),
    "longest_hit of a state": lambda: (STATE.longest_hit, {"present": [True], "page_size": 2}),
    "skipped_tokens": lambda: (WINDOW.skipped_tokens, {"n": 4}),
    "max_pages": lambda: (
        WINDOW.max_pages,
        {"tokens": 8, "page_size": 2, "max_chunk_tokens": 4},
    ),
    "max_pages of chunks": lambda: (
        groups.ChunkedLocal([0], 4).max_pages,
        {"tokens": 8, "page_size": 2, "max_chunk_tokens": 4},
    ),
    "bundles": lambda: (groups.bundles, {"params": mixed()}),
    "params with groups": lambda: (
        params,
        {"groups": [FULL], "shared": {1: 0}},
    ),
    "sizing of sequences": lambda: (
        pages_per_sequence,
        {"params": mixed(), "max_seq_len": 8, "max_chunk_tokens": 4},
    ),
    "sizing of groups": lambda: (
        max_supported_sequence_length,
        {"params": mixed(), "memory": 10_000, "max_chunk_tokens": 4},
    ),
    "from_hf_config with groups": lambda: (
        kvcore.KVCacheParams.from_hf_config,
        {"config": config() | MAMBA, "groups": True, "n_devices": 1, "data_parallel_degree": 1},
    ),
    "a config of windows": of_config(
        model_type="gemma3n_text",
        sliding_window=4,
        sliding_window_pattern=2,
        use_sliding_window=True,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        swa_num_key_value_heads=2,
        global_head_dim=8,
        num_global_key_value_heads=1,
    ),
    "a config of chunks": of_config(
        model_type="llama4_text", attention_chunk_size=4, no_rope_layers=[1, 0]
    ),
    "a config of intervals": of_config(
        model_type="llama4_text", attention_chunk_size=4, no_rope_layer_interval=2
    ),
    "a config of kinds": of_config(
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
        per_layer_config={"1": {"head_dim": 8}},
        kv_source_layers=[0, 1],
        is_encoder_decoder=False,
        cross_attention_layers=None,
    ),
    "a config of two patterns": of_config(
        model_type="mimo_v2", hybrid_layer_pattern=[0, 1], sliding_window_size=4
    ),
    "a config of Qwen": of_config(
        model_type="qwen3", use_sliding_window=True, max_window_layers=1, sliding_window=4
    ),
    "a config of Mamba": of_config(**MAMBA),
    "a config of Mamba 2": of_config(**MAMBA_2),
    "a config of delta rules": of_config(**DELTA),
    "a config of Kimi": of_config(**KIMI),
    "a config of convolutions": of_config(model_type="lfm2", full_attn_idxs=[1], conv_L_cache=3),
}
