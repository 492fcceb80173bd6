# SPDX-License-Identifier: Apache-2.0
"""KVCacheParams.from_hf_config on the config.json of many families, and on broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_configs import CONFIGS, LATENT, SHAPES
from kvcore import KVCacheParams
from kvcore.support.dtypes import itemsize

LLAMA = CONFIGS["llama-3.1-70b"]
DEEPSEEK = CONFIGS["deepseek-v3"]


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize("name", CONFIGS)
def test_family_is_read(name: str) -> None:
    layers, heads, head_dim, dtype = SHAPES[name]
    given: dict[str, Any] = {} if dtype else {"dtype": "bfloat16"}
    made = KVCacheParams.from_hf_config(CONFIGS[name], **given)
    assert (made.num_layers, made.n_kv_heads, made.head_dim) == (layers, heads, head_dim)
    assert made.dtype == (dtype or "bfloat16")
    assert made.is_mla is (name in LATENT)
    assert made.v_head_dim == (128 if name.startswith("mimo") else None)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape[3] is None])
def test_config_without_a_dtype_wants_one(name: str) -> None:
    with pytest.raises(ValueError, match="names no dtype; pass dtype="):
        KVCacheParams.from_hf_config(CONFIGS[name])


def test_nested_text_config_fills_in_what_its_class_says() -> None:
    nested = {"text_config": {"model_type": "mistral", "num_hidden_layers": 40}}
    made = KVCacheParams.from_hf_config(nested, dtype="float16")
    assert (made.num_layers, made.n_kv_heads, made.head_dim) == (40, 8, 128)
    omni = {"thinker_config": {"text_config": {**LLAMA, "num_hidden_layers": 3}}}
    assert KVCacheParams.from_hf_config(omni).num_layers == 3


def test_gemma_without_head_dim_has_that_of_its_class() -> None:
    config = {**LLAMA, "model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8}
    assert KVCacheParams.from_hf_config(config).head_dim == 256


def test_file_folder_and_mapping_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    rest: dict[str, Any] = {"dtype": "float32", "page_size": 16, "n_devices": 2}
    expected = KVCacheParams.from_hf_config(LLAMA, **rest)
    for where in (path, str(path), tmp_path):
        assert KVCacheParams.from_hf_config(where, **rest) == expected
    assert (expected.dtype, expected.page_size) == ("float32", 16)
    assert expected.n_kv_heads_per_device == 4


# -- dtypes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("prefix", ["", "torch."])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_dtype_is_read_with_and_without_its_library(field: str, prefix: str, dtype: str) -> None:
    config = without(LLAMA, "torch_dtype") | {field: prefix + dtype}
    made = KVCacheParams.from_hf_config(config)
    assert made.dtype == dtype
    assert made.bytes_per_token == 2 * 80 * 8 * 128 * itemsize(dtype)


def test_dtype_of_the_language_model_comes_first() -> None:
    config = {"text_config": LLAMA, "torch_dtype": "float32"}
    assert KVCacheParams.from_hf_config(config).dtype == "bfloat16"
    config = {"text_config": without(LLAMA, "torch_dtype"), "torch_dtype": "float32"}
    assert KVCacheParams.from_hf_config(config).dtype == "float32"


@pytest.mark.parametrize("dtype", ["auto", "float64", "torch.int32", "uint4", 16, ["bfloat16"], ""])
def test_dtype_that_no_cache_has_is_refused_unless_another_is_given(dtype: Any) -> None:
    config = LLAMA | {"torch_dtype": dtype}
    with pytest.raises(ValueError, match=r"torch_dtype of the config.*pass dtype="):
        KVCacheParams.from_hf_config(config)
    assert KVCacheParams.from_hf_config(config, dtype="int8").dtype == "int8"


# -- broken configs ------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"lacks {field} \(or "):
        KVCacheParams.from_hf_config(without(LLAMA, field))


def test_missing_rope_width_of_a_latent_row_is_named() -> None:
    silent = without(DEEPSEEK, "qk_rope_head_dim")
    with pytest.raises(ValueError, match="lacks qk_rope_head_dim"):
        KVCacheParams.from_hf_config(silent | {"model_type": "newmodel"})
    # The class of a known model has a default.
    assert KVCacheParams.from_hf_config(silent).head_dim == 576


@pytest.mark.parametrize("value", [0, -8, 8.0, "8", True, [8, 8], {}])
@pytest.mark.parametrize(
    "field",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "head_dim",
        "kv_lora_rank",
        "v_head_dim",
    ],
)
def test_field_that_is_no_count_is_named_with_its_value(field: str, value: Any) -> None:
    if field == "v_head_dim" and value == 0:
        return  # published configs use it for "none"
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        KVCacheParams.from_hf_config(LLAMA | {field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_field_is_named_as_the_config_names_it() -> None:
    with pytest.raises(ValueError, match=r"n_layer of the config is 'twelve'"):
        KVCacheParams.from_hf_config(CONFIGS["gpt2"] | {"n_layer": "twelve"}, dtype="float16")
    with pytest.raises(ValueError, match=r"multi_query_group_num of the config is 0"):
        KVCacheParams.from_hf_config(CONFIGS["chatglm3-6b"] | {"multi_query_group_num": 0})
    with pytest.raises(ValueError, match=r"multi_query of the config is 'yes'"):
        KVCacheParams.from_hf_config(CONFIGS["falcon-7b"] | {"multi_query": "yes"})
    with pytest.raises(ValueError, match=r"kv_n_heads of the config is -1"):
        KVCacheParams.from_hf_config(CONFIGS["dbrx"] | {"attn_config": {"kv_n_heads": -1}})
    with pytest.raises(ValueError, match=r"text_config of the config is 'llama'"):
        KVCacheParams.from_hf_config(LLAMA | {"text_config": "llama"})
    with pytest.raises(ValueError, match=r"layer_types of the config is 3"):
        KVCacheParams.from_hf_config(LLAMA | {"layer_types": 3})


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_key_value_heads .* 7, must divide the 64 of"):
        KVCacheParams.from_hf_config(LLAMA | {"num_key_value_heads": 7})
    with pytest.raises(
        ValueError, match=r"hidden_size .* 8200, not a multiple of the 64 .*head_dim"
    ):
        KVCacheParams.from_hf_config(LLAMA | {"hidden_size": 8200})
    made = KVCacheParams.from_hf_config(LLAMA | {"hidden_size": 8200, "head_dim": 128})
    assert made.head_dim == 128


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, ["t5", "is_encoder_decoder"]),
        ({"model_type": "dory", "n_recurrent_loops": 2}, ["dory", "n_recurrent_loops"]),
        ({"model_type": "mamba", "state_size": 16}, ["mamba", "state_size"]),
        ({"model_type": "jamba", "mamba_d_state": 16}, ["jamba", "mamba_d_state"]),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, ["qwen3_next"]),
        ({"layer_types": ["linear_attention", "full_attention"]}, ["linear_attention"]),
        ({"layer_types": ["conv", "full_attention"]}, ["conv"]),
        ({"num_key_value_heads_per_layer": [4, 2]}, ["num_key_value_heads_per_layer"]),
        ({"head_dim": 256, "global_head_dim": 512}, ["global_head_dim"]),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, ["per_layer_config"]),
    ],
)
def test_model_that_one_pool_cannot_hold_is_refused(rest: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        KVCacheParams.from_hf_config(LLAMA | rest, groups=False)
    assert all(word in str(caught.value) for word in words)


def test_state_sizes_do_not_count_where_every_layer_attends() -> None:
    config = LLAMA | {"mamba_d_state": 256, "layer_types": ["attention"] * 80}
    assert KVCacheParams.from_hf_config(config).num_layers == 80


def test_file_that_is_no_config_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, words in [("{", "not JSON"), ("[1]", "holds a list"), ("\udcff", "not JSON")]:
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=words) as caught:
            KVCacheParams.from_hf_config(path)
        assert str(path) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        KVCacheParams.from_hf_config(tmp_path / "absent.json")


@pytest.mark.parametrize("config", ["x" * 10_000, "a\0b", "\udc80\ud800", "y/" * 5000])
def test_text_that_names_no_file_is_a_value_error(config: str) -> None:
    with pytest.raises(ValueError, match=r"not a path|not JSON|null|surrogates"):
        KVCacheParams.from_hf_config(config)


def test_nested_beyond_measure_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        KVCacheParams.from_hf_config(path)


@pytest.mark.parametrize("config", [None, 7, [LLAMA]])
def test_neither_mapping_nor_path_is_a_type_error(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config is a .*to_dict"):
        KVCacheParams.from_hf_config(config)
