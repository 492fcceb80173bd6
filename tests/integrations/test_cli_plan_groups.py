# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan`` for models in which some layers do not keep every token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown, told
from hf_configs import CONFIGS
from kvcore.apps.cli.presets import PRESETS
from kvcore.groups import bundles
from kvcore.sizing import infer_optimal_batch_size

GIB = 1 << 30
GROUP_KEYS = {
    "max_chunk_tokens",
    "layers_per_page",
    "shared_layers",
    "bytes_per_state_slot",
    "pages_per_sequence",
    "groups",
    "bytes_per_sequence",
    "flat_bytes_per_sequence",
    "flat_batch",
}


SIZES = ("--memory", "24GiB", "--max-seq-len", "128k")


def plan_json(capsys: pytest.CaptureFixture[str], model: str, *rest: str) -> dict[str, Any]:
    return told(capsys, "plan", model, *SIZES, *rest)


# -- by hand -------------------------------------------------------------------------------------
def test_gemma_3_27b_serves_two_where_flat_serves_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = plan_json(capsys, "gemma-3-27b")
    # 10 full and 52 sliding layers, 5 a page: 2 * 5 * 16 tokens * 16 heads * 128 * 2 bytes
    # = 655,360; 24 GiB // 655,360 = 39,321 pages. 128k tokens are 8,192 pages in each of 2 full
    # bundles, and ceil((1,023 + 2,048) / 16) + 1 = 193 in each of 11 sliding ones: 18,507.
    assert (answer["layers_per_page"], answer["bytes_per_page"]) == (5, 655_360)
    assert answer["pages"] == 39_321
    assert answer["pages_per_sequence"] == 2 * 8_192 + 11 * 193 == 18_507
    assert answer["groups"] == [
        {
            "kind": "full",
            "layers": 10,
            "keeps": None,
            "page_size": 16,
            "bundles": 2,
            "pages_per_sequence": 16_384,
        },
        {
            "kind": "window",
            "layers": 52,
            "keeps": 1024,
            "page_size": 16,
            "bundles": 11,
            "pages_per_sequence": 2_123,
        },
    ]
    assert [answer["batch"], *(each["batch"] for each in answer["quantised"])] == [2, 4, 4]
    assert answer["flat_batch"] == 0
    assert answer["tokens"] == 39_321 * 131_072 // 18_507
    # 2 bundles of n pages and 193 for each of 11: (39,321 - 2,123) // 2 = 18,599 pages.
    assert answer["longest_sequence"] == 18_599 * 16
    assert answer["bytes_per_sequence"] == 18_507 * 655_360
    assert answer["flat_bytes_per_sequence"] == 131_072 * 507_904


def test_gpt_oss_has_a_window_in_every_other_layer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "gpt-oss-120b")
    # 2 * 18 * 16 * 8 * 64 * 2 = 589,824 bytes; 43,690 pages; 8,192 + ceil(2,175 / 16) + 1 = 8,329.
    assert (answer["layers_per_page"], answer["bytes_per_page"]) == (18, 589_824)
    assert (answer["pages"], answer["pages_per_sequence"]) == (43_690, 8_329)
    assert (answer["batch"], answer["flat_batch"]) == (5, 2)


def test_states_take_their_share_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_json(capsys, "qwen3-next-80b-a3b")
    # 36 layers: (2 * 16 * 128 + 32 * 128) * 4 * 2 bytes, and 32 * 128 * 128 * 4 bytes.
    slot = 36 * (8_192 * 4 * 2 + 32 * 128 * 128 * 4)
    assert answer["bytes_per_state_slot"] == slot == 77_856_768
    # A page of 12 layers has 2 * 12 * 16 * 2 * 256 * 2 = 393,216 bytes: 8,192 of them and two slots
    # fit 7 times.
    each = 8_192 * 393_216 + 2 * slot
    assert answer["bytes_per_sequence"] == each
    assert (answer["batch"], answer["flat_batch"]) == (24 * GIB // each, 2) == (7, 2)
    assert answer["pages"] == (24 * GIB - 14 * slot) // 393_216
    assert answer["groups"][1] == {
        "kind": "state",
        "layers": 36,
        "keeps": None,
        "bytes_per_slot": slot,
    }


def test_states_are_spread_over_devices_and_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    one = plan_json(capsys, "qwen3-next-80b-a3b")
    four = plan_json(capsys, "qwen3-next-80b-a3b", "--tp", "2", "--dp", "2")
    assert four["bytes_per_state_slot"] == one["bytes_per_state_slot"]
    assert four["bytes_per_sequence"] == one["bytes_per_sequence"]
    assert four["batch"] == 2 * (12 * GIB // one["bytes_per_sequence"]) == 6


def test_chunks_of_a_prompt_need_room_in_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    for chunk, pages in ((2_048, 193), (16, 66), (131_072, 8_192)):
        answer = plan_json(capsys, "gemma-3-27b", "--max-chunk-tokens", str(chunk))
        assert answer["max_chunk_tokens"] == chunk
        assert answer["pages_per_sequence"] == 2 * 8_192 + 11 * pages


def test_model_with_windows_alone_has_no_longest_sequence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = plan_json(capsys, "mistral-7b-v0.1")
    assert answer["longest_sequence"] == 2**31 - 16
    assert (answer["batch"], answer["flat_batch"]) == (31, 1)


def test_config_file_is_read_with_its_groups(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma-3-4b"]))
    answer = plan_json(capsys, str(tmp_path))
    assert [group["layers"] for group in answer["groups"]] == [5, 29]
    assert answer["groups"][1]["keeps"] == 1024


# -- the output ----------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", PRESETS)
def test_plan_of_every_preset_is_what_its_groups_say(
    capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    answer = plan_json(capsys, preset)
    params = PRESETS[preset].params(16, groups=True)
    assert answer["bytes_per_page"] == params.bytes_per_page
    assert answer["batch"] == infer_optimal_batch_size(params, 131_072, 24 * GIB)
    if params.groups is None:
        assert not GROUP_KEYS & answer.keys()
        assert answer == plan_json(capsys, preset, "--flat")
        return
    assert answer.keys() >= GROUP_KEYS
    assert answer["bytes_per_sequence"] < answer["flat_bytes_per_sequence"]
    told = [group["bundles"] for group in answer["groups"] if group["kind"] != "state"]
    assert sum(told) == len(bundles(params))
    assert answer["layers_per_page"] == params.layers_per_page


@pytest.mark.parametrize("preset", ["gemma-3-27b", "gpt-oss-20b", "llama-4-scout"])
def test_flat_plan_has_neither_groups_nor_their_savings(
    capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    flat, grouped = plan_json(capsys, preset, "--flat"), plan_json(capsys, preset)
    assert not GROUP_KEYS & flat.keys()
    assert flat["batch"] == grouped["flat_batch"]
    assert flat["bytes_per_token"] == grouped["bytes_per_token"]


def cells(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]


def test_table_shows_what_groups_save_and_hold(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "plan", "gemma-3-27b", *SIZES)
    for row in (
        ["sequences of 131,072", "2", "4", "4"],
        ["without groups", "0", "0", "0"],
        ["bytes per sequence", "11.3 GiB", "5.82 GiB", "5.82 GiB"],
        ["without groups", "62 GiB", "31.97 GiB", "31.97 GiB"],
        ["10", "all tokens", "2", "16,384"],
        ["52", "a window of 1,024", "11", "2,123"],
    ):
        assert row in cells(out)
    assert "pages are shared by up to 5 layers" in out


def test_table_shows_states_chunks_and_shared_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert ["28", "a state of 15.75 MiB", "", ""] in cells(
        shown(capsys, "plan", "jamba-1.5-mini", *SIZES)
    )
    assert ["36", "a chunk of 8,192", "3", "1,920"] in cells(
        shown(capsys, "plan", "llama-4-scout", *SIZES)
    )
    out = " ".join(shown(capsys, "plan", "gemma-3n-e4b", *SIZES).split())
    assert "15 more layers read the K and V of others" in out


# -- bad input -----------------------------------------------------------------------------------
def test_flat_plan_of_a_model_with_states_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recurrent state" in refused(capsys, "plan", "jamba-1.5-mini", *SIZES, "--flat")


def test_states_that_do_not_divide_name_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", "kimi-linear-48b-a3b", *SIZES, "--tp", "3")
    assert "--tp" in line
    assert "num_heads 32" in line


def test_chunk_of_no_token_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-chunk-tokens" in refused(
        capsys, "plan", "gemma-3-27b", *SIZES, "--max-chunk-tokens", "0"
    )
