# SPDX-License-Identifier: Apache-2.0
"""The options of a reader: each changes the requests of a format, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_runs import refused
from kvcore.replay import TRACE_FORMATS, TraceError, Workload, read_trace


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(ids=[ord(letter) for letter in text])


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


BLOCK_ROW = {"timestamp": 2, "input_length": 600, "output_length": 1, "hash_ids": [1, 1]}
SESSION = {"t": 2, "in": 600, "out": 1, "hash_ids": [1, 1]}
HEADER = {"kvcore_trace": 1, "time_unit": "s"}
ROW = {"time": 2, "input": 2, "output": 1}
SHORT = {"timestamp": 2, "input_length": 9, "output_length": 1}

#: For each format a file, and the options that change how it is read.
FILES: dict[str, tuple[str, set[str]]] = {
    "mooncake": (lines(BLOCK_ROW), {"block_size", "time_unit"}),
    "bailian": (
        lines(BLOCK_ROW | {"chat_id": 1, "input_length": 20}),
        {"block_size", "time_unit"},
    ),
    "sessions": (
        lines({"block_size": 512, "requests": [SESSION]}),
        {"block_size", "time_unit"},
    ),
    "tokens": (lines({"timestamp": 2, "token_ids": [1, 2]}), {"time_unit"}),
    "openai": (
        lines({"timestamp": 2, "messages": [{"role": "user", "content": "hi"}]}),
        {"time_unit", "tokenizer"},
    ),
    "sharegpt": (
        lines({"conversations": [{"from": who, "value": "hi"} for who in ("human", "gpt")]}),
        {"tokenizer"},
    ),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2,374,44\n",
        {"prefix_share", "time_unit"},
    ),
    "burstgpt": (
        "Timestamp,Request tokens,Response tokens\n2,374,44\n",
        {"prefix_share", "time_unit"},
    ),
    "lengths": (lines(SHORT), {"prefix_share", "time_unit"}),
    "kvcore": (lines(HEADER | {"content": "lengths"}, ROW), {"prefix_share"}),
    "kvcore tokens": (lines(HEADER | {"content": "tokens"}, ROW | {"tokens": [1, 2]}), set()),
    "kvcore blocks": (
        lines(HEADER | {"content": "blocks", "block_size": 2}, ROW | {"blocks": [1]}),
        set(),
    ),
}
assert {name.split()[0] for name in FILES} == set(TRACE_FORMATS)
VALUES = {"block_size": 400, "time_unit": "ns", "tokenizer": Letters(), "prefix_share": 0.5}


def described(workload: Workload) -> Any:
    prompts = [workload.prompt(index).tolist() for index in range(len(workload))]
    return workload.arrivals.tolist(), prompts


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("name", FILES)
def test_each_option_has_an_effect_or_is_refused(tmp_path: Path, name: str, option: str) -> None:
    text, used = FILES[name]
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"format": name.split()[0]}
    if "tokenizer" in used:
        options["tokenizer"] = VALUES["tokenizer"]
    value: Any = 12 if (name, option) == ("bailian", "block_size") else VALUES[option]
    if option not in used:
        flag = f"--{option.replace('_', '-')}"
        told = f"{flag} is for traces with .* leave out {flag}$|which no option changes$"
        with pytest.raises(TraceError, match=told):
            read_trace(path, **{**options, option: value})
        return
    with_option = described(read_trace(path, **{**options, option: value}))
    if option == "tokenizer":
        with pytest.raises(TraceError, match="--tokenizer FILE names a"):
            read_trace(path, format=name)
    else:
        assert with_option != described(read_trace(path, **options))


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
            {"time_unit": "ms"},
            "--time-unit is for traces with numbers as times, and has no effect on the times of",
        ),
        (
            lines({"model": "m", "prompt": [1, 2], "created": 1_700_000_000}),
            {"time_unit": "ms"},
            "--time-unit is for traces with numbers as times",
        ),
        (lines({"token_ids": [1]}), {"time_unit": "s"}, "--time-unit is for traces with numbers"),
        (
            lines({"model": "m", "prompt": [1, 2], "timestamp": 1}),
            {"tokenizer": Letters()},
            "--tokenizer is for traces with texts, and has no effect on the token ids of this",
        ),
    ],
)
def test_an_option_without_effect_on_the_rows_is_refused(
    tmp_path: Path, text: str, options: dict[str, Any], told: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    read_trace(path)
    with pytest.raises(TraceError, match=told):
        read_trace(path, **options)


def test_a_delay_has_the_unit_of_the_times(tmp_path: Path) -> None:
    """A trace with ISO times may have delays in numbers, and the unit counts for them."""
    path = tmp_path / "trace"
    row = {"timestamp": "2024-01-01 00:00:00", "token_ids": [1], "session_id": 1, "delay": 3}
    path.write_text(lines(row, row), encoding="utf-8")
    assert read_trace(path, time_unit="s").think_times.tolist() == [0, 3]


def test_the_size_of_sessions_is_said_by_the_file_or_the_option(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(FILES["sessions"][0], encoding="utf-8")
    for size, told in (
        (None, "blocks of 512 tokens (as the file says)"),
        (400, "blocks of 400 tokens (as --block-size says)"),
    ):
        assert told in " ".join(read_trace(path, block_size=size).assumptions)


def test_a_block_size_that_the_form_has_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(FILES["kvcore blocks"][0], encoding="utf-8")
    assert len(read_trace(path, block_size=2, time_unit="s")) == 1


@pytest.mark.parametrize("command", ["replay", "convert"])
def test_commands_refuse_options_without_effect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(FILES["azure"][0], encoding="utf-8")
    arguments = ["replay", path] if command == "replay" else ["trace", "convert", path, "-"]
    for flag, value in (("--block-size", 16), ("--tokenizer", "gpt2")):
        told = f"{flag} is for traces with "
        assert told in refused(capsys, *arguments, flag, value)
