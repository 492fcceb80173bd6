# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan --weights``: a size, an index, files; weights that do not fit; bad indexes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown, told

GIB = 1 << 30
PLAN = ("plan", "llama-3.1-8b", "--max-seq-len", "8k")


def write_index(folder: Path, index: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index), encoding="utf-8")
    return path


def same_as(capsys: pytest.CaptureFixture[str], answer: dict[str, Any], memory: str) -> bool:
    """Check that the rest of a plan is the plan of the memory that is left."""
    rest = told(capsys, *PLAN, "--memory", memory)
    return rest == {k: v for k, v in answer.items() if k not in ("weights", "kv_memory")} | {
        "memory": rest["memory"]
    }


def test_a_size_is_subtracted(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, *PLAN, "--memory", "80GiB", "--weights", "16GiB")
    assert (answer["memory"], answer["weights"]) == (80 * GIB, 16 * GIB)
    assert answer["kv_memory"] == 64 * GIB
    assert answer["pages"] == 32_768  # 64 GiB / 2 MiB
    assert same_as(capsys, answer, "64GiB")
    out = shown(capsys, *PLAN, "--memory", "80GiB", "--weights", "16GiB")
    assert "80 GiB on 1 device" in out
    assert "64 GiB for K and V after 16 GiB of weights" in " ".join(out.split())


def test_each_replica_has_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    sized = ("--memory", "80GiB", "--weights", "16GiB")
    assert told(capsys, *PLAN, *sized, "--dp", "2")["kv_memory"] == 48 * GIB
    assert told(capsys, *PLAN, *sized, "--tp", "2")["kv_memory"] == 64 * GIB


def test_an_index_gives_the_total(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for total in (15 * GIB, 15.0 * GIB):
        path = write_index(tmp_path, {"metadata": {"total_size": total}, "weight_map": {}})
        for given in (tmp_path, path):
            answer = told(capsys, *PLAN, "--memory", "80GiB", "--weights", given)
            assert (answer["weights"], answer["kv_memory"]) == (15 * GIB, 65 * GIB)


def test_without_a_total_the_files_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_index(tmp_path, {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2"}})
    (tmp_path / "1.safetensors").write_bytes(bytes(700))
    (tmp_path / "2").write_bytes(bytes(24))
    answer = told(capsys, *PLAN, "--memory", "80GiB", "--weights", tmp_path)
    assert answer["weights"] == 724


def test_a_single_file_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    assert told(capsys, *PLAN, "--memory", "80GiB", "--weights", tmp_path)["weights"] == 4096


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected metadata.total_size or a weight_map"),
        ({"weight_map": {}}, "expected metadata.total_size or a weight_map"),
        ({"metadata": {"total_size": -5}}, "metadata.total_size is '-5'; expected a number"),
        ({"metadata": {"total_size": True}}, "metadata.total_size is 'True'; expected a number"),
        ({"metadata": {"total_size": "9"}}, "metadata.total_size is '9'; expected a number"),
        ({"weight_map": {"a": "none"}}, "'none' is not in the folder"),
        ({"weight_map": {"a": "../secret"}}, "'../secret' is not in the folder"),
        ({"metadata": {"total_size": 90 * GIB}}, "90 GiB of weights on each of 1 replicas do not"),
    ],
)
def test_bad_index_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, index: Any, told: str
) -> None:
    (tmp_path.parent / "secret").write_text("x")
    write_index(tmp_path, index)
    line = refused(capsys, *PLAN, "--memory", "80GiB", "--weights", tmp_path)
    assert told in line
    assert "'--weights'" in line


@pytest.mark.parametrize("weights", ["", "no/such/folder", "16XB", "x" * 5000])
def test_no_size_and_no_path_is_one_line(capsys: pytest.CaptureFixture[str], weights: str) -> None:
    line = refused(capsys, *PLAN, "--memory", "80GiB", "--weights", weights)
    assert "'--weights'" in line
    assert len(line) < 500


def test_a_folder_without_weights_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = refused(capsys, *PLAN, "--memory", "80GiB", "--weights", tmp_path)
    assert "expected model.safetensors.index.json or model.safetensors in the folder" in line
