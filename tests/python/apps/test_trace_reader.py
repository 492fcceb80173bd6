# SPDX-License-Identifier: Apache-2.0
"""Traces: the fields that are read, the tokens of block ids, and the error of each bad row."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.replay import TraceError, read_trace
from trace_files import BLOCK, row, write_trace

GOOD = row([0, 1], timestamp=27, length=600, output=5)


def test_rows_become_a_workload(tmp_path: Path) -> None:
    late = {**GOOD, "timestamp": 1600}
    workload = read_trace(write_trace(tmp_path, row([7], timestamp=1500.5, output=3), late))
    assert len(workload) == 2
    assert workload.name == "trace.jsonl"
    assert workload.arrivals.tolist() == [1.5005, 1.6]
    assert workload.prompt_lengths.tolist() == [512, 600]
    assert workload.output_lengths.tolist() == [3, 5]
    assert workload.next_turns.tolist() == [-1, -1]


def test_gzip_is_told_from_the_bytes_not_the_name(tmp_path: Path) -> None:
    plain = write_trace(tmp_path, GOOD, row([0, 2]))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    want, got = read_trace(plain), read_trace(packed)
    assert [want.prompt(i).tolist() for i in (0, 1)] == [got.prompt(i).tolist() for i in (0, 1)]


def test_equal_blocks_are_equal_tokens_and_different_blocks_share_none(tmp_path: Path) -> None:
    rows = [row([3, 900, 5]), row([3, 900, 6], length=2 * BLOCK + 1), row([2**63 - 1])]
    workload = read_trace(write_trace(tmp_path, *rows))
    first, second, third = (workload.prompt(i).copy() for i in range(3))
    assert first.dtype == np.int32
    assert [len(first), len(second), len(third)] == [1536, 1025, 512]
    assert (first[:1024] == second[:1024]).all()
    distinct = np.concatenate((first, second[1024:], third))
    assert len(np.unique(distinct)) == 5 * BLOCK - (BLOCK - 1)


def test_every_output_token_is_distinct(tmp_path: Path) -> None:
    rows = [row([1], output=100), row([1], output=7), row([2], output=1)]
    workload = read_trace(write_trace(tmp_path, *rows))
    outputs = np.concatenate([workload.output(i) for i in range(3)])
    prompts = np.concatenate([workload.prompt(i).copy() for i in (0, 2)])
    assert len(np.unique(np.concatenate((outputs, prompts)))) == 108 + 2 * BLOCK


def test_limit_stops_before_later_rows_are_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path, GOOD, GOOD, "not json")
    assert len(read_trace(path, limit=2)) == 2


def test_blank_lines_count_but_say_nothing(tmp_path: Path) -> None:
    path = write_trace(tmp_path, GOOD, "", "  ", GOOD, "oops")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError, match=r"trace\.jsonl:5: expected a JSON object, got oops"):
        read_trace(path)


MALFORMED: list[tuple[str, dict[str, Any] | str, str]] = [
    ("no json", "{", "expected a JSON object, got { ("),
    ("an array", "[1]", "expected a JSON object, got [1]"),
    ("a long line", "x" * 500, "expected a JSON object, got " + "x" * 37 + "... ("),
    ("deep nesting", "[" * 100_000, "expected a JSON object, got [[["),
    ("huge number", '{"timestamp": 1' + "0" * 5000 + "}", "expected a JSON object, got"),
    ("list timestamp", {**GOOD, "timestamp": [1]}, "timestamp: expected a number of milliseconds"),
    ("late timestamp", {**GOOD, "timestamp": -1}, "timestamp: expected a number of milliseconds"),
    ("text timestamp", {**GOOD, "timestamp": "1"}, 'milliseconds >= 0, got "1"'),
    ("NaN timestamp", {**GOOD, "timestamp": float("nan")}, "milliseconds >= 0, got NaN"),
    ("infinite time", {**GOOD, "timestamp": float("inf")}, "milliseconds >= 0, got Infinity"),
    ("true timestamp", {**GOOD, "timestamp": True}, "milliseconds >= 0, got true"),
    ("no input", {**GOOD, "input_length": 0}, "input_length: expected a positive integer"),
    ("less than none", {**GOOD, "input_length": -4}, "input_length: expected a positive integer"),
    (
        "half a token",
        {**GOOD, "input_length": 1.5},
        "at most 16777216 tokens, got 1.5",
    ),
    (
        "whole float",
        {**GOOD, "input_length": 600.0},
        "at most 16777216 tokens, got 600.0",
    ),
    (
        "true input",
        {**GOOD, "input_length": True},
        "at most 16777216 tokens, got true",
    ),
    ("too long", {**GOOD, "input_length": 2**24 + 1}, "at most 16777216 tokens, got 16777217"),
    ("long output", {**GOOD, "output_length": 2**24 + 1}, "output_length: expected a positive"),
    ("less output", {**GOOD, "output_length": -1}, "output_length: expected a positive integer"),
    ("false output", {**GOOD, "output_length": False}, "output_length: expected a positive"),
    ("text output", {**GOOD, "output_length": ""}, "output_length: expected a positive integer"),
    (
        "list output",
        {**GOOD, "output_length": [1]},
        "at most 16777216 tokens, got [1]",
    ),
    ("no ids", {**GOOD, "hash_ids": []}, "hash_ids: expected 2 ids, one per 512 tokens of"),
    ("one id short", {**GOOD, "hash_ids": [4]}, "of input_length 600, got 1"),
    ("one id more", {**GOOD, "hash_ids": [4, 5, 6]}, "of input_length 600, got 3"),
    ("a single id", {**GOOD, "hash_ids": 4}, "hash_ids: expected a list of integers"),
    (
        "id below 64 bits",
        {**GOOD, "hash_ids": [0, -(2**63) - 1]},
        "hash_ids: expected a list of integers from -9223372036854775808 to 18446744073709551615",
    ),
    ("text id", {**GOOD, "hash_ids": [0, "1"]}, "hash_ids: expected a list of integers"),
    ("true id", {**GOOD, "hash_ids": [0, True]}, "hash_ids: expected a list of integers"),
    (
        "id beyond 64 bits",
        {**GOOD, "hash_ids": [0, 2**64]},
        "hash_ids: expected a list of integers",
    ),
    ("texts after numbers", {**GOOD, "hash_ids": ["0", "1"]}, "hash_ids: expected integers as in"),
    ("control characters", "\x1b[2J{", "got \\x1b[2J{ ("),
    ("a field twice", '{"timestamp": 1, "timestamp": 2}', 'the field "timestamp" is there twice'),
    (
        "exponent",
        json.dumps({**GOOD, "timestamp": "x"}).replace('"x"', "1e400"),
        "milliseconds >= 0, got Infinity",
    ),
]


@pytest.mark.parametrize(("bad", "told"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_row_names_file_line_field_and_expectation(
    tmp_path: Path, bad: dict[str, Any] | str, told: str
) -> None:
    path = write_trace(tmp_path, GOOD, bad, GOOD)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (caught.value.path, caught.value.line) == (str(path), 2)


@pytest.mark.parametrize("field", ["input_length", "hash_ids"])
def test_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = write_trace(tmp_path, {k: v for k, v in GOOD.items() if k != field})
    with pytest.raises(TraceError, match=rf":1: {field}: expected .*, got no such field"):
        read_trace(path)


def test_unknown_fields_are_ignored_and_named(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, {**GOOD, "user": "x", "b\n": 1}))
    assert len(workload) == 1
    assert 'fields that are not used: "b\\n", "user"' in workload.assumptions


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202etxt", os.fsdecode(b"\xff")], ids=ascii)
def test_names_of_files_are_escaped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_trace(tmp_path, GOOD).rename(path)
    escaped = ascii(name)[1:-1]
    workload = read_trace(path)
    assert workload.name == escaped
    path.write_text("{\n", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{tmp_path}/{escaped}: ")
    assert caught.value.path == str(path)


def test_rows_without_an_output_or_a_time_are_counted(tmp_path: Path) -> None:
    timeless = {k: v for k, v in GOOD.items() if k != "timestamp"}
    rows = [{**GOOD, "timestamp": 500}, timeless, {**GOOD, "timestamp": None, "output_length": 0}]
    rows.append({k: v for k, v in GOOD.items() if k != "output_length"} | {"timestamp": 900})
    workload = read_trace(write_trace(tmp_path, *rows))
    assert workload.arrivals.tolist() == [0.5, 0.5, 0.5, 0.9]
    assert workload.output_lengths.tolist() == [5, 5, 1, 1]
    assert "2 rows without a time: at the time of the row before" in workload.assumptions
    assert "2 rows without an output: 1 token is generated" in workload.assumptions


def test_no_row_has_a_time(tmp_path: Path) -> None:
    timeless = {k: v for k, v in GOOD.items() if k != "timestamp"}
    workload = read_trace(write_trace(tmp_path, timeless, timeless))
    assert workload.arrivals.tolist() == [0, 0]
    assert any(line.startswith("no row has a time") for line in workload.assumptions)


def test_rows_are_sorted_by_time(tmp_path: Path) -> None:
    rows = [row([n], timestamp=time, length=n + 1) for n, time in enumerate([30, 10, 20, 10])]
    workload = read_trace(write_trace(tmp_path, *rows), block_size=512)
    assert workload.prompt_lengths.tolist() == [2, 4, 3, 1]
    assert [int(workload.prompt(i)[0]) // 512 for i in range(4)] == [1, 3, 2, 0]
    assert "2 rows earlier than the row before: all are sorted by time" in workload.assumptions


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "expected at least one request, got an empty file"),
        (b"\n \n", "expected at least one request"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"\x1f\x8bnot really gzip", "cannot be read"),
        (gzip.compress(json.dumps(GOOD).encode() * 1000)[:-20], "cannot be read"),
    ],
    ids=["empty", "blank", "not utf-8", "bad gzip", "cut gzip"],
)
def test_unreadable_file_is_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: {told}")
    assert "\n" not in str(caught.value)


def test_cut_file_has_the_last_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    lines = (json.dumps(row([n, n + 1, n * n], timestamp=n)) for n in range(40_000))
    data = gzip.compress("\n".join(lines).encode())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"cannot be read after row \d+: Compressed file ended"):
        read_trace(path)


def test_missing_file_and_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none: cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_more_tokens_than_int32_can_tell_apart_are_refused(tmp_path: Path) -> None:
    most = row([0], output=2**24)
    path = write_trace(tmp_path, *[most] * 127, row([0], output=2**24 - BLOCK))
    workload = read_trace(path)
    assert workload.output(127)[-1] == 2**31 - 1
    path = write_trace(tmp_path, *[most] * 127, row([0], output=2**24 - BLOCK + 1))
    with pytest.raises(TraceError, match="hash_ids: expected at most 2147483648 tokens"):
        read_trace(path)


def test_a_few_bytes_take_no_gigabytes(tmp_path: Path) -> None:
    """The memory use depends on the bytes of the file, not on the lengths in its rows."""
    path = write_trace(tmp_path, *[row([0], output=2**24)] * 100)
    tracemalloc.start()
    try:
        workload = read_trace(path)
        assert workload.output_tokens_at(np.array([0, 1, 2**40])).tolist() == [
            *(BLOCK, BLOCK + 1, BLOCK + 100 * 2**24 - 1)
        ]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
