# SPDX-License-Identifier: Apache-2.0
"""Config fields without a rule in kvcore, and the record of the fields that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from hf_group_configs import GEMMA_3_27B, KIMI_LINEAR, LLAMA
from kvcore import KVCacheParams
from kvcore.layers.hf.config import read_config
from kvcore.layers.hf.unread import looks_cached


def read(config: dict[str, Any], **rest: Any) -> KVCacheParams:
    return KVCacheParams.from_hf_config(config, page_size=16, **rest)


def refusal(config: dict[str, Any], **rest: Any) -> str:
    with pytest.raises(ValueError, match="by the name this may change the cache") as it:
        read(config, **rest)
    return str(it.value)


#: Unused names, for each property that changes a cache.
UNKNOWN = (
    *("kv_width", "num_kv", "kvDim", "key_value_groups", "latent_kv_rank", "n_key_heads"),
    *("head_groups", "query_group_size", "num_gqa_ratio", "size_per_head", "value_dim"),
    *("shared_layers", "layer_sharing_map", "kv_reuse_every", "cross_layer_stride", "cla_factor"),
    *("compress_every", "compression_blocks", "pooled_keys", "index_width", "indexer_rank"),
    *("local_window", "window_per_layer", "swa_every", "global_layers", "chunk_tokens"),
    *("sink_tokens", "sparse_attention_map", "attention_span", "stream_budget", "dilation"),
    *("num_loops", "recurrent_depth", "recursion_steps", "layer_repeats", "cycles", "ut_depth"),
    *("conv_width", "short_conv_taps", "state_dim", "ssm_rank", "linear_heads", "memory_slots"),
    *("cache_dtype", "kv_cache_bits", "attn_precision", "attention_pattern", "n_extra_layers"),
    *("anchor_interval", "landmark_every", "ring_size", "retnet_heads", "hyena_order"),
    *("titans_depth", "ttt_rank", "fir_taps", "attn_free_layers", "skip_attention_from"),
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_field_of_the_cache_is_refused_with_its_name_and_value(name: str) -> None:
    assert looks_cached(name)
    config = {**LLAMA, name: 3}
    for groups in (True, False):
        text = refusal(config, groups=groups)
        assert text.startswith(f"{name} of the config is 3: ")
        assert f"assume={{{name!r}: 'ignored'}}" in text
        assert f"--assume {name}" in text
        assert read(config, groups=groups, assume={name: "ignored"}) == read(LLAMA, groups=groups)


@pytest.mark.parametrize("value", [0, 1, 2.5, "yes", True, False, [1, 2], {"a": 1}])
def test_any_value_may_change_the_cache(value: Any) -> None:
    assert f"kv_share of the config is {value!r}: " in refusal({**LLAMA, "kv_share": value})


@pytest.mark.parametrize("value", [None, [], {}, ""])
def test_field_that_says_nothing_changes_nothing(value: Any) -> None:
    assert read({**LLAMA, "kv_share": value}) == read(LLAMA)


#: Fields of published files, by the type of model.
KNOWN: dict[str, dict[str, Any]] = {
    "newmodel": {
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "hidden_activations": "silu",
        "brand_new_flag": 3,
        "pruned_heads": {},
        "num_beam_groups": 1,
        "image_token_index": 7,
        "lm_head_bias": False,
        "num_experts_per_tok": 2,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "global_compression_ratio": 1.2,
            "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        },
    },
    "qwen": {"use_cache_quantization": False, "use_cache_kernel": False, "kv_channels": 128},
    "gemma3_text": {"cache_implementation": "hybrid", "rope_local_base_freq": 10_000},
    "llada": {"block_group_size": 1, "block_type": "llama", "include_qkv_bias": False},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first", "use_embedding_sharing": True},
    "ernie4_5": {"compression_ratio": 1.0, "num_nextn_predict_layers": 1},
    "phi3small": {"blocksparse_num_local_blocks": 16, "dummy_token_indices": [1, 2]},
    "llama4_text": {"for_llm_compressor": False, "moe_layers": [0, 1], "no_rope_layers": []},
    "internvl_chat": {"vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16}},
    "minimax_m2": {"attn_type_list": [1] * 80, "num_mtp_modules": 3, "shared_moe_mode": "sigmoid"},
    "phi4mm": {
        "audio_processor": {"config": {"attention_heads": 16, "conv_channels": 512}},
        "embd_layer": {"audio_embd_layer": {"compression_rate": 8}},
    },
}


@pytest.mark.parametrize("kind", KNOWN)
def test_fields_of_published_files_are_taken(kind: str) -> None:
    config = {**LLAMA, "head_dim": 128, "model_type": kind, **KNOWN[kind]}
    for groups in (True, False):
        assert read(config, groups=groups).bytes_per_token == read(LLAMA).bytes_per_token


def test_values_that_turn_a_known_field_on_are_refused() -> None:
    assert "use_cache_quantization" in refusal({**LLAMA, "use_cache_quantization": True})
    assert "compression_ratio" in refusal({**LLAMA, "compression_ratio": 4.0})


def test_names_of_one_model_say_nothing_of_another() -> None:
    assert "enc_index" in refusal({**LLAMA, "enc_index": [0]})
    assert read({**LLAMA, "model_type": "arctic", "enc_index": [0]}) == read(LLAMA)


def test_fields_inside_objects_are_looked_at() -> None:
    text = refusal({**LLAMA, "attention_options": {"kv_stride": 2}})
    assert text.startswith("attention_options.kv_stride of the config is 2: ")
    text = refusal({**LLAMA, "parts": [{"size": 3}, {"window": 4}]})
    assert text.startswith("parts[1].window of the config is 4: ")
    text = refusal({"text_config": {**LLAMA, "kv_stride": 2}})
    assert text.startswith("text_config.kv_stride of the config is 2: ")
    inside = {"text_config": {**LLAMA, "kv_stride": 2}}
    assert read(inside, assume={"text_config.kv_stride": "ignored"}) == read(LLAMA)
    odd = {**KIMI_LINEAR["linear_attn_config"], "kv_stride": 2}  # type: ignore[dict-item]
    assert "linear_attn_config.kv_stride" in refusal({**KIMI_LINEAR, "linear_attn_config": odd})


def test_deep_objects_are_looked_at_to_the_bottom() -> None:
    inside: dict[str, Any] = {"kv_stride": 2}
    for _ in range(5000):
        inside = {"a": inside}
    assert "kv_stride of the config is 2" in refusal({**LLAMA, "b": inside})


def test_fields_beside_the_language_model_may_repeat_it_only() -> None:
    config = {"text_config": LLAMA, "num_key_value_heads": 8, "num_attention_heads": 64}
    assert read(config) == read(LLAMA)
    assert "num_key_value_heads of the config is 4" in refusal({**config, "num_key_value_heads": 4})


def test_all_fields_are_named_at_once() -> None:
    text = refusal({**LLAMA, "kv_stride": list(range(100)), "num_loops": 2})
    assert (
        "kv_stride of the config is [0, 1, 2, 3, 4, 5, ...], num_loops of the config is 2" in text
    )
    assert "{'kv_stride': 'ignored', 'num_loops': 'ignored'}" in text
    assert "--assume kv_stride --assume num_loops" in text


@pytest.mark.parametrize(
    ("assume", "error", "words"),
    [
        ({"kv_stride": "ignored"}, ValueError, "names 'kv_stride', which the config does not have"),
        ({"a.b": "ignored"}, ValueError, "names 'a.b', which the config does not have"),
        ({"hidden_size.b": "ignored"}, ValueError, "names 'hidden_size.b'"),
        ({"hidden_size": 4096}, ValueError, "assume says 4096 of 'hidden_size'"),
        ("kv_stride", TypeError, "assume is a str"),
    ],
)
def test_assumptions_that_mean_nothing_are_refused(
    assume: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(LLAMA, assume=assume)


def test_field_with_a_rule_can_be_left_out_too() -> None:
    config = {**LLAMA, "n_recurrent_loops": 2}
    with pytest.raises(ValueError, match="n_recurrent_loops of the config is 2"):
        read(config)
    assert read(config, assume={"n_recurrent_loops": "ignored"}) == read(LLAMA)


# -- the record ----------------------------------------------------------------------------------
def test_reading_says_which_fields_it_comes_from() -> None:
    config = {
        **GEMMA_3_27B["text_config"],  # type: ignore[dict-item]
        "use_cache": True,
        "vocab_size": 5,
        "kv_stride": 2,
    }
    del config["head_dim"]
    found = read_config(config, "bfloat16", groups=True, assume={"kv_stride": "ignored"})
    assert found.shape["n_kv_heads"] == 16
    assert found.read["num_key_value_heads"] == 16
    assert found.read["sliding_window"] == 1024
    assert found.defaults == {"head_dim": 256}
    assert found.ignored == {"use_cache": "how it is run, not what is kept"}
    assert found.assumed == ("kv_stride",)
    assert "vocab_size" not in found.read


def test_reading_names_fields_that_another_one_settles() -> None:
    config = {**LLAMA, "layer_types": ["full_attention"] * 80, "sliding_window_pattern": 6}
    found = read_config({**config, "sliding_window": 4096}, groups=True)
    assert found.ignored == {
        "sliding_window": "no layer has a window",
        "sliding_window_pattern": "layer_types decides",
    }
