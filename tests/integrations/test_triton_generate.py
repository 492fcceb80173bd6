# SPDX-License-Identifier: Apache-2.0
"""``kvcore generate --device cuda:N``: a tiny model from a folder, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, told
from conftest import require
from cuda_machine import Machine, require_emulation
from triton_interpreter import require_interpreter

torch = require("torch")
require("transformers")
require("typer")
require_interpreter()
require_emulation()

from emulated_tensors import INDEX, counted_as_gpu  # noqa: E402
from kvcore import Device  # noqa: E402
from kvcore.apps.cli import local_model  # noqa: E402
from tiny_model_dir import word_tokenizer, write_folder  # noqa: E402

ASKED = ("w1 w2 w3 w4 w5 w6 w7", "w1 w2", "--max-new-tokens", 3, "--page-size", 4)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_folder(folder, word_tokenizer())
    return folder


def test_tokens_are_those_of_the_cpu(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Path,
) -> None:
    expected = told(capsys, "generate", words, *ASKED)
    moved: list[Device] = []

    def noted(model: Any, device: Device) -> Any:
        moved.append(device)
        return model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(local_model, "_moved", noted)
    with counted_as_gpu(machine):
        found = told(capsys, "generate", words, *ASKED, "--device", f"cuda:{INDEX}")
    assert moved == [Device("cuda", INDEX)]
    assert (expected["device"], found["device"]) == ("cpu", f"cuda:{INDEX}")
    assert found["results"] == expected["results"]


@pytest.mark.usefixtures("machine")
def test_a_torch_without_gpus_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], words: Path
) -> None:
    line = refused(capsys, "generate", words, "w1", "--device", "cuda:0", code=1)
    assert "finds no GPU for --device cuda:0; install torch with CUDA" in line


@pytest.mark.usefixtures("machine")
def test_a_gpu_that_is_not_there_is_bad_input(
    capsys: pytest.CaptureFixture[str], words: Path
) -> None:
    line = refused(capsys, "generate", words, "w1", "--device", "cuda:7")
    assert "'--device': expected an index below 2, got 7: there are 2 GPUs" in line
