# SPDX-License-Identifier: Apache-2.0
"""Configs whose fields change the cached data: the bytes of a token, or a refusal of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_configs import CONFIGS
from hf_group_configs import GPT_OSS, LLAMA, MIMO, QWEN_3_NEXT
from kvcore import KVCacheParams
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.layers.packing import row_widths

DEEPSEEK = CONFIGS["deepseek-v3"]
SMALL: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def read(config: dict[str, Any], **rest: Any) -> KVCacheParams:
    return KVCacheParams.from_hf_config(config, page_size=16, **rest)


def refusal(config: dict[str, Any], **rest: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the text
        read(config, **rest)
    return str(caught.value)


# -- names of one thing --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "n_kv_head"),
        *("num_attention_groups", "num_query_groups"),
    ],
)
def test_heads_are_read_under_every_name(name: str) -> None:
    assert read({**SMALL, name: 8}).bytes_per_token == 2 * 4 * 8 * 128 * 2
    assert read({**SMALL, name: 8}, groups=False).n_kv_heads == 8


def test_config_with_the_names_of_olmo() -> None:
    config = {"model_type": "llada", "d_model": 4096, "n_heads": 32, "n_kv_heads": 8}
    assert read({**config, "n_layers": 32, "torch_dtype": "bfloat16"}).bytes_per_token == 131_072


def test_two_names_with_two_values_are_refused() -> None:
    text = refusal({**SMALL, "num_key_value_heads": 8, "n_kv_heads": 4})
    assert "num_key_value_heads of the config is 8 and n_kv_heads is 4, must be the same" in text
    assert read({**SMALL, "num_key_value_heads": 8, "n_kv_heads": 8}).n_kv_heads == 8
    assert "num_layers is 5" in refusal({**SMALL, "num_layers": 5})


@pytest.mark.parametrize(
    "name", ["kv_heads", "n_kv", "num_key_value_groups", "gqa_ratio", "n_shared_head", "kvHeads"]
)
def test_missing_heads_are_never_those_of_queries_where_another_field_may_hold_them(
    name: str,
) -> None:
    assert f"{name} of the config is 8" in refusal({**SMALL, name: 8})
    assert read({**SMALL, name: 8}, assume={name: "ignored"}).n_kv_heads == 32


def test_one_head_for_all_queries() -> None:
    assert read({**SMALL, "multi_query_attention": True}).n_kv_heads == 1
    assert read({**SMALL, "multi_query_attention": None}).n_kv_heads == 32


# -- heads by layer ------------------------------------------------------------------------------
def test_heads_of_each_layer_are_a_list() -> None:
    listed = {**SMALL, "num_key_value_heads_per_layer": [4, 4, 4, 2]}
    made = read(listed)
    assert made.groups == (FullAttention([0, 1, 2]), FullAttention([3], n_kv_heads=2))
    assert made.bytes_per_token == 2 * (4 + 4 + 4 + 2) * 128 * 2
    assert read({**SMALL, "num_key_value_heads": [4, 4, 2, 2]}).bytes_per_token == 2 * 12 * 256
    assert read({**SMALL, "num_key_value_heads": [4] * 4}).groups is None
    assert "must have 4" in refusal({**SMALL, "num_key_value_heads": [4, 4]})
    assert "at least 1" in refusal({**SMALL, "num_key_value_heads": [4, 4, 0, 4]})
    assert "differ" in refusal(listed, groups=False)


def test_heads_of_openelm_grow() -> None:
    config = {
        "model_type": "openelm",
        "head_dim": 64,
        "model_dim": 1280,
        "num_gqa_groups": 4,
        "num_kv_heads": [3, 3, 6],
        "num_query_heads": [12, 12, 24],
        "num_transformer_layers": 3,
        "qkv_multipliers": [0.5, 1.0],
        "share_input_output_layers": True,
        "torch_dtype": "float16",
    }
    assert read(config).bytes_per_token == 2 * (3 + 3 + 6) * 64 * 2
    assert "12 for layer 0, must be a multiple of its 5" in refusal(
        {**config, "num_kv_heads": [5, 3, 6]}
    )


def test_blocks_of_a_pruned_model() -> None:
    def block(**attention: Any) -> dict[str, Any]:
        return {"attention": attention, "ffn": {"ffn_mult": 1.3, "no_op": False}}

    blocks = [block(n_heads_in_group=8), block(no_op=True), block(n_heads_in_group=16)]
    config = {**SMALL, "num_hidden_layers": 3, "block_configs": blocks}
    made = read(config)
    assert made.bytes_per_token == 2 * (4 + 2) * 128 * 2
    assert [group.layers for group in made.attention_groups] == [(0,), (2,)]
    blocks[0] = block(n_heads_in_group=8, window_length=512)
    assert "layer 0 a window_length" in refusal(config)
    assert "must divide the 32" in refusal(
        {**config, "block_configs": [block(n_heads_in_group=5)] * 3}
    )
    assert "must have 3" in refusal({**config, "block_configs": blocks[:2]})


def test_layers_with_a_window_have_heads_of_their_own() -> None:
    config = {
        "model_type": "baichuan_m1",
        "torch_dtype": "bfloat16",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 2,
        "num_swa_attention_heads": 20,
        "num_swa_key_value_heads": 8,
        "sliding_window": 8192,
        "sliding_window_layers": list(range(1, 40, 2)),
        "conv_window": 2,
    }
    made = read(config)
    # Heads of 5120 / 40 and of 5120 / 20 elements.
    assert made.bytes_per_token == 20 * 2 * 2 * 128 * 2 + 20 * 2 * 8 * 256 * 2 == 184_320
    full, window, *states = made.groups or ()
    assert (full.layers, window.layers) == (tuple(range(0, 40, 2)), tuple(range(1, 40, 2)))
    # The convolution over K and V keeps their last token.
    assert [state.arrays for state in states if isinstance(state, State)] == [
        {"conv_states": ((2 * 2 * 128, 1), "bfloat16")},
        {"conv_states": ((2 * 8 * 256, 1), "bfloat16")},
    ]
    assert "not a multiple of the 24" in refusal({**config, "num_swa_attention_heads": 24})


def test_mimo_has_twice_the_heads_under_a_window_where_its_config_is_silent() -> None:
    silent = {key: value for key, value in MIMO.items() if key != "swa_num_key_value_heads"}
    assert read(silent) == read(MIMO)


# -- layers --------------------------------------------------------------------------------------
def test_kinds_of_layers_may_go_on_to_those_that_predict_further_tokens() -> None:
    kinds = (["full_attention"] + ["sliding_attention"] * 3) * 12
    config = {
        "model_type": "step3p5",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "num_nextn_predict_layers": 3,
        "layer_types": kinds,
    }
    made = read(config)
    assert (made.num_layers, made.bytes_per_token) == (45, 184_320)
    more = read(config, mtp=True)
    assert (more.num_layers, more.bytes_per_token) == (48, 48 * 2 * 8 * 128 * 2)
    assert more.attention_groups[1].layers[-3:] == (45, 46, 47)
    assert "has 48 entries, must have 45" in refusal({**config, "num_nextn_predict_layers": 2})


def test_layers_that_predict_further_tokens_are_like_the_others() -> None:
    assert read(DEEPSEEK).bytes_per_token == 61 * 576 * 2
    assert read(DEEPSEEK, mtp=True).bytes_per_token == 62 * 576 * 2
    assert read(DEEPSEEK, mtp=True, groups=False).num_layers == 62
    hybrid = read({**QWEN_3_NEXT, "num_nextn_predict_layers": 1}, mtp=True)
    assert hybrid.attention_groups[0].layers[-2:] == (47, 48)
    mixed = {**GPT_OSS, "num_nextn_predict_layers": 2}
    assert "MTP layers of unknown kind" in refusal(mixed, mtp=True)
    named = {**mixed, "mtp_layer_types": ["sliding_attention"] * 2}
    assert read(named, mtp=True).attention_groups[1].layers[-2:] == (24, 25)
    blocks = {**mixed, "mtp_layers_block_type": ["full_attention", "mlp", "moe"]}
    assert read(blocks, mtp=True).attention_groups[0].layers[-2:] == (24, 25)
    assert "no number of MTP layers" in refusal(LLAMA, mtp=True)
    assert "no number of MTP layers" in refusal({**LLAMA, "num_mtp_layers": 0}, mtp=True)
    with pytest.raises(TypeError, match="mtp is a str"):
        read(DEEPSEEK, mtp="yes")


def test_fields_of_mtp_layers_matter_where_those_are_counted() -> None:
    config = {**DEEPSEEK, "mtp_local_window": 512}
    assert read(config) == read(DEEPSEEK)
    assert "mtp_local_window of the config is 512" in refusal(config, mtp=True)


def test_layers_share_k_and_v() -> None:
    config = {**LLAMA, "model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2}
    made = read(config)
    assert made.bytes_per_token == read(LLAMA).bytes_per_token // 2
    assert dict(made.shared or {}) == {layer: layer - 1 for layer in range(1, 80, 2)}
    assert read({**config, "use_cla": False}) == read(LLAMA)
    assert "lacks cla_share_factor" in refusal({**config, "cla_share_factor": None})
    mixed = {**GPT_OSS, "use_cla": True, "cla_share_factor": 2}
    assert "must be of one kind" in refusal(mixed)


def test_layers_that_run_several_times_keep_k_and_v_of_each_time() -> None:
    looped = {**LLAMA, "model_type": "ouro", "total_ut_steps": 4}
    assert read(looped).num_layers == 320
    assert read(looped, groups=False).bytes_per_token == 4 * read(LLAMA).bytes_per_token
    assert "lacks total_ut_steps" in refusal({**looped, "total_ut_steps": None})
    recurrent = {
        "model_type": "huginn_raven",
        "torch_dtype": "bfloat16",
        "n_embd": 5280,
        "n_heads": 55,
        "num_key_value_heads": 55,
        "head_dim": 96,
        "n_layers": 8,
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 4,
        "n_layers_in_coda": 2,
        "mean_recurrence": 32,
    }
    assert "n_layers_in_recurrent_block of the config is 4" in refusal(recurrent)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**LLAMA, "model_type": "mllama_text_model"},
            "cross_attention_layers is missing from the config",
        ),
        ({**LLAMA, "model_type": "xlstm", "num_heads": 64}, "model_type of the config"),
        (
            {
                **LLAMA,
                "model_type": "deepseek_v4",
                "num_key_value_heads": 1,
                "compress_ratios": [0, 4, 128],
            },
            "compress_ratios of the config is [0, 4, 128]",
        ),
    ],
)
@pytest.mark.parametrize("groups", [True, False])
def test_layers_that_keep_something_else_are_refused(
    config: dict[str, Any], words: str, groups: bool
) -> None:
    assert words in refusal(config, groups=groups)


def test_class_with_cross_attention_may_have_none() -> None:
    config = {**LLAMA, "model_type": "mllama_text_model", "cross_attention_layers": []}
    assert read(config) == read(LLAMA)


# -- indexers ------------------------------------------------------------------------------------
INDEXED = {
    **DEEPSEEK,
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}


def test_key_of_an_indexer_lies_behind_the_latent() -> None:
    made = read(INDEXED)
    assert (made.is_mla, made.head_dim, made.groups) == (True, 512 + 64 + 128, None)
    assert made.bytes_per_token == 61 * 704 * 2 == 85_888
    named = {**INDEXED, "layer_types": ["indexed_attention"] * 61}
    assert read(named) == read(INDEXED, groups=False) == made
    # Its class has a default if the file omits the field.
    silent = {key: value for key, value in INDEXED.items() if not key.startswith("index")}
    assert read(silent) == made


def test_layers_without_an_indexer_of_their_own_keep_less() -> None:
    config = {**INDEXED, "num_hidden_layers": 2, "index_head_dim": 24}
    made = read({**config, "indexer_types": ["full", "shared"]})
    assert [row_widths(made, group) for group in made.attention_groups] == [(600,), (576,)]
    assert made.bytes_per_token == (600 + 576) * 2
    assert "must be a list of 'full' and 'shared'" in refusal(
        {**config, "indexer_types": ["full", "half"]}
    )
    assert "rows" in refusal({**config, "indexer_types": ["full", "shared"]}, groups=False)


def test_flag_says_whether_rows_are_latents() -> None:
    assert read({**LLAMA, "use_mla": False}) == read(LLAMA)
    assert read({**DEEPSEEK, "use_mla": True}) == read(DEEPSEEK)
    assert read({**DEEPSEEK, "use_mla": False, "head_dim": 128}).n_kv_heads == 128
    assert "lacks kv_lora_rank" in refusal({**LLAMA, "use_mla": True})


def test_layers_without_positions_keep_less() -> None:
    config = {**DEEPSEEK, "num_hidden_layers": 2, "qk_rope_head_dim": 16}
    made = read({**config, "no_rope_layers": [1, 0]})
    assert [row_widths(made, group) for group in made.attention_groups] == [(528,), (512,)]
    assert "no_rope_layers" in refusal({**config, "no_rope_layers": [1]})


def test_indexer_beside_heads_is_refused() -> None:
    assert "index_head_dim of the config" in refusal({**LLAMA, "index_head_dim": 128})
    # The config names the kind of each layer, and no layer is an indexer.
    full = {**LLAMA, "layer_types": ["full_attention"] * 80, "index_head_dim": 128}
    assert read(full) == read(LLAMA)


# -- dtypes of quantised checkpoints -------------------------------------------------------------
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, "float8_e4m3fn"),
        ({"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}, "float8_e4m3fn"),
        ({"kv_cache_scheme": {**SCHEME, "type": "int"}}, "int8"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "float8_e4m3fn"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
        ({"producer": {}, "quantization": {"kv_cache_quant_algo": "FP8"}}, "float8_e4m3fn"),
        ({"quant_method": "awq", "kv_cache_scheme": None, "group_size": 128}, "bfloat16"),
        ({"quantization": {"kv_cache_quant_algo": None}}, "bfloat16"),
    ],
)
def test_cache_has_the_dtype_of_a_quantised_checkpoint(section: dict[str, Any], dtype: str) -> None:
    config = {**LLAMA, "quantization_config": section}
    assert read(config).dtype == dtype
    assert read(config, dtype="float16").dtype == "float16"
    nested = {"text_config": LLAMA, "quantization_config": section}
    assert read(nested).dtype == dtype


@pytest.mark.parametrize(
    "section",
    [
        {"kv_cache_scheme": {**SCHEME, "num_bits": 4}},
        {"kv_cache_scheme": {**SCHEME, "strategy": "token"}},
        {"kv_cache_scheme": "fp8"},
        {"kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_group": ["*k_proj"]},
    ],
)
def test_other_quantised_caches_are_refused(section: dict[str, Any]) -> None:
    text = refusal({**LLAMA, "quantization_config": section})
    assert next(iter(section)) in text
    assert repr(next(iter(section.values())))[:20] in text


def test_states_keep_the_dtype_of_the_model() -> None:
    config = {**QWEN_3_NEXT, "quantization_config": {"kv_cache_scheme": SCHEME}}
    made = read(config)
    assert made.dtype == "float8_e4m3fn"
    assert made.state_groups == read(QWEN_3_NEXT).state_groups


def test_file_of_modelopt_beside_the_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert KVCacheParams.from_hf_config(path).dtype == "float8_e4m3fn"
    own = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert KVCacheParams.from_hf_config(tmp_path).dtype == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside.write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: holds a list"):
        KVCacheParams.from_hf_config(tmp_path)


def test_window_of_a_class_is_that_of_a_silent_text_config() -> None:
    nested = {"text_config": {"model_type": "cohere2", "num_hidden_layers": 8}}
    made = read(nested, dtype="bfloat16")
    assert made.groups == (
        FullAttention([3, 7]),
        SlidingWindow([0, 1, 2, 4, 5, 6], 4096),
    )
