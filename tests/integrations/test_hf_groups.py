# SPDX-License-Identifier: Apache-2.0
"""Windows, chunks and shared layers from published configs, and configs that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_configs import CONFIGS
from hf_group_configs import (
    GEMMA_3_27B,
    GEMMA_3N,
    GPT_OSS,
    JAMBA,
    KIMI_LINEAR,
    LLAMA,
    LLAMA_4,
    MIMO,
    MISTRAL,
    NEMOTRON_H,
    QWEN_3_NEXT,
    every,
    read,
)
from kvcore import KVCacheParams
from kvcore.apps.cli.presets import PRESETS
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, bundles


# -- windows and chunks --------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-32b", "mixtral-8x7b", "deepseek-v3"])
def test_model_of_full_layers_has_no_groups(name: str) -> None:
    flat = KVCacheParams.from_hf_config(CONFIGS[name], page_size=16)
    assert read(CONFIGS[name]) == flat
    assert flat.groups is None


def test_groups_are_read_unless_they_are_not_wanted() -> None:
    assert KVCacheParams.from_hf_config(GEMMA_3_27B).groups is not None
    assert KVCacheParams.from_hf_config(GEMMA_3_27B, groups=False).groups is None
    with pytest.raises(TypeError, match="groups is a str"):
        KVCacheParams.from_hf_config(GEMMA_3_27B, groups="yes")  # type: ignore[arg-type]


def test_window_of_gemma_3() -> None:
    full, window = every(62, 6)
    made = read(GEMMA_3_27B)
    assert made.groups == (FullAttention(full), SlidingWindow(window, 1024))
    assert len(bundles(made)) == 13


def test_silent_text_config_has_the_window_of_its_class() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34}
    made = read({"text_config": text, "torch_dtype": "bfloat16"})
    assert made.groups == (FullAttention(every(34, 6)[0]), SlidingWindow(every(34, 6)[1], 4096))
    assert read({"text_config": {**text, "sliding_window": None}}, dtype="float16").groups is None
    # The full file has no missing field.
    assert read({**CONFIGS["gemma-2-27b"]}).groups is None


@pytest.mark.parametrize(
    ("pattern", "n"), [({"sliding_window_pattern": 3}, 3), ({"_sliding_window_pattern": 2}, 2)]
)
def test_pattern_of_the_config_comes_first(pattern: dict[str, int], n: int) -> None:
    text = {**GEMMA_3_27B["text_config"], **pattern}  # type: ignore[dict-item]
    assert read({"text_config": text}, dtype="int8").attention_groups[0].layers == tuple(
        every(62, n)[0]
    )


def test_pattern_of_letters_repeats() -> None:
    config = {**LLAMA, "model_type": "exaone4", "sliding_window": 4096}
    config |= {"sliding_window_pattern": "LLLG", "num_hidden_layers": 6}
    assert read(config).groups == (FullAttention([3, 5]), SlidingWindow([0, 1, 2, 4], 4096))


def test_gpt_oss_alternates() -> None:
    full, window = every(24, 2)
    groups = (FullAttention(full), SlidingWindow(window, 128))
    assert read(GPT_OSS).groups == groups
    silent = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert read(silent).groups == groups


def test_size_of_a_window_may_be_left_to_the_class() -> None:
    assert read(CONFIGS["gpt-oss-20b"], dtype="bfloat16") == read(GPT_OSS)
    text = {**LLAMA_4["text_config"], "layer_types": ["chunked_attention"] * 48}  # type: ignore[dict-item]
    del text["attention_chunk_size"]
    assert read(text).groups == (ChunkedLocal(range(48), 8192),)


def test_mistral_has_windows_alone() -> None:
    assert read(MISTRAL).groups == (SlidingWindow(range(40), 4096),)
    assert read({**MISTRAL, "sliding_window": None}).groups is None


@pytest.mark.parametrize(
    ("rest", "window"),
    [
        ({"use_sliding_window": False}, []),
        ({"use_sliding_window": True, "max_window_layers": 64}, []),
        ({"use_sliding_window": True, "max_window_layers": 60}, [60, 61, 62, 63]),
        ({"use_sliding_window": None}, []),
    ],
)
def test_qwen_uses_its_window_when_it_says_so(rest: dict[str, Any], window: list[int]) -> None:
    made = read({**CONFIGS["qwen3-32b"], "sliding_window": 4096, **rest})
    found = [group for group in made.attention_groups if isinstance(group, SlidingWindow)]
    assert [layer for group in found for layer in group.layers] == window


def test_family_that_is_not_known_keeps_every_token() -> None:
    assert read({**LLAMA, "model_type": "brand_new", "sliding_window": 4096}).groups is None
    named = ["sliding_attention"] * 40 + ["full_attention"] * 40
    made = read({**LLAMA, "model_type": "brand_new", "sliding_window": 8, "layer_types": named})
    assert made.groups == (FullAttention(range(40, 80)), SlidingWindow(range(40), 8))


def test_chunks_of_llama_4() -> None:
    full, chunked = every(48, 4)
    groups = (FullAttention(full), ChunkedLocal(chunked, 8192))
    text = LLAMA_4["text_config"]
    assert read(LLAMA_4).groups == groups
    flags = [int((i + 1) % 4 != 0) for i in range(48)]
    assert read({"text_config": {**text, "no_rope_layers": flags}}).groups == groups  # type: ignore[dict-item]
    # The class has chunks if the config omits the field, and no chunks if the value is null.
    assert read(CONFIGS["llama-4-scout"]).groups == groups
    assert read({"text_config": {**text, "attention_chunk_size": None}}).groups is None  # type: ignore[dict-item]


def test_last_layers_of_gemma_3n_read_those_before() -> None:
    made = read(GEMMA_3N)
    full, window = every(20, 5)
    assert made.groups == (FullAttention(full), SlidingWindow(window, 512))
    assert made.shared == {i: 19 if (i + 1) % 5 == 0 else 18 for i in range(20, 35)}
    with pytest.raises(ValueError, match="num_kv_shared_layers of the config is 31 of 35 layers"):
        read({**GEMMA_3N, "num_kv_shared_layers": 31})


def test_rows_of_mimo_differ_between_its_groups() -> None:
    made = read(MIMO)
    assert made.groups == (
        FullAttention([0, 5]),
        SlidingWindow([1, 2, 3, 4], 128, n_kv_heads=8),
    )
    assert [bundle.page_size for bundle in bundles(made)] == [32, 16, 16]


def test_full_layers_of_gemma_4_have_wider_heads() -> None:
    config = {**GPT_OSS, "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512}
    full, window = every(24, 2)
    made = read({**config, "num_global_key_value_heads": 4})
    wide = FullAttention(full, n_kv_heads=4, head_dim=512)
    assert made.groups == (wide, SlidingWindow(window, 128))
    assert [bundle.page_size for bundle in bundles(made)] == [16, 16]
    per_layer = {f"{layer:02}": {"head_dim": 512} for layer in full}
    made = read({**config, "global_head_dim": None, "per_layer_config": per_layer})
    assert made.groups == (FullAttention(full, head_dim=512), SlidingWindow(window, 128))
    assert [bundle.page_size for bundle in bundles(made)] == [16, 32]


# -- files and presets ---------------------------------------------------------------------------
def test_groups_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(JAMBA))
    assert KVCacheParams.from_hf_config(tmp_path, groups=True, page_size=16) == read(JAMBA)


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        ("gemma-3-27b", GEMMA_3_27B),
        ("gpt-oss-20b", GPT_OSS),
        ("llama-4-scout", LLAMA_4),
        ("jamba-1.5-mini", JAMBA),
        ("nemotron-h-8b", NEMOTRON_H),
        ("qwen3-next-80b-a3b", QWEN_3_NEXT),
        ("kimi-linear-48b-a3b", KIMI_LINEAR),
        ("gemma-3n-e4b", GEMMA_3N),
    ],
)
def test_preset_has_the_groups_of_its_config(preset: str, config: dict[str, Any]) -> None:
    assert PRESETS[preset].params(16, groups=True) == read(config)


# -- broken configs ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "is_encoder_decoder": True}, "caches cross attention"),
        ({**LLAMA, "cross_attention_layers": [3, 8]}, "cross_attention_layers .* cross attention"),
        ({**LLAMA, "add_cross_attention": True}, "add_cross_attention"),
        (
            {"model_type": "mamba", "state_size": 16, "num_hidden_layers": 4},
            "keep states or nothing",
        ),
        ({"layer_types": ["linear_attention"], "num_hidden_layers": 1}, "keep states or nothing"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "has 1 entries, must have 80"),
        ({**LLAMA, "layer_types": ["odd_attention"] * 80}, "holds 'odd_attention', must hold"),
        ({**LLAMA, "layer_types": [["full"]] * 80}, r"holds \['full'\]"),
        ({**LLAMA, "layer_types": {"0": "full_attention"}}, "must be a list"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 80}, "lacks sliding_window"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 80}, "lacks attention_chunk_size"),
        ({**LLAMA, "layer_types": ["hybrid"] * 80}, "no rule for the arrays"),
        ({**LLAMA, "mamba_d_state": 16}, "mamba_d_state of the config .* needs layer_types"),
        ({**MISTRAL, "sliding_window": -1}, "sliding_window of the config is -1"),
        ({**MISTRAL, "sliding_window": "4k"}, "sliding_window of the config is '4k'"),
        ({**MISTRAL, "sliding_window": 4, "sliding_window_pattern": 0}, "pattern .* is 0"),
        ({**MISTRAL, "sliding_window": 4, "sliding_window_pattern": "XY"}, "pattern .* is 'XY'"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "MX"}, "has 2 entries, must have 52"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "X" * 52}, "holds 'X'"),
        ({**NEMOTRON_H, "hybrid_override_pattern": None}, "pattern of the config is None"),
        ({**JAMBA, "attn_layer_period": "8"}, "attn_layer_period of the config is '8'"),
        ({**NEMOTRON_H, "ssm_state_size": None}, "lacks mamba_d_state"),
        ({**KIMI_LINEAR, "linear_attn_config": {"full_attn_layers": "4"}}, "full_attn_layers"),
        ({**QWEN_3_NEXT, "linear_key_head_dim": 0}, "linear_key_head_dim of the config is 0"),
        ({**GEMMA_3N, "num_kv_shared_layers": -1}, "num_kv_shared_layers of the config is -1"),
        ({**LLAMA, "kv_source_layers": [0]}, "kv_source_layers"),
        ({**LLAMA, "per_layer_config": 7}, "per_layer_config of the config is 7"),
        ({**LLAMA, "per_layer_config": {"1": {"sliding_window": 8}}}, "layer 1 a sliding_window"),
        ({**LLAMA, "num_key_value_heads_per_layer": [4, 2]}, "has 2 entries, must have 80"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({**MIMO, "swa_head_dim": 100}, "must agree within 5 %"),
    ],
)
def test_config_that_no_groups_describe_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(config, dtype="bfloat16")
