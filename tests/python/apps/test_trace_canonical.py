# SPDX-License-Identifier: Apache-2.0
"""The one form of a trace: a converted file gives the same workload, and bad files one line."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runs import refused, shown, told
from kvcore.apps.cli.main import main
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.replay import PoolSettings, TraceError, Workload, read_trace, replay_online

HEADER = {"kvcore_trace": 1, "time_unit": "s", "content": "blocks", "block_size": 64}
ROW = {"time": 0.5, "input": 130, "output": 7, "blocks": [4, 5, 6]}
BLOCKS = [
    {"timestamp": 1e12 + n % 7, "input_length": 130 + n, "output_length": n, "session_id": n % 3}
    | {"delay": 5 * n, "hash_ids": [2**64 - 1, n % 2, n + 9]}
    for n in range(40)
]
TOKENS = [
    {"timestamp": n, "token_ids": [n, 7, 8], "output_token_ids": [1, 2][: n % 3]} for n in range(9)
]
LENGTHS = "Timestamp,Model,Request tokens,Response tokens\n" + "5.25,m,40,3\n1,m,50,0\n"


def same(first: Workload, second: Workload) -> None:
    """Compare everything but the names."""
    for name in ("arrivals", "prompt_lengths", "output_lengths", "next_turns", "think_times"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()
    assert first.assumptions == second.assumptions
    for index in range(len(first)):
        assert first.prompt(index).tolist() == second.prompt(index).tolist()
        assert first.output(index).tolist() == second.output(index).tolist()


def lines(*rows: Any) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("text", [lines(*BLOCKS), lines(*TOKENS), LENGTHS], ids=len)
def test_a_converted_trace_is_the_same_workload(tmp_path: Path, text: str, name: str) -> None:
    source, target = tmp_path / "in", tmp_path / name
    source.write_text(text, encoding="utf-8")
    trace = load_trace(str(source), ReadOptions())
    write_trace(trace, target)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["in", name])
    again = load_trace(str(target), ReadOptions())
    same(trace.workload(), again.workload())
    assert again.sessions.tolist() == trace.sessions.tolist()
    assert again.parents.tolist() == trace.parents.tolist()
    first, twice = target.read_bytes(), tmp_path / "twice.jsonl.gz"
    write_trace(again, twice)
    data = gzip.decompress(first) if name.endswith("gz") else first
    assert gzip.decompress(twice.read_bytes()) == data


def test_sessions_of_a_converted_trace_are_replayed_the_same(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(*BLOCKS), encoding="utf-8")
    write_trace(load_trace(str(source), ReadOptions()), target)
    pool = PoolSettings(page_size=16, pages=60)
    first, second = (replay_online(read_trace(each), pool) for each in (source, target))
    assert first.cached_tokens == second.cached_tokens > 0
    assert first.virtual_seconds == second.virtual_seconds
    assert first.evicted_pages == second.evicted_pages


@pytest.mark.parametrize("seed", range(5))
def test_a_request_that_arrives_before_its_parent_continues_no_request(
    tmp_path: Path, seed: int
) -> None:
    times = np.random.default_rng(seed).integers(0, 9, 30).tolist()
    turn = {"input_length": 64, "output_length": 1, "hash_ids": [1]}
    rows: dict[str, list[dict[str, Any]]] = {
        "mooncake": [
            turn | {"timestamp": time, "session_id": n % 2} for n, time in enumerate(times)
        ],
        "bailian": [
            turn | {"timestamp": time, "chat_id": n, "parent_chat_id": n - 1}
            for n, time in enumerate(times)
        ],
        "tokens": [
            {"timestamp": time, "token_ids": [1], "session_id": 0, "delay": None} for time in times
        ],
    }
    for name, each in rows.items():
        source, target, twice = (tmp_path / f"{name}{end}" for end in ("", ".out", ".twice"))
        source.write_text(lines(*each), encoding="utf-8")
        options = ReadOptions(block_size=None if name == "tokens" else 64)
        trace = load_trace(str(source), options, format_name=name)
        step = 2 if name == "mooncake" else 1
        order = sorted(range(30), key=lambda n: times[n])
        expected = [order.index(n - step) if n >= step else -1 for n in order]
        assert trace.parents.tolist() == [
            parent if parent < place else -1 for place, parent in enumerate(expected)
        ]
        write_trace(trace, target)
        again = load_trace(str(target), ReadOptions())
        same(trace.workload(), again.workload())
        write_trace(again, twice)
        assert twice.read_bytes() == target.read_bytes()


def test_a_made_up_prefix_is_told_for_a_converted_file(tmp_path: Path) -> None:
    source, plain, stated, twice = (tmp_path / name for name in ("in", "plain", "stated", "twice"))
    source.write_text(LENGTHS, encoding="utf-8")
    write_trace(load_trace(str(source), ReadOptions()), plain)
    write_trace(load_trace(str(plain), ReadOptions(prefix_share=0.5)), stated)
    wanted = read_trace(source, prefix_share=0.5)
    assert any("the hits are made up by --prefix-share 0.5" in line for line in wanted.assumptions)
    same(wanted, read_trace(plain, prefix_share=0.5))
    same(wanted, read_trace(stated))
    same(read_trace(source, prefix_share=0.25), read_trace(stated, prefix_share=0.25))
    write_trace(load_trace(str(stated), ReadOptions()), twice)
    assert twice.read_bytes() == stated.read_bytes()
    header = {"kvcore_trace": 1, "time_unit": "s", "content": "lengths", "notes": ["by hand"]}
    source.write_text(lines(header, {"time": 0, "input": 9, "output": 1}), encoding="utf-8")
    told = read_trace(source, prefix_share=0.5).assumptions
    assert told[0] == "by hand"
    assert "made up by --prefix-share 0.5" in told[1]


def test_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(*BLOCKS), encoding="utf-8")
    write_trace(load_trace(str(source), ReadOptions()), target)
    assert len(read_trace(target, limit=5)) == 5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_and_a_link_stay(tmp_path: Path) -> None:
    source, pipe, link, target = (tmp_path / name for name in ("in", "pipe", "link", "out"))
    source.write_text(LENGTHS, encoding="utf-8")
    trace = load_trace(str(source), ReadOptions())
    os.mkfifo(pipe)
    link.symlink_to(target)
    target.write_text("old", encoding="utf-8")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_trace(trace, pipe)
    reader.join()
    write_trace(trace, link)
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert got == [target.read_bytes()]


def test_a_failed_conversion_keeps_the_old_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(LENGTHS, encoding="utf-8")
    target.write_text("old", encoding="utf-8")

    def fail(done: int) -> None:
        raise KeyboardInterrupt(done)

    with pytest.raises(KeyboardInterrupt):
        write_trace(load_trace(str(source), ReadOptions()), target, fail)
    assert target.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out"]


def keyed(keys: Any, **more: Any) -> list[Any]:
    """Return a file with one prompt of two tokens."""
    row = {"time": 0, "input": 2, "output": 1, "tokens": [1, 2], "keys": keys}
    return [{"kvcore_trace": 1, "time_unit": "s", "content": "tokens"}, row | more]


BAD: list[tuple[list[Any], str]] = [
    ([{**HEADER, "kvcore_trace": 2}], ":1: kvcore_trace: expected version 1, got 2"),
    ([{**HEADER, "content": "x"}], ":1: content: expected one of blocks, tokens, lengths"),
    ([{**HEADER, "time_unit": "ms"}], ':1: time_unit: expected "s", got "ms"'),
    ([{**HEADER, "block_size": 0}], ":1: block_size: expected a positive integer"),
    ([{**HEADER, "more": 0}], ":1: expected only the fields block_size, content"),
    ([{**HEADER, "notes": ["a\x1b[2J"]}], ":1: notes: expected at most 64 lines of text"),
    ([{**HEADER, "prefix_share": 1}], ":1: prefix_share: expected 0 to 1"),
    ([HEADER], "expected at least one request, got none"),
    ([HEADER, "{"], ":2: expected a JSON object, got {"),
    ([HEADER, {**ROW, "blocks": [1, 2, 3, 4]}], ":2: blocks: expected at most 3 ids, got 4"),
    ([HEADER, {**ROW, "blocks": 1}], ":2: blocks: expected a list of integers"),
    ([HEADER, {**ROW, "tokens": [1]}], ":2: expected only the fields after, blocks"),
    ([HEADER, {**ROW, "time": None}], ":2: time: expected a number of seconds"),
    ([HEADER, {**ROW, "input": 0}], ":2: input: expected a positive integer"),
    ([HEADER, {**ROW, "output": 0}], ":2: output: expected a positive integer"),
    ([HEADER, {**ROW, "parent": 0}], ":2: parent: expected the number of a row before row 0"),
    ([HEADER, ROW, {**ROW, "parent": 1}], "expected the number of a row before row 1, got 1"),
    ([HEADER, {**ROW, "after": [0], "delay": 1}], "numbers of rows before row 0, got [0]"),
    ([HEADER, {**ROW, "session": -1}], ":2: session: expected 0 to"),
    ([HEADER, ROW, {**ROW, "delay": 1}], ":3: delay: expected a parent"),
    ([HEADER, ROW, {**ROW, "after": [1], "delay": 1}], ":3: after: expected at most 65536 numbers"),
    ([HEADER, ROW, {**ROW, "after": 0, "delay": 1}], ":3: after: expected at most 65536 numbers"),
    ([HEADER, ROW, {**ROW, "after": [0]}], ":3: delay: expected a delay after the answers"),
    (
        [HEADER, ROW, *[{**ROW, "delay": 1, "parent": 0}] * 2],
        ":4: delay: expected a parent that no other",
    ),
    (
        [{**HEADER, "content": "tokens"}, {"time": 0, "input": 2, "output": 1, "tokens": [1]}],
        ":2: tokens: expected 2 token ids, got 1",
    ),
    (keyed(7), ":2: keys: expected pairs of a place and a number from 0 to 2147483647, got 7"),
    (keyed([[0]]), ":2: keys: expected pairs of a place and a number"),
    (keyed([[0, True]]), ":2: keys: expected pairs of a place and a number"),
    (keyed([[0, 2**31]]), ":2: keys: expected pairs of a place and a number"),
    (keyed([[0, 1]] * 3), ":2: keys: expected pairs of a place and a number"),
    (keyed([[2, 1]]), ":2: keys: expected rising places from 0 to 1, got [[2, 1]]"),
    (keyed([[-1, 1]]), ":2: keys: expected rising places from 0 to 1, got [[-1, 1]]"),
    (keyed([[1, 1], [0, 1]]), ":2: keys: expected rising places from 0 to 1"),
    (keyed([[0, 1]], tokens=[2**31 - 1, 0]), "small enough for 1 ids of tokens with keys above"),
    ([HEADER, {**ROW, "keys": []}], ":2: expected only the fields after, blocks"),
]


@pytest.mark.parametrize(("rows", "what"), BAD, ids=[what[:40] for _, what in BAD])
def test_bad_files_are_one_line(tmp_path: Path, rows: list[Any], what: str) -> None:
    path = tmp_path / "trace"
    path.write_text(lines(*rows), encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    path.write_text(lines(*keyed([[0, 1], [1, 1]])), encoding="utf-8")
    assert read_trace(path).prompt(0).tolist() == [3, 4]
    monkeypatch.setattr("kvcore.apps.traces.tokens.MAX_KEYS", 1)
    with pytest.raises(TraceError, match=":2: keys: expected at most 1 keys in all prompts"):
        read_trace(path)


def test_options_do_not_change_the_form(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(lines(HEADER, ROW), encoding="utf-8")
    assert np.array_equal(read_trace(path, block_size=64, time_unit="s").arrivals, [0.5])
    with pytest.raises(TraceError, match="block_size: the file has 64"):
        read_trace(path, block_size=32)
    with pytest.raises(TraceError, match="time_unit: the file has seconds"):
        read_trace(path, time_unit="ms")


# -- the command -----------------------------------------------------------------------------------
def test_command_converts_and_prints_what_it_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl.gz"
    source.write_text(LENGTHS, encoding="utf-8")
    out = shown(capsys, "trace", "convert", source, target, "--prefix-share", ".5")
    assert out.startswith("2 requests from burstgpt to ")
    assert "times are in s, the unit of the format\n" in out
    answer = told(capsys, "trace", "convert", source, target, "--prefix-share", ".5")
    assert (answer["requests"], answer["format"]) == (2, "burstgpt")
    assert answer["assumptions"] == out.splitlines()[1:]
    options = ("--mode", "admission", "--page-size", "4")
    want = told(capsys, "replay", source, *options, "--prefix-share", ".5")
    got = told(capsys, "replay", target, *options)
    assert got["assumptions"] == want["assumptions"]
    assert got["cached_tokens"] == want["cached_tokens"] == 20


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["none", "out"], "none: cannot be read: No such file"),
        (["in.csv", "in.csv"], "'OUT': in.csv cannot be written: it is the input file"),
        (["in.csv", "no/out"], "'OUT': no/out cannot be written"),
        (["in.csv", "out", "--format", "x"], "'--format': expected one of kvcore, mooncake"),
        (["in.csv", "out", "--time-unit", "h"], "'--time-unit': expected one of s, ms, us, ns"),
        (["in.csv", "out", "--prefix-share", "1"], "'--prefix-share': expected 0 to less than 1"),
        (["in.csv", "out", "--prefix-share", "nan"], "'--prefix-share': expected 0 to less"),
        (["in.csv", "out", "--block-size", "0"], "'--block-size': expected 1 to 16777216, got 0"),
        (["in.csv", "out", "--format", "mooncake"], "in.csv:1: expected a JSON object"),
    ],
)
def test_bad_conversion_is_one_line_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text(LENGTHS, encoding="utf-8")
    assert what in refused(capsys, "trace", "convert", *arguments)
    assert [each.name for each in tmp_path.iterdir()] == ["in.csv"]


def test_rows_go_to_stdout_and_the_report_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").mkdir()
    Path("in.csv").write_text(LENGTHS, encoding="utf-8")
    report = shown(capsys, "trace", "convert", "in.csv", "out.jsonl")
    want = Path("out.jsonl").read_text(encoding="utf-8")
    for options in ([], ["--json"]):
        assert main(["trace", "convert", "in.csv", "-", *options]) == 0
        captured = capsys.readouterr()
        assert captured.out == want
        if options:
            assert json.loads(captured.err)["requests"] == 2
        else:
            assert captured.err == report.replace("out.jsonl", "stdout")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["-", "in.csv", "out.jsonl"]


def test_a_page_goes_to_stdout_and_the_report_to_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text(LENGTHS, encoding="utf-8")
    assert main(["replay", "in.csv", "--html", "-", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("<!DOCTYPE html>")
    assert captured.out.rstrip().endswith("</html>")
    assert json.loads(captured.err)["requests"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["in.csv"]


def test_a_closed_stdout_is_an_error_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.csv"
    path.write_text(LENGTHS, encoding="utf-8")
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(OSError, match="standard output is closed"):
        write_trace(load_trace(str(path), ReadOptions()), "-")


def test_replay_reads_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in"
    path.write_bytes(gzip.compress(LENGTHS.encode()))
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        answer = told(capsys, "replay", "-", "--mode", "admission")
    assert (answer["workload"], answer["requests"]) == ("stdin", 2)


def test_closed_standard_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input: cannot be read: standard input is closed" in refused(
        capsys, "replay", "-"
    )


def test_report_prints_what_it_assumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines(*BLOCKS), encoding="utf-8")
    for options in ([], ["--pages", "9,90"], ["--replicas", "2", "--route", "prefix"]):
        out = shown(capsys, "replay", path, *options)
        assert "blocks of 64 tokens (found from 40 rows): the hit rate is a lower bound\n" in out
        answer = told(capsys, "replay", path, *options)
        assert "1 row without an output: 1 token is generated" in answer["assumptions"]
