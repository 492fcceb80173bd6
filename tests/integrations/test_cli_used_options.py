# SPDX-License-Identifier: Apache-2.0
"""The command line reports an option if and only if the option has no effect on the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, shown, told
from kvcore.apps.cli import replay
from kvcore.apps.cli.main import main

POOL = ("--limit", "60", "--pages", "300")
STATES = ("--limit", "60", "--model", "qwen3-next-80b-a3b", "--memory", "4GiB")
ADMISSION = ("--mode", "admission")

REPLAYS = {
    "online": POOL,
    "admission": (*POOL, *ADMISSION),
    "comparison": ("--limit", "60", "--pages", "200,300"),
    "router": (*POOL, "--replicas", "2", "--route", "prefix+load,least-loaded"),
    "advice": (*POOL, "--advice"),
    "hinted": ("--limit", "60", "--pages", "150", "--policy", "lru,hinted"),
    "windows": ("--limit", "60", "--model", "gemma-3-27b", "--pages", "4000", *ADMISSION),
    "states": (*STATES, *ADMISSION),
    "states, online": STATES,
    "slots": (*STATES, *ADMISSION, "--state-slots", "40"),
    "groups": ("--limit", "60", "--groups", "gemma-3-27b", "--pages", "300"),
}
OPTIONS = {
    "--hints": "exact",
    "--concurrency": "3",
    "--prefill-rate": "500",
    "--decode-rate": "9",
    "--decode-steps": "4",
    "--chunk": "48",
    "--advice-sample": "2",
    "--prefill-speed": "500",
}
TIMED = re.compile("seconds$|_ns$|_us_|per_second|seconds_per|speed$")


def without_times(answer: Any) -> Any:
    """Return an answer without times and without the value of the option --prefill-speed."""
    if isinstance(answer, dict):
        return {
            name: without_times(value)
            for name, value in answer.items()
            if name == "saved_seconds" or not TIMED.search(name)
        }
    return [*map(without_times, answer)] if isinstance(answer, list) else answer


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", REPLAYS)
def test_an_option_is_reported_if_it_changes_no_result(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, Any],
    name: str,
    option: str,
) -> None:
    arguments = ("replay", *REPLAYS[name])
    if name not in answers:
        answers[name] = without_times(told(capsys, *arguments))
    given = (*arguments, option, OPTIONS[option])
    code = main([*given, "--json"])
    captured = capsys.readouterr()
    if code:
        assert captured.err.startswith(f"kvcore: error: Invalid value for '{option}': expected ")
        assert captured.err.endswith(f"; otherwise {option} has no effect\n")
        monkeypatch.setattr(replay, "require_used", lambda *_: None)
        assert without_times(told(capsys, *given)) == answers[name]
    else:
        is_equal = without_times(json.loads(captured.out)) == answers[name]
        warning = f"kvcore: warning: {option} has no effect: expected "
        assert is_equal == captured.err.startswith(warning)


def write_rows(path: Path, **more: Any) -> None:
    row = {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1], **more}
    path.write_text(f"{json.dumps(row)}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--format", "azure"),
        ("--block-size", "16"),
        ("--time-unit", "ms"),
        ("--tokenizer", "gpt2"),
        ("--prefix-share", ".5"),
    ],
)
def test_options_of_a_trace_need_a_trace(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    error = refused(capsys, "replay", option, value)
    assert f"'{option}': expected a TRACE; otherwise {option} has no effect" in error


def test_a_seed_for_a_trace_has_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    write_rows(path)
    arguments = ["replay", str(path), "--block-size", "64"]
    for more, warning in {
        (): "",
        ("--seed", "0"): "kvcore: warning: --seed has no effect: expected no TRACE, for generated "
        "chats\n",
    }.items():
        assert main([*arguments, *more]) == 0
        assert capsys.readouterr().err == warning


def test_hints_need_sessions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    hinted = ("replay", path, "--block-size", "64", "--policy", "hinted")
    line = "no request has a session: the policy hinted gets no hints"
    write_rows(path)
    assert line in shown(capsys, *hinted).splitlines()
    error = refused(capsys, *hinted, "--hints", "exact")
    assert "'--hints': expected a TRACE with sessions; otherwise --hints has no effect" in error
    write_rows(path, session_id=1)
    assert line not in shown(capsys, *hinted, "--hints", "exact")


def test_a_router_needs_two_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *POOL, "--route", "prefix"]) == 0
    warning = "kvcore: warning: --route has no effect: expected --replicas of at least 2\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    "model",
    [
        ("llama-3.1-8b",),
        ("llama-3.1-8b", "--flat"),
        ("qwen3-next-80b-a3b",),
        ("gemma-3-27b",),
        ("gemma-3-27b", "--flat"),
    ],
    ids=" ".join,
)
def test_a_plan_without_windows_has_no_chunk(
    capsys: pytest.CaptureFixture[str], model: tuple[str, ...]
) -> None:
    has_windows = model == ("gemma-3-27b",)
    command = ("plan", *model, "--memory", "80GiB", "--max-seq-len", "32k")
    plain = told(capsys, *command)
    plain.pop("max_chunk_tokens", None)
    assert main([*command, "--max-chunk-tokens", "512", "--json"]) == 0
    captured = capsys.readouterr()
    chunked = json.loads(captured.out)
    chunked.pop("max_chunk_tokens", None)
    assert (chunked != plain) == has_windows
    warning = "kvcore: warning: --max-chunk-tokens has no effect: expected a model with windows"
    assert captured.err.startswith(warning) != has_windows
