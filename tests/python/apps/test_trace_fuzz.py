# SPDX-License-Identifier: Apache-2.0
"""Readers of traces on arbitrary input: a workload or one line of error, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcore.apps.traces.json_values import JsonDocument, top_keys
from kvcore.replay import TRACE_FORMATS, TraceError, read_trace

MOST_BYTES = 64 << 20
_KEPT = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Letters:
    """A tokenizer with one token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return type("Encoding", (), {"ids": [ord(letter) for letter in text]})


def session_tar() -> bytes:
    document = {"block_size": 64, "requests": [{"t": 0, "in": 70, "out": 1, "hash_ids": [1]}]}
    data = json.dumps(document).encode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as files:
        info = tarfile.TarInfo("a.json")
        info.size = len(data)
        files.addfile(info, io.BytesIO(data))
    return file.getvalue()


SEEDS: dict[str, bytes] = {
    "kvcore": b'{"kvcore_trace":1,"time_unit":"s","content":"blocks","block_size":64}\n'
    b'{"time":0,"input":70,"output":1,"blocks":[1,2]}\n',
    "mooncake": b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n',
    "bailian": b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, '
    b'"output_length": 3, "hash_ids": [1, 2]}\n',
    "sessions": session_tar(),
    "tokens": b'{"timestamp": 1, "token_ids": [1, 2, 3], "output_token_ids": [4]}\n',
    "openai": b'{"body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, '
    b'"custom_id": "a"}\n',
    "sharegpt": b'[{"id": "a", "conversations": [{"from": "human", "value": "x"}, '
    b'{"from": "gpt", "value": "y"}]}]',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,x,472,18\n",
    "lengths": b'{"timestamp": 1, "input_length": 20, "output_length": 3}\n',
}
assert SEEDS.keys() == set(TRACE_FORMATS)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, "2023-01-01 00:00:00", -1, 0, 2**24, 2**24 + 1, 2**64, 1e400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def outcome(path: Path, data: bytes, name: str, **options: Any) -> str:
    """Read a trace of the format `name`; return its error, or "" if all requests are replayed."""
    path.write_bytes(data)
    tokenizer = Letters() if name in ("openai", "sharegpt") else None
    try:
        workload = read_trace(path, tokenizer=tokenizer, **options)
    except TraceError as error:
        text = str(error)
        assert text.startswith(str(path))
        assert "\n" not in text
        assert len(text) < len(str(path)) + 600
        return text
    assert len(workload) > 0
    assert workload.prompt_lengths.min() >= 1
    assert workload.output_lengths.min() >= 1
    assert np.isfinite(workload.arrivals).all()
    assert (np.diff(workload.arrivals) >= 0).all()
    assert all(line.isprintable() for line in workload.assumptions)
    for index in range(min(len(workload), 3)):
        assert len(workload.prompt(index)) == workload.prompt_lengths[index]
        assert workload.output(index).min() >= 0
    return ""


@pytest.mark.parametrize("name", TRACE_FORMATS)
def test_seeds_are_read(tmp_path: Path, name: str) -> None:
    assert outcome(tmp_path / "t", SEEDS[name], name, format=name) == ""
    if name != "lengths":
        assert outcome(tmp_path / "t", SEEDS[name], name) == ""


@pytest.mark.parametrize("name", TRACE_FORMATS)
@given(data=st.data())
@_KEPT
def test_changed_bytes(tmp_path: Path, name: str, data: st.DataObject) -> None:
    text = bytearray(SEEDS[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 8))
        text[at : at + cut] = data.draw(st.binary(max_size=6))
    whole = bytes(text)
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole)))]
    if data.draw(st.booleans()):
        whole = gzip.compress(whole, 1)
        whole = whole[: data.draw(st.integers(1, len(whole)))]
    outcome(tmp_path / "t", whole, name)
    outcome(tmp_path / "t", whole, name, format=name)


@pytest.mark.parametrize("name", [each for each in TRACE_FORMATS if b"{" in SEEDS[each]])
@given(data=st.data())
@_KEPT
def test_changed_fields(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Replace any value in any place by any other value."""
    raw = SEEDS[name]
    if name == "sessions":
        raw = raw[raw.index(b"{") : raw.rindex(b"}") + 1]
    lines = raw.decode().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    row = json.loads(lines[at])
    place = row
    while True:
        if isinstance(place, dict):
            key: Any = data.draw(st.sampled_from(sorted(place)) | st.text(max_size=3))
        else:
            key = data.draw(st.integers(0, len(place) - 1))
        inner = place[key] if not isinstance(place, dict) or key in place else None
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            place[key] = data.draw(values)
            break
        place = inner
    lines[at] = json.dumps(row)
    outcome(tmp_path / "t", "\n".join([*lines, lines[-1]]).encode(), name, format=name)


@given(text=st.text(max_size=60) | st.just("{" * 3000) | st.just('{"a":' * 3000))
def test_fields_of_any_text(text: str) -> None:
    assert isinstance(top_keys(text), list)


@given(value=values, sizes=st.lists(st.integers(1, 9), min_size=1))
@example(value=-0.0, sizes=[2])
@example(value=1.5e300, sizes=[1])
@example(value="\U0001f600", sizes=[1])
def test_documents_in_pieces_are_documents(value: Any, sizes: list[int]) -> None:
    data = json.dumps([value, {"a": value}]).encode()
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    document = JsonDocument(pieces)
    assert json.dumps(list(document.items())).encode() == data
    document.end()


GIANTS = {
    "number": b'{"timestamp": 1' + b"0" * 100_000 + b', "input_length": 1, "hash_ids": [1]}',
    "exponent": b'{"timestamp": 1e999999, "input_length": 600, "hash_ids": [1, 2]}',
    "infinity": b'{"timestamp": 5, "input_length": Infinity, "hash_ids": [1]}',
    "deep list": b'{"hash_ids": ' + b"[" * 1_000_000,
    "deep object": b'{"hash_ids": ' + b'{"a":' * 500_000,
    "deep array": b"[" * 1_000_000,
    "deep sessions": b'{"block_size": 64, "requests": [' + b'{"type":"subagent","requests":[' * 400,
    "text": b'{"hash_ids": "' + b"x" * 10_000_000,
    "zeros": bytes(10_000_000),
    "one line": b"x" * 17_000_000,
    "names": b'{"hash_ids": [1], ' + b",".join(b'"%d": 1' % n for n in range(100_000)) + b"}",
    "columns": b"TIMESTAMP,ContextTokens,GeneratedTokens" + b",x" * 1_000_000,
    "quote": b'TIMESTAMP,ContextTokens,GeneratedTokens\n"' + b"x\n" * 2_000_000,
}


@pytest.mark.parametrize("name", GIANTS)
def test_giant_rows_take_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t"
    tracemalloc.start()
    try:
        assert outcome(path, GIANTS[name], name) != ""
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES + 12 * len(GIANTS[name])


def test_small_packed_files_that_unpack_without_end(tmp_path: Path) -> None:
    """A compressed array of one giant value ends at the bound of a value."""
    path = tmp_path / "t.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'[{"conversations": [{"from": "human", "value": "')
        for _ in range(80):
            file.write(b"x" * (1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TraceError, match="expected at most 67108864 characters in a value"):
        read_trace(path, tokenizer=Letters())
