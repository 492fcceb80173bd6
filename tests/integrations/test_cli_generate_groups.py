# SPDX-License-Identifier: Apache-2.0
"""``kvcore generate`` for models with windows: the pages in use, with groups and flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import shown, told
from conftest import require

torch = require("torch")
transformers = require("transformers")

from tiny_model_dir import word_tokenizer, write_folder  # noqa: E402

PROMPT = " ".join(f"w{i}" for i in range(1, 60))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    write_folder(folder, word_tokenizer(), "gemma3", num_hidden_layers=4, layer_types=kinds)
    return folder


@pytest.fixture
def short_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.apps.cli.generate._MOST_WINDOWED", 16)


@pytest.mark.usefixtures("short_forwards")
def test_groups_say_what_they_hold(capsys: pytest.CaptureFixture[str], windowed: Path) -> None:
    options = (windowed, PROMPT, "--page-size", 4, "--max-new-tokens", 20)
    grouped, flat = told(capsys, "generate", *options), told(capsys, "generate", *options, "--flat")
    assert grouped["results"] == flat["results"]
    page = 2 * 4 * 2 * 12 * 4  # K and V of a layer, float32
    full, window = grouped["groups"]
    assert full == {
        "kind": "full",
        "layers": 1,
        "keeps": None,
        "bundles": 1,
        "pages": 15,  # for the prompt, whose chunks need the most
        "bytes": 15 * page,
        "given_back": 0,
    }
    kind = (window["kind"], window["layers"], window["keeps"], window["bundles"])
    assert kind == ("window", 3, 7, 3)
    assert window["pages"] <= 3 * 7  # 6 + 16 tokens each
    assert window["given_back"] == 3 * 18
    assert grouped["flat_bytes"] == flat["flat_bytes"] == flat["peak_bytes"] == 20 * 4 * page
    assert flat["groups"] == []
    page_of_docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page_of_docs.split("\n## kvcore generate")[1].split("\n## ")[0]
    assert [key for key in full if f"`{key}`" not in section] == []
    assert flat["peak_bytes"] > 1.8 * grouped["peak_bytes"] >= full["bytes"] + window["bytes"]


def test_summary_names_the_groups(capsys: pytest.CaptureFixture[str], windowed: Path) -> None:
    last = shown(capsys, "generate", windowed, PROMPT, "--page-size", 4).splitlines()[-1]
    assert "of 1 layer full, " in last
    assert "of 3 layers with a window of 7; " in last
    assert last.endswith(" without groups")


@pytest.mark.slow
@pytest.mark.usefixtures("short_forwards")
def test_a_conversation_goes_on_behind_its_windows(
    capsys: pytest.CaptureFixture[str], windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.readline", lambda: "", raising=False)
    turns = [PROMPT, "w3 w4", "w5"]
    options = (windowed, "--chat", *turns, "--page-size", 4, "--max-new-tokens", 8)
    grouped, flat = told(capsys, "generate", *options), told(capsys, "generate", *options, "--flat")
    assert grouped["results"] != []
    for own, its in zip(grouped["results"], flat["results"], strict=True):
        assert own["token_ids"] == its["token_ids"]
        assert its["cached_tokens"] - own["cached_tokens"] < 2 * 4
    assert grouped["flat_bytes"] > 1.5 * grouped["peak_bytes"]
