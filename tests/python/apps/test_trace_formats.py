# SPDX-License-Identifier: Apache-2.0
"""Traces of every format: the requests, the assumptions, and the hits against a dict of blocks."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import runpy
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import require
from hit_counter import count_hits
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.clock import UNITS
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.replay import PoolSettings, TraceError, Workload, read_trace, replay_admission

Rows = list[dict[str, Any]]


def random_prompts(seed: int, block: int, *, requests: int = 60) -> Rows:
    """Draw prompts from a tree of blocks, with a partial last block."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for at in range(requests):
        path = tuple(rng.randrange(2) for _ in range(rng.randint(2, 8)))
        blocks = [ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path))]
        rows.append(
            {
                "timestamp": at * 100 + rng.random(),
                "input_length": len(blocks) * block - rng.randrange(block),
                "output_length": rng.randint(1, 50),
                "hash_ids": blocks,
            }
        )
    return rows


def write(folder: Path, rows: Rows, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def hits(workload: Workload, block: int) -> int:
    report = replay_admission(workload, PoolSettings(page_size=block, pages=100_000))
    assert report.refused == report.evicted_pages == report.leaked_pages == 0
    return report.cached_pages


def expected(rows: Rows, block: int) -> int:
    return count_hits([(row["input_length"], row["hash_ids"]) for row in rows], block)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- blocks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [1, 16, 64, 128, 512, 1024])
def test_size_of_blocks_is_found(tmp_path: Path, block: int) -> None:
    rows = random_prompts(block, block)
    workload = read_trace(write(tmp_path, rows))
    assert workload.prompt_lengths.tolist() == [row["input_length"] for row in rows]
    line = f"blocks of {block} tokens (found from 60 rows): the hit rate is a lower bound"
    assert line in workload.assumptions
    assert hits(workload, block) == expected(rows, block) > 0


@pytest.mark.parametrize("block", [16, 64, 512])
def test_only_whole_blocks_may_have_ids(tmp_path: Path, block: int) -> None:
    rows = random_prompts(7, block)
    for row in rows:
        row["input_length"] += block - 1
        row["hash_ids"] = row["hash_ids"][: row["input_length"] // block]
    workload = read_trace(write(tmp_path, rows))
    assert any("only whole blocks have ids" in line for line in workload.assumptions)
    assert hits(workload, block) == expected(rows, block) > 0
    tails = [int(workload.prompt(i)[-1]) for i in range(60) if rows[i]["input_length"] % block]
    assert len(set(tails)) == len(tails)


def test_a_size_that_is_no_power_of_two_is_named(tmp_path: Path) -> None:
    rows = random_prompts(3, 100)
    path = write(tmp_path, rows)
    assert hits(read_trace(path, block_size=100), 100) == expected(rows, 100)
    told = f"{path}:1: hash_ids: expected "
    assert refusal(path, block_size=7).startswith(told)


def test_several_sizes_need_an_option(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [0]}]
    path = write(tmp_path, rows)
    assert "--block-size N names the size" in refusal(path)
    assert "blocks of 1024 tokens (as --block-size says)" in " ".join(
        read_trace(path, block_size=1024).assumptions
    )


def test_ids_of_64_bits_and_texts_are_equal_to_small_ids(tmp_path: Path) -> None:
    rows = random_prompts(5, 64)
    renames: list[Callable[[int], Any]] = [
        lambda n: (n * 0x9E3779B97F4A7C15 + (1 << 63) + 1) % (1 << 64),
        lambda n: f"{n:064x}",
        lambda n: n + (1 << 32) - 5,
        lambda n: n - 9,  # signed ids
        lambda n: n - (1 << 63),
    ]
    want = expected(rows, 64)
    for rename in renames:
        changed = [row | {"hash_ids": [rename(n) for n in row["hash_ids"]]} for row in rows]
        assert hits(read_trace(write(tmp_path, changed)), 64) == want


def test_order_of_the_file_does_not_matter(tmp_path: Path) -> None:
    rows = random_prompts(6, 64)
    mixed = rows[:]
    random.Random(1).shuffle(mixed)
    workload = read_trace(write(tmp_path, mixed))
    assert workload.prompt_lengths.tolist() == [row["input_length"] for row in rows]
    assert hits(workload, 64) == expected(rows, 64)
    late = sum(a["timestamp"] > b["timestamp"] for a, b in itertools.pairwise(mixed))
    assert f"{late} rows earlier than the row before: all are sorted by time" in (
        workload.assumptions
    )


# -- times -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "unit", "gap"),
    [
        (1_700_000_001_562, 1_700_000_003_062, None, 1.5),
        (1_700_000_001, 1_700_000_003, "s", 2.0),
        (1_700_000_001_562_000, 1_700_000_003_062_000, "us", 1.5),
        (1_700_000_001_562_000_000, 1_700_000_003_062_000_000, "ns", 1.5),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10T02:00:01.509930+02:00", None, 1.5),
        ("2023-12-31 23:59:59.5", "2024-01-01T00:00:01Z", None, 1.5),
    ],
)
def test_dates_begin_at_the_first_arrival(
    tmp_path: Path, first: Any, second: Any, unit: str | None, gap: float
) -> None:
    rows = random_prompts(1, 64, requests=2)
    rows[0]["timestamp"], rows[1]["timestamp"] = first, second
    workload = read_trace(write(tmp_path, rows), time_unit=unit)
    assert workload.arrivals.tolist() == pytest.approx([0, gap], abs=1e-6)
    assert "counted from the first arrival" in workload.assumptions[0]


def test_unit_is_said_and_may_be_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, random_prompts(1, 64, requests=5))
    slow, fast = read_trace(path, time_unit="s"), read_trace(path)
    assert np.allclose(slow.arrivals, fast.arrivals * 1000)
    assert fast.assumptions[0] == "times are in ms, the unit of the format"
    assert slow.assumptions[0] == "times are in s, as --time-unit says"


def test_dates_and_numbers_do_not_mix(tmp_path: Path) -> None:
    rows = random_prompts(1, 64, requests=3)
    rows[2]["timestamp"] = "2024-01-01 00:00:00"
    told = "timestamp: expected a number of milliseconds as in the rows before"
    assert told in refusal(write(tmp_path, rows))
    rows[2]["timestamp"] = "2024-02-30 00:00:00"
    assert 'milliseconds >= 0, got "2024-02-30 00:00:00"' in refusal(write(tmp_path, rows))


# -- sessions --------------------------------------------------------------------------------------
def test_rows_of_a_session_follow_by_their_delay(tmp_path: Path) -> None:
    rows = random_prompts(2, 64, requests=5)
    for row, session in zip(rows, ["a", "b", "a", None, "a"], strict=True):
        row["session_id"] = session
    del rows[2]["timestamp"]
    rows[2]["delay"], rows[4]["delay_ms"] = 1500, 250
    workload = read_trace(write(tmp_path, rows))
    order = workload.prompt_lengths.tolist()
    place = {row["input_length"]: order.index(row["input_length"]) for row in rows}
    first, third, fifth = (place[rows[n]["input_length"]] for n in (0, 2, 4))
    assert workload.next_turns[first] == third
    assert workload.next_turns[third] == fifth
    assert workload.think_times[[third, fifth]].tolist() == [1.5, 0.25]
    assert workload.arrivals[third] == workload.arrivals[first] + 1.5
    assert "after an answer and a delay (online mode): 2 requests" in workload.assumptions


def test_bailian_chats_have_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    rows = random_prompts(4, 16)
    for index, row in enumerate(rows):
        row |= {"chat_id": index, "parent_chat_id": index - 7 if index % 3 else -1}
        row |= {"turn": 1, "type": "text"}
    workload = read_trace(write(tmp_path, rows))
    assert workload.arrivals.tolist() == [row["timestamp"] for row in rows]
    assert hits(workload, 16) == expected(rows, 16) > 0
    assert (workload.next_turns == -1).all()
    assert any("chats that are not in the rows before: " in each for each in workload.assumptions)
    rows[5]["chat_id"] = 3
    assert ":6: chat_id: expected a new number, got 3 again" in refusal(write(tmp_path, rows))


def session(name: str, seed: int, scope: str | None = "local") -> dict[str, Any]:
    """Make a session with a sub-agent; only whole blocks have ids."""
    requests: Rows = []
    for at, row in enumerate(random_prompts(seed, 64, requests=9)):
        length = row["input_length"] + 64
        request = {
            "t": float(at * 10 + seed),
            "type": "s",
            "in": length,
            "out": at,
            "hash_ids": (row["hash_ids"] + [900 + at])[: length // 64],
            "think_time": 0.5 * at,
        }
        requests.append(request)
    agent = {"type": "subagent", "t": 30.0, "agent_id": "x", "requests": requests[3:6]}
    found = {"id": name, "block_size": 64, "requests": [*requests[:3], agent, *requests[6:]]}
    return found if scope is None else found | {"hash_id_scope": scope}


def leaves(document: dict[str, Any]) -> Rows:
    found: Rows = []
    for each in document["requests"]:
        found += leaves(each) if each.get("type") == "subagent" else [each]
    return found


def packed(folder: Path, documents: list[dict[str, Any]]) -> Path:
    path = folder / "sessions.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        files.addfile(tarfile.TarInfo("README"), io.BytesIO())
        for each in documents:
            data = json.dumps(each, indent=1).encode()
            info = tarfile.TarInfo(f"./{each['id']}.json")
            info.size = len(data)
            files.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("scope", ["local", "global", None])
def test_sessions_of_a_tar_file(tmp_path: Path, scope: str | None) -> None:
    documents = [session(f"s{n}", n, scope) for n in range(5)]
    workload = read_trace(packed(tmp_path, documents))
    assert len(workload) == 45
    rows = sorted(
        ((each["t"], n, each) for n, one in enumerate(documents) for each in leaves(one)),
        key=lambda found: found[:1],
    )
    prompts = [
        (each["in"], each["hash_ids"] if scope == "global" else [(n, h) for h in each["hash_ids"]])
        for _, n, each in rows
    ]
    assert hits(workload, 64) == count_hits(prompts, 64) > 0
    local = "block ids are local to a session: no two sessions share a block"
    assert (local in workload.assumptions) == (scope != "global")
    assert "not JSON, and left out: 1 file" in workload.assumptions
    assert "5 rows without an output: 1 token is generated" in workload.assumptions


def test_requests_of_a_session_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(session("one", 0)), encoding="utf-8")
    workload = read_trace(path)
    assert workload.arrivals.tolist() == [at * 10.0 for at in range(9)]
    assert workload.next_turns.tolist() == [1, 2, 6, 4, 5, -1, 7, 8, -1]
    thinks = [0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert workload.think_times.tolist() == thinks
    assert workload.waits.tolist() == [[3, 2], [6, 5]]
    lines = write(tmp_path, [session("a", 0), session("b", 1)])
    assert len(read_trace(lines)) == 18
    assert len(read_trace(lines, limit=4)) == 4


def test_a_session_on_several_lines_and_a_plain_tar_file(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(session("one", 0), indent=2), encoding="utf-8")
    assert len(read_trace(path)) == len(read_trace(path, format="sessions")) == 9
    assert len(read_trace(path, limit=4)) == 4
    tar = packed(tmp_path, [session("a", 0), session("b", 1)])
    path.write_bytes(gzip.decompress(tar.read_bytes()))
    assert len(read_trace(path)) == 18
    assert len(read_trace(path, limit=11)) == 11
    path.write_bytes(path.read_bytes()[:3000])
    assert "expected a whole tar file" in refusal(path) or "a.json: " in refusal(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_size": 0}, "block_size: expected a positive integer, got 0"),
        ({"block_size": 32}, "hash_ids: expected "),
        ({"hash_id_scope": "all"}, 'hash_id_scope: expected "local" or "global"'),
        ({"requests": 3}, "expected JSON with [ here, got 3"),
        ({"requests": [3]}, "requests: expected JSON objects, got 3"),
        ({"requests": []}, "expected at least one request, got none"),
        ({"requests": [{"in": 0}]}, "in: expected a positive integer"),
        ({"requests": [{"in": 64, "t": -1, "hash_ids": [1]}]}, "t: expected a number of seconds"),
    ],
)
def test_bad_sessions_are_one_line(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(session("one", 0) | change), encoding="utf-8")
    assert told in refusal(path)


# -- lengths ---------------------------------------------------------------------------------------
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.0000000,900,0
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_azure_has_only_lengths(tmp_path: Path, end: str, mark: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes((mark + AZURE).replace("\n", end).encode())
    workload = read_trace(path)
    assert workload.arrivals.tolist() == pytest.approx([0, 2.31941, 4.314579])
    assert workload.prompt_lengths.tolist() == [374, 900, 396]
    assert workload.output_lengths.tolist() == [44, 1, 109]
    assert hits(workload, 16) == 0
    assert "only lengths: no prefix can be seen, so only the occupancy is simulated" in (
        workload.assumptions
    )


def test_a_prefix_is_made_up_only_if_it_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv.gz"
    path.write_bytes(gzip.compress(BURST.encode()))
    workload = read_trace(path, prefix_share=0.5)
    assert workload.arrivals.tolist() == [5, 45, 118]
    report = replay_admission(workload, PoolSettings(page_size=1, pages=100_000))
    assert report.cached_tokens == 236 + 208  # half of the shorter prompt of each pair
    assert any("made up by --prefix-share 0.5" in line for line in workload.assumptions)
    assert "1 row without an output: 1 token is generated" in workload.assumptions
    rows = write(tmp_path, random_prompts(0, 64))
    assert "--prefix-share is for traces with only lengths" in refusal(rows, prefix_share=0.5)
    assert hits(read_trace(rows, format="lengths"), 64) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "expected at least one request, got none"),
        (AZURE + "2023-11-16 18:15:46,1\n", ":5: expected 3 values, got 2"),
        (AZURE + "2023-11-16 18:15:46,1.5,2\n", ":5: ContextTokens: expected a positive integer"),
        (AZURE + "2023-11-16 18:15:46,7,-2\n", ":5: GeneratedTokens: expected a positive"),
        (AZURE + "later,7,2\n", 'TIMESTAMP: expected a number of seconds >= 0, got "later"'),
        (AZURE + f"1{'0' * 5000},7,2\n", ":5: TIMESTAMP: expected a number of seconds"),
        (AZURE + '"2023,7,2\n' + "x" * 200_000, ": expected CSV, got an error"),
        (AZURE + "\0,7,2\n", ":5: "),
        (AZURE.replace("ContextTokens", "timestamp"), "expected a trace in one of the formats"),
        ("a,b\n1,2\n", "expected a trace in one of the formats kvcore, mooncake, bailian, "),
    ],
)
def test_bad_tables_are_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text, encoding="utf-8")
    assert told in refusal(path)


# -- tokens and texts ------------------------------------------------------------------------------
def test_token_ids_are_the_prompt(tmp_path: Path) -> None:
    rows: Rows = [
        {"timestamp": 10, "token_ids": [5, 6, 7], "output_token_ids": [8, 9]},
        {"timestamp": 0, "prompt_token_ids": [5, 6], "output_length": 3},
        {"timestamp": 20, "token_ids": [2**31 - 100]},
    ]
    workload = read_trace(write(tmp_path, rows))
    assert [workload.prompt(i).tolist() for i in range(3)] == [[5, 6], [5, 6, 7], [2**31 - 100]]
    assert [workload.output(i).tolist() for i in range(3)] == [
        *([2**31 - 99, 2**31 - 98, 2**31 - 97], [8, 9], [2**31 - 96])
    ]
    for bad in ([], [1.0], [True], [-1], [2**31], "1", None):
        path = write(tmp_path, [*rows, {"timestamp": 0, "token_ids": bad}])
        assert ":4: token_ids: expected" in refusal(path)


class Letters:
    """A tokenizer with one token per character."""

    class _Encoding:
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        assert not add_special_tokens
        return self._Encoding([ord(letter) for letter in text])


def letters(tokens: np.ndarray) -> str:
    return "".join(map(chr, tokens.tolist()))


def test_openai_requests_become_tokens(tmp_path: Path) -> None:
    hello = {"role": "user", "content": "hi"}
    part = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}
    body = {"model": "m", "messages": [hello], "max_tokens": 10}
    rows: Rows = [
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"model": "m", "prompt": "ab", "created": 7, "usage": {"completion_tokens": 4}},
        {"model": "m", "messages": [hello, part], "output_length": 2, "timestamp": 9000}
        | {"session_id": 1},
        {"model": "m", "prompt": [1, 2, 3], "timestamp": 9500},
        {"model": "m", "input": "go", "instructions": "be", "max_output_tokens": 5},
        {"model": "m", "input": [hello, {"type": "call", "id": 1}], "tools": [{"name": "t"}]},
    ]
    workload = read_trace(write(tmp_path, rows), tokenizer=Letters())
    prompts = [letters(workload.prompt(i)) for i in range(6)]
    assert prompts == [
        *("user\nhi\n", "ab", "user\nhi\nuser\nsee\n", "\1\2\3", "bego"),
        '[{"name": "t"}]user\nhi\n{"id": 1, "type": "call"}',
    ]
    assert workload.output_lengths.tolist() == [10, 4, 2, 1, 5, 1]
    assert workload.arrivals.tolist() == [7, 7, 9, 9.5, 9.5, 9.5]
    said = " ".join(workload.assumptions)
    assert said.startswith("times are in ms")
    assert "outputs of max_tokens tokens, an upper bound: 2 rows" in said
    assert "not text, and left out: 1 part of messages" in said
    assert "no chat template" in said


def test_prompts_of_two_models_share_no_prefix(tmp_path: Path) -> None:
    names = ["base", "adapter", "base", None, "adapter", None]
    rows: Rows = [{"prompt": [1, 2, 3]} | ({"model": name} if name else {}) for name in names]
    path = write(tmp_path, rows)
    workload = read_trace(path, format="openai")
    prompts = [workload.prompt(index).tolist() for index in range(6)]
    assert [prompts.index(prompt) for prompt in prompts] == [0, 1, 0, 3, 1, 3]
    assert len({prompt[0] for prompt in prompts}) == 3
    assert prompts[0] == [1, 2, 3]
    line = "prompts of different models share no prefix: 3 models"
    assert line in workload.assumptions
    target = tmp_path / "out.jsonl"
    write_trace(load_trace(str(path), ReadOptions(), format_name="openai"), target)
    assert [read_trace(target).prompt(index).tolist() for index in range(6)] == prompts
    assert line not in read_trace(write(tmp_path, rows[:1])).assumptions
    assert ":1: model: expected a text" in refusal(write(tmp_path, [rows[0] | {"model": 5}]))


@pytest.mark.parametrize("unit", [None, "s", "ms", "us", "ns"])
def test_created_is_in_seconds_whatever_the_unit_of_other_times(
    tmp_path: Path, unit: str | None
) -> None:
    rows: Rows = [
        {"model": "m", "prompt": [1, 2], "created": 1_700_000_000, "timestamp": None},
        {"model": "m", "prompt": [1, 2], "created": 1_700_000_010.5},
        {"model": "m", "prompt": [1, 2], "timestamp": 1_700_000_020 * UNITS[unit or "ms"]},
    ]
    workload = read_trace(write(tmp_path, rows), time_unit=unit)
    assert workload.arrivals.tolist() == [0, 10.5, 20]
    workload = read_trace(write(tmp_path, rows[:2]))
    assert workload.arrivals.tolist() == [0, 10.5]
    assert workload.assumptions[0] == (
        "times are in s; they are dates, counted from the first arrival"
    )


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"model": "m", "prompt": [1], "created": "now"}, "created: expected 0 to less than 10995"),
        (
            {"model": "m", "prompt": [1], "created": -1},
            "created: expected 0 to less than 1099511627776 seconds since 1970, got -1",
        ),
        ({"messages": []}, "messages: expected messages, a text or token ids, got []"),
        ({"messages": "hi"}, "messages: expected messages, a text or token ids"),
        ({"messages": [{"content": "x"}]}, "messages: expected objects with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages: expected a text as content"),
        ({"model": "m", "prompt": ["a", "b"]}, "prompt: expected messages, a text or token ids"),
        ({"custom_id": "a", "body": 3}, "body: expected a JSON object, got 3"),
        ({"url": "/v1/embeddings", "custom_id": "a", "body": {"input": "x"}}, "got embeddings"),
        ({"model": "m", "prompt": "a", "max_tokens": -1}, "max_tokens: expected a positive"),
    ],
)
def test_bad_openai_requests_are_one_line(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    assert f":1: {told}" in refusal(write(tmp_path, [row]), tokenizer=Letters()).replace(
        "url: expected a request that generates text, ", ""
    )


def test_conversations_become_turns(tmp_path: Path) -> None:
    talk = [("human", "hello"), ("gpt", "hi"), ("human", "more"), ("gpt", "no"), ("human", "ok")]
    rows = [
        {"id": "a", "conversations": [{"from": who, "value": text} for who, text in talk]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "first"}]},
        {"id": "c", "conversations": []},
        {"id": "d", "conversations": [{"from": who, "value": text} for who, text in talk[:2]]},
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    workload = read_trace(path, tokenizer=Letters())
    assert [letters(workload.prompt(i)) for i in range(3)] == [
        *("hello\n", "hello\nhimore\n", "hello\n")
    ]
    assert [letters(workload.output(i)) for i in range(3)] == ["hi", "no", "hi"]
    assert workload.next_turns.tolist() == [1, -1, -1]
    assert "4 conversations; a turn follows the answer before it at once" in workload.assumptions
    assert any(line.startswith("no row has a time") for line in workload.assumptions)
    assert len(read_trace(path, tokenizer=Letters(), limit=1)) == 1


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "hi"}]}])
    assert "--tokenizer FILE names a tokenizer.json" in refusal(path)
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}", encoding="utf-8")
    require("tokenizers")
    assert "which cannot be loaded" in refusal(path, tokenizer=str(bad))
    for name in (tmp_path / "no.json", tmp_path / "none", tmp_path / "trace.jsonl"):
        assert "which cannot be loaded" in refusal(path, tokenizer=name)


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    tokenizers = require("tokenizers")
    words = tokenizers.models.WordLevel({"user": 0, "hi": 1, "?": 2}, unk_token="?")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "hi there"}]}])
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert read_trace(path, tokenizer=name).prompt(0).tolist() == [0, 1, 2]
    path.write_text('{"model": "m", "prompt": "\\ud800"}', encoding="utf-8")
    assert ":1: 'utf-8' codec can't encode" in refusal(path, tokenizer=tmp_path)


# -- detection -------------------------------------------------------------------------------------
def test_unknown_fields_are_listed_with_the_formats(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt_size": 4, "who\n": 1}])
    told = refusal(path)
    assert told.startswith(f"{path}: expected a trace in one of the formats kvcore, mooncake, ")
    assert 'got JSON with the fields "prompt_size", "who\\n"; --format NAME' in told
    with pytest.raises(ValueError, match="format: expected one of kvcore, mooncake"):
        read_trace(path, format="moon")


def test_a_forced_format_gives_the_error_of_its_row(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt_size": 4}])
    assert ":1: input_length: expected a positive integer" in refusal(path, format="mooncake")
    assert ":1: expected the columns TIMESTAMP" in refusal(path, format="azure")
    assert ":1: kvcore_trace: expected version 1" in refusal(path, format="kvcore")


def test_a_long_first_row_is_found(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 16 * 30_000, "hash_ids": list(range(30_000))}
    assert len(read_trace(write(tmp_path, [row, row]))) == 2


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    lines = (f"{json.dumps(row)}\n" for row in random_prompts(1, 64, requests=4000))
    path.write_bytes(gzip.compress("".join(lines).encode()))
    seen: list[int] = []
    read_trace(path, on_progress=seen.append)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= path.stat().st_size


# -- a long log ------------------------------------------------------------------------------------
LOG = Path(__file__).parents[3] / "bench" / "trace_log.py"


@pytest.mark.skipif(not LOG.exists(), reason="the checkout has the generator, the wheel does not")
def test_a_long_log_takes_little_memory_and_has_its_hits(tmp_path: Path) -> None:
    write_log = runpy.run_path(str(LOG))["write_log"]
    path, again = tmp_path / "log", tmp_path / "again"
    size = write_log(path, 3000)
    write_log(again, 3000)
    assert path.read_bytes() == again.read_bytes()
    tracemalloc.start()
    try:
        workload = read_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * size
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(a["timestamp"] <= b["timestamp"] for a, b in itertools.pairwise(rows))
    assert hits(workload, 64) == expected(rows, 64) > 100_000
