# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls, where vLLM is not installed; run_vllm.py tests the rest."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from kvcore.integrations.vllm import register


def test_vllm_finds_the_entry_point() -> None:
    (found,) = [
        each for each in entry_points(group="vllm.general_plugins") if each.name == "kvcore"
    ]
    assert found.load() is register


def test_nothing_is_imported_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCORE_VLLM", raising=False)
    register()
    assert "vllm" not in sys.modules


def test_another_release_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ModuleType("vllm")
    other.__version__ = "0.32.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setenv("KVCORE_VLLM", "1")
    with caplog.at_level(logging.WARNING):
        register()
    (said,) = caplog.messages
    assert said == (
        "KVCORE_VLLM=1, but kvcore serves vLLM 0.33.x and this is 0.32.1: "
        "vLLM keeps its own manager"
    )
