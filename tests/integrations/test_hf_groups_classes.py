# SPDX-License-Identifier: Apache-2.0
"""Groups of every decoder of the transformers library against the library's own caches."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from transformers.cache_utils import (  # noqa: E402
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from hf_decoders import decoders  # noqa: E402
from kvcore import KVCacheParams  # noqa: E402
from kvcore.groups import ChunkedLocal, FullAttention  # noqa: E402
from kvcore.integrations.transformers.names import CACHE  # noqa: E402
from kvcore.layers.packing import row_widths  # noqa: E402

torch.set_num_threads(1)

#: The reason for a refusal, for models that can be cached flat and models that cannot be cached.
REASONS = (
    "cross attention",
    "keep states or nothing",
    "kvcore has no rule for the arrays of the states",
    "no group describes other layers",
    "makes latent rows differ",
    "must agree within 5 %",
    "which no row holds",
)
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "per_layer_config")


def read(fields: dict[str, Any]) -> KVCacheParams:
    return KVCacheParams.from_hf_config(fields, "bfloat16", groups=True, page_size=16)


def kept(group: Any) -> int | None:
    if isinstance(group, FullAttention):
        return None
    kept_tokens: int = group.chunk if isinstance(group, ChunkedLocal) else group.window
    return kept_tokens


def layers_of(params: KVCacheParams) -> dict[int, tuple[bool, int | None, bool]]:
    """Return for each layer: true if it keeps K and V, its window or chunk, true for a state."""
    windows = {i: kept(group) for group in params.attention_groups for i in group.layers}
    states = {i for group in params.state_groups for i in group.layers}
    return {
        i: (i in windows, windows.get(i), i in states)
        for i in range(params.num_layers)
        if i in windows or i in states
    }


def layers_of_cache(config: Any) -> dict[int, tuple[bool, int | None, bool]]:
    found = {}
    for i, layer in enumerate(DynamicCache(config=config).layers):
        attends, state = isinstance(layer, DynamicLayer), hasattr(layer, "conv_states")
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if attends or state:
            found[i] = (attends, window, state)
    return found


def test_layers_keep_what_the_caches_of_the_library_do() -> None:
    wrong, kinds, mixed = {}, set(), 0
    for name, config in decoders().items():
        try:
            made = read(config.to_dict())
        except ValueError as error:
            if not any(reason in str(error) for reason in REASONS):
                with pytest.raises(ValueError):  # noqa: PT011 - not one layer's shape can be read
                    KVCacheParams.from_hf_config(config.to_dict(), "bfloat16")
            continue
        mixed += made.groups is not None
        kinds |= {type(group).__name__ for group in made.groups or ()}
        if layers_of(made) != layers_of_cache(config):
            wrong[name] = (layers_of(made), layers_of_cache(config))
    assert wrong == {}
    assert kinds == {"ChunkedLocal", "FullAttention", "SlidingWindow", "State"}
    assert len(decoders()) > 150
    assert mixed > 40


def loses(made: dict[int, Any], cached: dict[int, Any]) -> list[int]:
    """Return the layers that keep less than a cache does."""
    nothing = (False, None, False)
    return [
        layer
        for layer, (attends, window, state) in cached.items()
        if made.get(layer, nothing)[0] < attends
        or made.get(layer, nothing)[1] not in (None, window)
        or made.get(layer, nothing)[2] < state
    ]


def test_configs_without_kinds_of_layers_lose_no_token() -> None:
    """Files published before layer_types: a layer of unknown kind keeps all tokens."""
    lost, alike = {}, 0
    for name, config in decoders().items():
        fields = {k: v for k, v in config.to_dict().items() if k not in KINDS_OF_LAYERS}
        try:
            made = layers_of(read(fields))
        except ValueError:
            continue
        alike += made == layers_of_cache(config)
        if loses(made, layers_of_cache(config)):
            lost[name] = loses(made, layers_of_cache(config))
    assert lost == {}
    assert alike > 150


# -- models that run -----------------------------------------------------------------------------
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "n_routed_experts": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "use_mamba_kernels": False,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
ALTERNATING = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 5}
MODELS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**LATENT, "num_hidden_layers": 6, "head_dim": 8, "q_lora_rank": 24},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA_2},
    "cohere2": ALTERNATING,
    "falcon_h1": {"num_hidden_layers": 3, "mamba_d_ssm": 96, "head_dim": 16, **MAMBA_2},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "gemma3n_text": {
        **ALTERNATING,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "intermediate_size": [96] * 10,
        "activation_sparsity_pattern": [0.0] * 10,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        **ALTERNATING,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
    },
    "gpt_oss": ALTERNATING,
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        **MAMBA_2,
    },
    "jamba": {"num_hidden_layers": 8, "mamba_d_state": 6, "mamba_dt_rank": 4},
    "kimi_linear": {
        **LATENT,
        "num_hidden_layers": 3,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense"] * 3,
    },
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1]},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 5},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 6,
    },
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 6,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
    },
}
TOKENS = 11


def cache_of(name: str) -> tuple[Any, Any]:
    """Return the config of a tiny model, and its cache after `TOKENS` tokens."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    base = CONFIG_MAPPING[name]()
    given = {key: value for key, value in SIZES.items() if hasattr(base, key)} | MODELS[name]
    config = CONFIG_MAPPING[name](**given)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        told = model(torch.randint(1, 90, (1, TOKENS)), use_cache=True)
    return config, told[CACHE]


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_arrays_are_those_that_a_model_writes(name: str) -> None:
    config, cache = cache_of(name)
    made = KVCacheParams.from_hf_config(config.to_dict(), "bfloat16", groups=True, page_size=4)
    assert layers_of(made) == layers_of_cache(config)
    for group in made.attention_groups:
        for i in group.layers:
            keys, values = cache.layers[i].keys, cache.layers[i].values
            if made.is_mla:  # the latent, and the rope part
                assert sum(row_widths(made, group)) == keys.shape[3] + values.shape[3]
                continue
            assert keys.shape[1] == (group.n_kv_heads or made.n_kv_heads)
            assert (keys.shape[3], values.shape[3]) == row_widths(made, group)
            window = kept(group)
            assert keys.shape[2] == (TOKENS if window is None else window - 1)
    for state in made.state_groups:
        for i in state.layers:
            written = {
                field: (tuple(array.shape[1:]), str(array.dtype).removeprefix("torch."))
                for field in ("conv_states", "recurrent_states")
                for array in getattr(cache.layers[i], field).values()
                if array is not None
            }
            assert written == state.arrays


@pytest.mark.parametrize("name", ["gemma3n_text"])
def test_layers_that_share_read_the_owner(name: str) -> None:
    config, cache = cache_of(name)
    made = KVCacheParams.from_hf_config(config.to_dict(), "bfloat16", groups=True, page_size=4)
    assert made.shared
    own = {i for group in made.attention_groups for i in group.layers}
    for layer, owner in made.shared.items():
        assert owner in own
        assert config.layer_types[layer] == config.layer_types[owner]
        assert getattr(cache.layers[layer], "keys", None) is None
