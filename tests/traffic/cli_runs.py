# SPDX-License-Identifier: Apache-2.0
"""Runs of the command line in a test: the printed text, and the end on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.apps.cli.main import main

__all__ = ["refused", "shown", "told", "write_windowed_config"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that succeeds; return its output."""
    code = main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with ``--json``; return the one object that it prints."""
    out = shown(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Run a command that exits with `code` and prints one line; return the line."""
    assert main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvcore: error: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) > len("kvcore: error: \n")
    return captured.err


def write_windowed_config(folder: Path) -> None:
    """Write the config.json of a small model whose layers have a window of 512 tokens."""
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 512,
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
