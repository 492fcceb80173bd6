# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers from published configs."""

from __future__ import annotations

from typing import Any

import pytest

from hf_group_configs import (
    FALCON_H1,
    JAMBA,
    KIMI_LINEAR,
    NEMOTRON_H,
    QWEN_3_NEXT,
    RECURRENT_GEMMA,
    every,
    read,
)
from kvcore.groups import FullAttention, SlidingWindow, State


def test_states_of_jamba() -> None:
    full = [4, 12, 20, 28]
    arrays = {
        "conv_states": ((8192, 4), "bfloat16"),
        "recurrent_states": ((8192, 16), "float32"),
    }
    states = State([i for i in range(32) if i not in full], arrays)
    assert read(JAMBA).groups == (FullAttention(full), states)


def test_states_of_nemotron_h() -> None:
    pattern = str(NEMOTRON_H["hybrid_override_pattern"])
    arrays = {
        "conv_states": ((128 * 64 + 2 * 8 * 128, 4), "bfloat16"),
        "recurrent_states": ((128, 64, 128), "float32"),
    }
    made = read(NEMOTRON_H)
    assert made.groups == (
        FullAttention([i for i, letter in enumerate(pattern) if letter == "*"]),
        State([i for i, letter in enumerate(pattern) if letter == "M"], arrays),
    )
    assert (made.head_dim, len(made.attention_groups[0].layers)) == (128, 4)
    modern = {key: v for key, v in NEMOTRON_H.items() if not key.startswith(("hybrid", "num_hid"))}
    letters = {"M": "mamba", "*": "attention", "-": "mlp"}
    assert read({**modern, "layers_block_type": [letters[each] for each in pattern]}) == made


def test_states_of_qwen_3_next() -> None:
    full, linear = every(48, 4)
    arrays = {
        "conv_states": ((2 * 16 * 128 + 32 * 128, 4), "bfloat16"),
        "recurrent_states": ((32, 128, 128), "float32"),
    }
    assert read(QWEN_3_NEXT).groups == (FullAttention(full), State(linear, arrays))


def test_latent_rows_and_states_of_kimi_linear() -> None:
    made = read(KIMI_LINEAR)
    full = FullAttention([3, 7, 11, 15, 19, 23, 26])
    assert made.attention_groups == (full,)
    assert (made.is_mla, made.head_dim) == (True, 576)
    assert made.state_groups[0].arrays == {
        "conv_states": ((3 * 32 * 128, 4), "bfloat16"),
        "recurrent_states": ((32, 128, 128), "float32"),
    }


def test_layers_of_falcon_h1_keep_both() -> None:
    made = read(FALCON_H1)
    assert made.attention_groups == (FullAttention(range(44)),)
    assert made.state_groups[0].layers == tuple(range(44))
    assert made.state_groups[0].arrays["conv_states"] == ((3072 + 2 * 256, 4), "bfloat16")


def test_windows_and_states_of_recurrent_gemma() -> None:
    made = read(RECURRENT_GEMMA)
    window = [i for i in range(26) if i % 3 == 2]
    assert made.attention_groups == (SlidingWindow(window, 2048),)
    assert made.state_groups[0].arrays == {
        "conv_states": ((2560, 3), "bfloat16"),
        "recurrent_states": ((2560,), "float32"),
    }


def test_states_do_not_get_narrow_with_k_and_v() -> None:
    for dtype in ("int8", "float8_e4m3fn"):
        made = read(JAMBA, dtype=dtype)
        assert made.dtype == dtype
        assert made.state_groups == read(JAMBA).state_groups
    named = {**NEMOTRON_H, "mamba_ssm_cache_dtype": "bfloat16"}
    assert read(named).state_groups[0].arrays["recurrent_states"][1] == "bfloat16"


def test_states_have_the_dtype_of_a_model_that_names_it_outside() -> None:
    text = {key: value for key, value in QWEN_3_NEXT.items() if key != "torch_dtype"}
    whole = {"text_config": text, "torch_dtype": "torch.float32"}
    for dtype in (None, "int8", "bfloat16"):
        arrays = read(whole, dtype=dtype).state_groups[0].arrays
        assert arrays["conv_states"][1] == "float32"
    assert read(text, dtype="float16").state_groups[0].arrays["conv_states"][1] == "float16"
    assert read(text, dtype="int8").state_groups[0].arrays["conv_states"][1] == "bfloat16"


@pytest.mark.parametrize(
    ("config", "shards", "conv", "recurrent"),
    [
        (JAMBA, 8, (1024, 4), (1024, 16)),
        (NEMOTRON_H, 4, (32 * 64 + 2 * 2 * 128, 4), (32, 64, 128)),
        (QWEN_3_NEXT, 2, (16 * 128 + 16 * 128, 4), (16, 128, 128)),
        (KIMI_LINEAR, 4, (3 * 8 * 128, 4), (8, 128, 128)),
        # One group of B and C is copied to both devices.
        (FALCON_H1, 2, (1536 + 2 * 256, 4), (12, 128, 256)),
    ],
)
def test_states_are_spread_over_the_devices_of_a_replica(
    config: dict[str, Any], shards: int, conv: tuple[int, ...], recurrent: tuple[int, ...]
) -> None:
    made = read(config, n_devices=2 * shards, data_parallel_degree=2)
    arrays = made.state_groups[0].arrays
    assert (arrays["conv_states"][0], arrays["recurrent_states"][0]) == (conv, recurrent)


def test_states_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_heads 32 of the recurrent layers .* over 3 tensor"):
        read(KIMI_LINEAR, n_devices=3)
