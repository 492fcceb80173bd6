# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay`` as the command line runs it: what it prints, and how bad input ends it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcore.cli.main import main

__all__ = ["refused", "replay_json"]


def replay_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a replay; return the one object that it prints."""
    assert main(["replay", *arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.count("\n") == 1
    answer: dict[str, Any] = json.loads(shown.out)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that bad input ends with."""
    assert main(["replay", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err
