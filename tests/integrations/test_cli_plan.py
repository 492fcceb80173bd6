# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan`` against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown, told
from hf_configs import CONFIGS
from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.apps.cli.presets import PRESETS

GIB = 1 << 30
MODEL_KEYS = {
    "num_layers": int,
    "n_kv_heads": int,
    "head_dim": int,
    "is_mla": bool,
    "page_size": int,
    "tensor_parallel_degree": int,
    "data_parallel_degree": int,
    "memory": int,
    "max_seq_len": int,
    "kv_head_copies": int,
    "bytes_per_token_per_device": int,
    "mtp_layers": int,
    "fields": dict,
}
PAGE_KEYS = {
    "dtype": str,
    "bytes_per_token": int,
    "bytes_per_page": int,
    "pages": int,
    "total_pages": int,
    "tokens": int,
    "batch": int,
    "longest_sequence": int,
}


def plan_json(
    capsys: pytest.CaptureFixture[str],
    model: str,
    *rest: str,
    memory: str = "80GiB",
    max_seq_len: str = "32k",
) -> dict[str, Any]:
    sizes = ("--memory", memory, "--max-seq-len", max_seq_len)
    return told(capsys, "plan", model, *sizes, *rest)


def numbers(pages: dict[str, Any]) -> list[Any]:
    return [pages[name] for name in PAGE_KEYS]


# -- by hand -------------------------------------------------------------------------------------
def test_grouped_heads_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "llama-3.1-8b")
    # 2 (K, V) * 32 layers * 8 heads * 128 elements * 2 bytes = 131,072 bytes a token, 2 MiB a page
    # of 16. 80 GiB / 2 MiB = 40,960 pages = 655,360 tokens. 32k tokens are 2,048 pages:
    # 40,960 / 2,048 = 20 sequences.
    own = ["bfloat16", 131_072, 2_097_152, 40_960, 40_960, 655_360, 20, 655_360]
    assert numbers(answer) == own
    assert answer["kv_scale_granularity"] is None
    # One byte per element and 4 bytes per head: 2 * 32 * 8 * (128 + 4) = 67,584; * 16 = 1,081,344;
    # 85,899,345,920 // 1,081,344 = 79,437 pages = 1,270,992 tokens; // 2,048 = 38 sequences.
    narrow = [67_584, 1_081_344, 79_437, 79_437, 1_270_992, 38, 1_270_992]
    assert [numbers(pages) for pages in answer["quantised"]] == [
        ["float8_e4m3fn", *narrow],
        ["int8", *narrow],
    ]
    assert [pages["kv_scale_granularity"] for pages in answer["quantised"]] == [128, 128]


def test_latent_rows_on_replicas_of_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "deepseek-v3", "--tp", "2", "--dp", "4", "--page-size", "64")
    # 61 layers * 576 elements * 2 bytes = 70,272 bytes a token, on both devices of a replica:
    # 140,544; * 64 = 8,994,816 a page. 80 GiB / 4 = 21,474,836,480 a replica;
    # // 8,994,816 = 2,387 pages (9,548 in all, 611,072 tokens; 152,768 in one replica).
    # 32k tokens are 512 pages: 2,387 // 512 = 4 sequences a replica, 16 in all.
    own = ["bfloat16", 140_544, 8_994_816, 2_387, 9_548, 611_072, 16, 152_768]
    assert numbers(answer) == own
    # One scale a row: 61 * (576 + 4) * 2 = 70,760; * 64 = 4,528,640; 21,474,836,480 // 4,528,640
    # = 4,742 pages (18,968; 1,213,952 tokens; 303,488 in one replica); // 512 = 9, 36 in all.
    narrow = ["int8", 70_760, 4_528_640, 4_742, 18_968, 1_213_952, 36, 303_488]
    assert numbers(answer["quantised"][1]) == narrow


def test_config_file_of_one_head_in_another_dtype(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["starcoder"]))
    rest = ("--dtype", "float16", "--page-size", "7")
    answer = plan_json(capsys, str(tmp_path), *rest, memory="1GB", max_seq_len="8000")
    # 2 * 40 layers * 1 head * 128 elements * 2 bytes = 20,480 bytes a token, 143,360 a page of 7.
    # 1,000,000,000 // 143,360 = 6,975 pages = 48,825 tokens. 8,000 tokens are 1,143 pages:
    # 6,975 // 1,143 = 6 sequences.
    own = ["float16", 20_480, 143_360, 6_975, 6_975, 48_825, 6, 48_825]
    assert numbers(answer) == own
    # 2 * 40 * (128 + 4) = 10,560; * 7 = 73,920; 1,000,000,000 // 73,920 = 13,528 pages
    # = 94,696 tokens; // 1,143 = 11 sequences.
    narrow = ["float8_e4m3fn", 10_560, 73_920, 13_528, 13_528, 94_696, 11, 94_696]
    assert numbers(answer["quantised"][0]) == narrow


# -- the output ----------------------------------------------------------------------------------
def test_json_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "qwen3-8b", "--tp", "2")
    for name, kind in (MODEL_KEYS | PAGE_KEYS).items():
        assert type(answer[name]) is kind, name
    assert answer["model"] == "qwen3-8b"
    assert (answer["memory"], answer["max_seq_len"]) == (80 * GIB, 32_768)
    assert (answer["tensor_parallel_degree"], answer["data_parallel_degree"]) == (2, 1)
    assert answer["v_head_dim"] is None
    for pages in answer["quantised"]:
        assert pages.keys() == {*PAGE_KEYS, "kv_scale_granularity"}
        assert all(type(pages[name]) is kind for name, kind in PAGE_KEYS.items())
    assert answer.keys() == {
        *MODEL_KEYS,
        *PAGE_KEYS,
        "model",
        "v_head_dim",
        "kv_scale_granularity",
        "quantised",
    }


def test_table_shows_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "plan", "llama-3.1-8b", "--memory", "80GiB", "--max-seq-len", "32k")
    assert "llama-3.1-8b: 32 layers, 8 K/V heads of 128; 80 GiB on 1 device" in out
    for words in (
        ["bytes per token", "131,072", "67,584", "67,584"],
        ["page of 16 tokens", "2 MiB", "1.03 MiB", "1.03 MiB"],
        ["pages", "40,960", "79,437", "79,437"],
        ["tokens", "655,360", "1,270,992", "1,270,992"],
        ["sequences of 32,768", "20", "38", "38"],
        ["longest sequence", "655,360", "1,270,992", "1,270,992"],
        ["tokens / first column", "1.00 x", "1.94 x", "1.94 x"],
    ):
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
        assert words in cells
    assert "weights" in out


def test_table_tells_replicas_and_latent_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--memory", "80GiB", "--max-seq-len", "32k")
    out = shown(capsys, "plan", "kimi-k2", *sizes, "--tp", "2", "--dp", "4")
    assert "a latent row of 576; 80 GiB on 8 devices, 4 replicas" in " ".join(out.split())
    assert "pages per replica" in out


def test_title_is_the_model_as_it_was_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "[red]").mkdir()
    (tmp_path / "[red]" / "config.json").write_text(json.dumps(CONFIGS["qwen3-32b"]))
    monkeypatch.chdir(tmp_path)
    out = shown(capsys, "plan", "[red]", "--memory", "80GiB", "--max-seq-len", "32k")
    assert out.startswith("[red]: 64 layers")


def test_sequences_that_do_not_fit_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "llama-3.1-8b", memory="1GiB", max_seq_len="128k")
    assert (answer["batch"], answer["longest_sequence"]) == (0, 8_192)


@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if not PRESETS[name].params(16, groups=True).state_groups]
)
def test_flat_plan_of_a_preset_is_what_the_manager_does(
    capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    answer = plan_json(capsys, preset, "--flat", memory="16GiB")
    shape = PRESETS[preset]
    params = KVCacheParams(
        dtype=shape.dtype,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_layers=shape.layers,
        is_mla=shape.is_mla,
        page_size=16,
    )
    manager = PagedKVCacheManager(params, 1, 1024, available_cache_memory=16 * GIB, blocks=None)
    assert answer["pages"] == manager.total_num_pages
    assert answer["bytes_per_page"] == params.bytes_per_page


@pytest.mark.parametrize("name", ["gemma-3-27b", "llama-3.1-70b", "qwen3-32b", "deepseek-v3"])
def test_presets_name_public_models(name: str) -> None:
    assert name in PRESETS
    assert len(PRESETS) >= 12


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-32b", "gpt-oss-20b", "deepseek-v3"])
def test_preset_is_its_config(name: str) -> None:
    made = KVCacheParams.from_hf_config(CONFIGS[name], "bfloat16", page_size=16)
    assert PRESETS[name].params(16) == made


# -- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "llama-9"}, ["CONFIG|PRESET", "'llama-9'", "llama-3.1-8b"]),
        ({"--memory": "80G"}, ["--memory", "80G", "80GiB"]),
        ({"--memory": "1MiB"}, ["--memory", "2097152", "1048576"]),
        ({"--memory": "0"}, ["--memory"]),
        ({"--max-seq-len": "32kB"}, ["--max-seq-len", "32kB", "32k"]),
        ({"--max-seq-len": "0"}, ["--max-seq-len"]),
        ({"--tp": "3"}, ["--tp", "n_kv_heads 8", "3"]),
        ({"--tp": "0"}, ["--tp", "1 to"]),
        ({"--tp": "two"}, ["--tp", "integer"]),
        ({"--dp": "-1"}, ["--dp", "-1"]),
        ({"--dp": "100000"}, ["--memory", "100000 replicas"]),
        ({"--page-size": "0"}, ["--page-size"]),
        ({"--dtype": "float64"}, ["--dtype", "float64", "bfloat16"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], changed: dict[str, str], words: list[str]
) -> None:
    given = {"model": "llama-3.1-8b", "--memory": "80GiB", "--max-seq-len": "32k"} | changed
    model = given.pop("model")
    line = refused(capsys, "plan", model, *(word for pair in given.items() for word in pair))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("missing", ["model", "--memory", "--max-seq-len"])
def test_what_must_be_given_is_named(capsys: pytest.CaptureFixture[str], missing: str) -> None:
    given = {"--memory": "80GiB", "--max-seq-len": "32k"}
    model = [] if missing == "model" else ["llama-3.1-8b"]
    given.pop(missing, None)
    line = refused(capsys, "plan", *model, *(word for pair in given.items() for word in pair))
    assert (missing if model else "CONFIG|PRESET") in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON"]),
        ("{}", ["num_hidden_layers"]),
        (json.dumps(CONFIGS["gpt2"]), ["no dtype"]),
        (json.dumps({**CONFIGS["qwen3-32b"], "head_dim": "128"}), ["head_dim", "'128'"]),
    ],
)
def test_broken_config_is_named_with_its_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    line = refused(capsys, "plan", str(path), "--memory", "80GiB", "--max-seq-len", "32k")
    assert line.count(str(path)) == 1
    assert all(word in line for word in words), line


def test_help_says_what_the_memory_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "plan", "--help").split())
    assert "For K and V, over all devices" in text
    assert "weights" in text
    assert "32k (32,768)" in text
    assert "Example: kvcore plan llama-3.1-70b --memory" in text
