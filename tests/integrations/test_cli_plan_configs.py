# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan`` on config files: fields without a rule, copies of heads, MTP layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import refused, shown, told
from hf_configs import CONFIGS
from hf_group_configs import LLAMA
from kvcore import KVCacheParams

SIZES = ("--memory", "80GiB", "--max-seq-len", "32k")


# -- fields --------------------------------------------------------------------------------------
def test_plan_prints_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "use_cache": True, "kv_stride": 2}))
    line = refused(capsys, "plan", path, *SIZES)
    assert "kv_stride of the config is 2" in line
    assert "--assume kv_stride" in line
    answer = told(capsys, "plan", path, *SIZES, "--assume", "kv_stride")
    assert answer["fields"]["read"]["num_key_value_heads"] == 8
    assert answer["fields"]["ignored"] == {"use_cache": "how it is run, not what is kept"}
    assert answer["fields"]["assumed"] == ["kv_stride"]
    assert answer["fields"]["defaults"] == {}
    out = " ".join(shown(capsys, "plan", path, *SIZES, "--assume", "kv_stride").split())
    assert "assumed to change nothing: kv_stride" in out
    assert "names 'x'" in refused(capsys, "plan", path, *SIZES, "--assume", "x")


# -- devices and MTP layers ----------------------------------------------------------------------
def test_more_devices_than_heads_have_copies(capsys: pytest.CaptureFixture[str]) -> None:
    one = told(capsys, "plan", "qwen3-235b-a22b", *SIZES)
    assert (one["bytes_per_token"], one["kv_head_copies"]) == (192_512, 1)
    eight = told(capsys, "plan", "qwen3-235b-a22b", *SIZES, "--tp", "8", "--dp", "2")
    # 94 layers, K and V of one head of 128 elements of 2 bytes on each device.
    assert eight["bytes_per_token_per_device"] == 94 * 2 * 1 * 128 * 2
    assert eight["bytes_per_token"] == 8 * eight["bytes_per_token_per_device"]
    assert (eight["n_kv_heads"], eight["kv_head_copies"]) == (4, 2)
    out = " ".join(shown(capsys, "plan", "qwen3-235b-a22b", *SIZES, "--tp", "8").split())
    assert "4 K/V heads of 128, each on 2 devices" in out
    line = refused(capsys, "plan", "qwen3-235b-a22b", *SIZES, "--tp", "6")
    assert "n_kv_heads 4 does not divide over 6" in line
    with pytest.raises(ValueError, match="heads are not replicated"):
        KVCacheParams("bfloat16", 4, 128, 94, n_devices=8)


def test_heads_of_every_group_have_copies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": [4, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = told(capsys, "plan", tmp_path, *SIZES, "--tp", "16")
    assert answer["bytes_per_token_per_device"] == 2 * 2 * 1 * 128 * 2
    latent = told(capsys, "plan", "deepseek-v3", *SIZES, "--tp", "16")
    assert (latent["kv_head_copies"], latent["bytes_per_token_per_device"]) == (1, 61 * 576 * 2)


def test_mtp_layers_are_counted_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-v3"]))
    plain = told(capsys, "plan", tmp_path, *SIZES)
    assert (plain["num_layers"], plain["mtp_layers"]) == (61, 0)
    more = told(capsys, "plan", tmp_path, *SIZES, "--mtp")
    assert (more["num_layers"], more["mtp_layers"]) == (62, 1)
    assert more["bytes_per_token"] == 62 * 576 * 2
    out = " ".join(shown(capsys, "plan", tmp_path, *SIZES, "--mtp").split())
    assert "62 layers, 1 of them MTP" in out
    assert "no number of MTP layers" in refused(capsys, "plan", "llama-3.1-8b", *SIZES, "--mtp")
