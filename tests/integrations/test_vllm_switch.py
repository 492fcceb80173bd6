# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls, tested without vLLM; run_vllm.py tests the rest."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from kvcore.integrations.vllm import SERVED_VERSIONS, register


def test_vllm_finds_the_entry_point() -> None:
    (found,) = [
        each for each in entry_points(group="vllm.general_plugins") if each.name == "kvcore"
    ]
    assert found.load() is register


def test_nothing_is_imported_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCORE_VLLM", raising=False)
    register()
    assert "vllm" not in sys.modules


def stub_vllm(monkeypatch: pytest.MonkeyPatch, version: str, word: str = "1") -> None:
    """Install a stub of vLLM that has only its version."""
    other = ModuleType("vllm")
    other.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setenv("KVCORE_VLLM", word)


@pytest.mark.parametrize(
    "version", ["0.33.1", "0.33.0rc1", "0.33.0.post1", "0.33.0.dev7+gabc", "0.34.0", "0.33", "1.0"]
)
def test_another_release_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line; processes that this process starts do not repeat it."""
    stub_vllm(monkeypatch, version)
    with caplog.at_level(logging.INFO):
        register()
        register()
    assert caplog.messages == [
        f"KV cache manager: vLLM's own, not kvcore's: kvcore serves vLLM "
        f"{' and '.join(SERVED_VERSIONS)}, and this is {version}"
    ]
    assert os.environ["KVCORE_VLLM"] == "0"


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cpu", "0.33.0+cu129"])
def test_a_release_without_what_the_adapter_reads_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every build of a release is served; if its modules differ, vLLM uses its own manager."""
    stub_vllm(monkeypatch, version)
    with caplog.at_level(logging.INFO):
        register()
    (line,) = caplog.messages
    assert line.startswith(
        "KV cache manager: vLLM's own, not kvcore's: kvcore failed with ModuleNotFoundError: "
    )


@pytest.mark.parametrize("word", ["1", "true", "True", "ON", "yes", " 1 "])
def test_the_usual_words_switch_it_on(
    word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub_vllm(monkeypatch, "0.1.0", word)
    register()
    assert "and this is 0.1.0" in caplog.text


@pytest.mark.parametrize("word", ["0", "false", "Off", "NO", ""])
def test_the_usual_words_switch_it_off(
    word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub_vllm(monkeypatch, "0.1.0", word)
    register()
    assert caplog.messages == []


@pytest.mark.parametrize("word", ["2", "yes please", "kvcore", "-1"])
def test_any_other_word_is_refused(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_vllm(monkeypatch, "0.33.0", word)
    with pytest.raises(ValueError, match=f"KVCORE_VLLM is '{word}', must be one of 1, true, on"):
        register()
