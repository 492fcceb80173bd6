# SPDX-License-Identifier: Apache-2.0
"""``kvcore generate`` with models whose layers keep a state: slots, memory and turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown, told
from conftest import require

torch = require("torch")
transformers = require("transformers")

from tiny_model_dir import word_tokenizer, write_folder  # noqa: E402

PROMPTS = [" ".join(f"w{i}" for i in range(1, n)) for n in (40, 44)]
SLOT = 64 * 3 * 4  # of one layer, float32
PAGE = 2 * 4 * 2 * 16 * 4


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stateful")
    write_folder(folder, word_tokenizer(), "lfm2", num_hidden_layers=3)
    return folder


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return told(capsys, "generate", *arguments, "--page-size", 4)


def test_states_say_what_they_hold(capsys: pytest.CaptureFixture[str], stateful: Path) -> None:
    found = generated(capsys, stateful, *PROMPTS, "--max-new-tokens", 6)
    full, state = found["groups"]
    assert (full["kind"], full["layers"], full["bundles"]) == ("full", 1, 1)
    assert state == {
        "kind": "state",
        "layers": 2,
        "keeps": None,
        "bundles": 0,
        "pages": 0,
        "slots": 2,
        "bytes": 2 * 2 * SLOT,
        "given_back": 0,
    }
    assert found["peak_bytes"] == found["peak_used_pages"] * PAGE + state["bytes"]
    assert found["results"][1]["cached_tokens"] == 36  # at the cut of the first prompt
    page_of_docs = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page_of_docs.split("\n## kvcore generate")[1].split("\n## ")[0]
    assert [key for key in state if f"`{key}`" not in section] == []


def test_summary_names_the_states(capsys: pytest.CaptureFixture[str], stateful: Path) -> None:
    out = shown(capsys, "generate", stateful, PROMPTS[0], "--max-new-tokens", 3)
    last = out.splitlines()[-1]
    assert "1.5 KiB of 2 layers with a state in 1 slot; " in last
    assert last.endswith(" without groups")


def test_a_turn_goes_on_from_the_one_before(
    capsys: pytest.CaptureFixture[str], stateful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.readline", lambda: "", raising=False)
    turns = [PROMPTS[0], "w3 w4", "w5"]
    found = generated(capsys, stateful, "--chat", *turns, "--max-new-tokens", 5)
    first, *rest = found["results"]
    assert first["cached_tokens"] == 0
    for before, turn in zip(found["results"], rest, strict=False):
        assert turn["cached_tokens"] == (before["prompt_tokens"] - 1) // 4 * 4


def test_states_count_as_memory(capsys: pytest.CaptureFixture[str], stateful: Path) -> None:
    longest = 12 * PAGE  # 45 tokens
    room = 4 * 2 * SLOT + longest
    one, two = (
        generated(capsys, stateful, *PROMPTS, "--max-new-tokens", 2, "--memory", size)
        for size in (room - 1, room)
    )
    assert (one["pages"], two["pages"]) == (14, 12)  # pages left by the slots of one, and of both
    assert one["results"][0]["token_ids"] == two["results"][0]["token_ids"]
    text = refused(capsys, "generate", stateful, PROMPTS[0], "--memory", 4 * SLOT)
    assert f"and {4 * SLOT} bytes of states" in text


def test_flat_means_nothing_for_states(capsys: pytest.CaptureFixture[str], stateful: Path) -> None:
    text = refused(capsys, "generate", stateful, "w1", "--flat")
    assert "'--flat'" in text
    assert "keep a state" in text
