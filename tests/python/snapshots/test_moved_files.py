# SPDX-License-Identifier: Apache-2.0
"""Changed, cut or made-up files of moved requests are refused, and the manager is unchanged."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import PagedKVCacheManager, moving
from kvcore.snapshots import format as tensors
from moved_requests import assert_reads, moving_manager, moving_params, written_request
from state_model import prefill, state_manager, state_params
from tables import table

PROMPT = [(5 * i + 1) % 7 for i in range(10)]


@cache
def valid() -> bytes:
    manager = moving_manager(moving_params(n_kv_heads=1, head_dim=2))
    written_request(manager, "r", PROMPT, extra_keys=[(2, 2, b"cat")])
    return manager.export_sequence("r", model="m")


@cache
def valid_states() -> bytes:
    manager = state_manager(state_params())
    prefill(manager, "r", PROMPT)
    return manager.export_sequence("r")


@cache
def target() -> PagedKVCacheManager:
    return moving_manager(moving_params(n_kv_heads=1, head_dim=2))


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(header: Any, body: bytes, *, signs: bool = True) -> bytes:
    """Return a file with that header and correct checksums, as if its writer intended it."""
    if signs and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"].pop("header_sha256", None)
        header["__metadata__"]["header_sha256"] = tensors._digest(header)
    return with_text(tensors._header_text(header), body)


def with_text(text: bytes, body: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + body


def assert_exact_or_refused(data: bytes) -> bool:
    """Return true if the import is refused; otherwise check that the contents are right."""
    manager = target()
    before = (manager.num_free_blocks, manager.num_cached_blocks)
    try:
        saved = moving.read_sequence(data)
        context = saved.context("r")
        assert manager.import_sequence(context, saved)
    except ValueError as error:
        assert 10 < len(str(error)) < 1000
        assert (manager.num_free_blocks, manager.num_cached_blocks) == before
        assert not manager.contains("r")
        return True
    assert saved.written == 10
    assert saved.tokens[:10].tolist() == PROMPT
    assert_reads(manager, context)
    manager.release("r")
    manager.reset_prefix_cache()
    return False


def test_the_file_as_it_was_written_is_read() -> None:
    assert not assert_exact_or_refused(valid())
    header, body = header_of(valid())
    assert not assert_exact_or_refused(with_header(header, body))


def test_every_flipped_byte_is_noticed() -> None:
    data = valid()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        assert assert_exact_or_refused(bytes(changed)), f"byte {place}"


def test_every_length_but_the_whole_is_refused() -> None:
    data = valid()
    for n in [*range(64), *range(64, len(data), 61), len(data) - 1]:
        assert assert_exact_or_refused(data[:n])
    assert assert_exact_or_refused(data + b"\0")
    assert assert_exact_or_refused(data + data)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 100_000_001, 0, 1])
def test_lengths_of_headers(length: int) -> None:
    assert assert_exact_or_refused(length.to_bytes(8, "little") + valid()[8:])


def changes(header: dict[str, Any]) -> dict[str, Any]:
    """Return headers that were made up and then signed correctly."""
    name = "layers.1.k"
    metadata = header["__metadata__"]

    def tensor(**fields: Any) -> dict[str, Any]:
        return header | {name: header[name] | fields}

    def told(**fields: Any) -> dict[str, Any]:
        texts = {
            key: value if isinstance(value, str) else tensors.json_text(value)
            for key, value in fields.items()
        }
        return header | {"__metadata__": metadata | texts}

    begin, end = header[name]["data_offsets"]
    nested = "[" * 100_000
    return {
        "overlap": tensor(data_offsets=[0, end - begin]),
        "beyond the end": tensor(data_offsets=[begin, 2**62]),
        "backwards": tensor(data_offsets=[end, begin]),
        "negative": tensor(data_offsets=[-1, end]),
        "floats": tensor(data_offsets=[float(begin), float(end)]),
        "bools": tensor(data_offsets=[False, True]),
        "a huge shape": tensor(shape=[2**40, 2**40, 2**40]),
        "an empty shape": tensor(shape=[0, 2**60]),
        "another shape": tensor(shape=[1, 10, 2]),
        "no shape": tensor(shape=None),
        "many axes": tensor(shape=[1] * 10_000),
        "another dtype": tensor(dtype="I32"),
        "no dtype": tensor(dtype="F7"),
        "a list for a dtype": tensor(dtype=["F32"]),
        "more fields": tensor(more=1),
        "no entry": header | {name: None},
        "one tensor less": {key: value for key, value in header.items() if key != name},
        "another name": {("x" if key == name else key): value for key, value in header.items()},
        "version 2": told(version=2),
        "another format": told(format="kvcore.snapshot"),
        "a format that is a list": told(format=[1]),
        "no metadata": {key: value for key, value in header.items() if key != "__metadata__"},
        "metadata of lists": header | {"__metadata__": [1]},
        "metadata that is no text": header | {"__metadata__": metadata | {"version": 1}},
        "nested": told(layers=nested),
        "more metadata": told(more=1),
        "written 0": told(written=0),
        "written more than there is": told(written=11),
        "written huge": told(written=2**80),
        "written true": told(written=True),
        "written as a float": told(written=10.0),
        "written NaN": told(written="NaN"),
        "written nothing": told(written=None),
        "indices": told(start_idx=11, active_idx=3),
        "end": told(end_idx=12),
        "layers": told(layers={}),
        "a layer more": told(layers=json.loads(metadata["layers"]) | {"2": [0, 1, [2, 2]]}),
        "layers of text": told(layers={"x": [0, 1, [2, 2]]}),
        "layers of other digits": told(layers={"٣": [0, 1, [2, 2]]}),
        "layer 00": told(layers={"00": [0, 1, [2, 2]], "1": [0, 1, [2, 2]]}),
        "a long layer": told(layers={"1" * 5000: [0, 1, [2, 2]]}),
        "layers that are a list": told(layers=[1, 2]),
        "layers without widths": told(layers={"0": [0, 1], "1": [0, 1]}),
        "layers of many widths": told(layers={"0": [0, 1, [2, 2, 2]], "1": [0, 1, [2, 2]]}),
        "layers that begin later": told(layers={"0": [5, 1, [2, 2]], "1": [0, 1, [2, 2]]}),
        "layers behind the end": told(layers={"0": [50, 1, [2, 2]], "1": [0, 1, [2, 2]]}),
        "states": told(states=[[[0], {"conv": [[2], "float32"]}]]),
        "states of anything": told(states=[7]),
        "scales": told(kv_scale_granularity=2),
        "scales of nothing": told(kv_scale_granularity=0),
        "scales wider than rows": told(kv_scale_granularity=64),
        "another kv dtype": told(dtype="bfloat16"),
        "no kv dtype": told(dtype=["float32"]),
        "int32": told(dtype="int32"),
        "a page of nothing": told(page_size=0),
        "a key of nothing": told(extra_keys=[[2, 0, "00"]]),
        "a key behind the end": told(extra_keys=[[200, 2, "00"]]),
        "a key without end": told(extra_keys=[[2, 2**31, "00"]]),
        "a key in other digits": told(extra_keys=[[2, 2, "AA"]]),
        "a text with spaces": told(extra_keys='[[2, 2, "00"]]'),
        "a key that is no hex": told(extra_keys=[[2, 2, "xx"]]),
        "keys of anything": told(extra_keys=7),
        "a salt that is a number": told(cache_salt=5),
        "a model that is a list": told(model=[]),
        "no checksums": told(sha256={}),
        "checksums of anything": told(sha256=7),
        "another checksum": told(sha256=dict.fromkeys(json.loads(metadata["sha256"]), "00")),
    }  # fmt: skip


@table("change", changes(header_of(valid())[0]))
def test_signed_headers_that_say_something_else(change: str) -> None:
    header, body = header_of(valid())
    assert assert_exact_or_refused(with_header(changes(header)[change], body))


def test_the_checksum_of_the_header_is_compared() -> None:
    header, body = header_of(valid())
    header["__metadata__"]["cache_salt"] = '"another"'
    with pytest.raises(ValueError, match="the checksum of the header does not match its text"):
        moving.read_sequence(with_header(header, body, signs=False))


def test_the_checksum_of_the_header_is_of_all_its_entries() -> None:
    """Other programs that read files of kvcore compute the checksum in this way."""
    header, _ = header_of(valid())
    found = header["__metadata__"].pop("header_sha256")
    assert len(header) > 1
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert found == hashlib.sha256(text.encode()).hexdigest()


def test_spaces_and_order_of_the_header_are_those_that_are_written() -> None:
    header, body = header_of(valid())
    text = valid()[8 : len(valid()) - len(body)]
    assert with_text(text, body) == valid()
    for other in (
        text + b" " * 8,
        b" " * 8 + text,
        text.replace(b'},"', b'}, "'),
        json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode(),
        text.replace(b"k", rb"\u006b", 1),
    ):
        with pytest.raises(ValueError, match="the header has other spaces, another order"):
            moving.read_sequence(with_text(other, body))


def test_headers_nested_as_deep_as_they_are_parsed() -> None:
    header, body = header_of(valid())
    header["__metadata__"]["header_sha256"] = "0" * 64
    for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit() + 1):
        text = tensors.json_text(header | {"x": 7}).replace(
            '"x":7', '"x":' + "[" * depth + "]" * depth
        )
        with pytest.raises(ValueError, match="the data is damaged"):
            moving.read_sequence(with_text(text.encode(), body))


def test_thousands_of_layers_fit_in_a_header_and_no_more_is_written() -> None:
    row = np.zeros((1, 1, 1), np.float32)
    names = ("k", "k_scale", "v", "v_scale")
    many = {f"layers.{i}.{name}": row for i in range(4000) for name in names}
    layers = {str(i): [10**6, 128, [1024, 1024]] for i in range(4000)}
    parts = tensors.pack(many, {"layers": layers})
    room = len(many) * len("[1000000,128,1024][1000000000000,1000000000000]")
    assert len(parts[1]) + room < tensors._MOST_HEADER
    found, metadata = tensors.unpack(b"".join(parts))
    assert (found.keys(), metadata) == (many.keys(), {"layers": layers})
    with pytest.raises(ValueError, match="must be at most 4194304; pass digests"):
        tensors.pack({}, {"extra_keys": "0" * (4 << 20)})
    with pytest.raises(ValueError, match="a header of 4194305 bytes"):
        tensors.unpack(((4 << 20) + 1).to_bytes(8, "little") + bytes(5 << 20))


def test_tensors_are_read_only_views() -> None:
    data = bytearray(valid())
    saved = moving.read_sequence(data)
    for array in (saved.tokens, *saved.tensors.values()):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    data[-1] ^= 1  # the caller's data is not copied
    last = header_of(valid())[0]["tokens"]
    assert last["data_offsets"][1] == len(data) - 8 - int.from_bytes(data[:8], "little")
    assert saved.tokens[-1] != moving.read_sequence(valid()).tokens[-1]


def test_a_small_file_asks_for_little_memory() -> None:
    header, body = header_of(valid())
    for length in (2**20 + 10, 2**28):
        header["__metadata__"]["extra_keys"] = tensors.json_text([[2, length, "aa"]])
        saved = moving.read_sequence(with_header(header, body))
        with pytest.raises(ValueError, match="must reach at most 1048576 past them"):
            saved.context("r")
    header["__metadata__"]["extra_keys"] = tensors.json_text([[2, 2**20, "aa"]])
    context = moving.read_sequence(with_header(header, body)).context("r")
    assert (context.extra_keys, context.end_idx) == (((2, 2**20, b"\xaa"),), 11)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b"\xff\xfe\xfd",
        b"9" * 100_000,
        b'{"__metadata__": {}}',
    ],
    ids=lambda text: text[:20].decode("latin1"),
)
def test_headers_that_are_no_header(text: bytes) -> None:
    with pytest.raises(ValueError, match="the data is damaged"):
        moving.read_sequence(len(text).to_bytes(8, "little") + text)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(data=st.data())
def test_mutated_files(data: Any) -> None:
    """Change, move and cut bytes, in the header and in the tensors."""
    changed = bytearray(valid())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "swap"]))
        if kind == "set":
            changed[place] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            changed[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        elif kind == "delete":
            del changed[place : place + data.draw(st.integers(1, 9))]
        else:
            other = data.draw(st.integers(0, len(changed) - 1))
            changed[place], changed[other] = changed[other], changed[place]
        changed = changed or bytearray(b"x")
    assert_exact_or_refused(bytes(changed))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


@given(data=st.data())
def test_signed_headers_with_any_value_anywhere(data: Any) -> None:
    header, body = header_of(valid())
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(sorted(header[name])))
    value = data.draw(_VALUES)
    header[name][field] = tensors.json_text(value) if name == "__metadata__" else value
    assert_exact_or_refused(with_header(header, body))


@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_mutated_files_of_states(place: int, value: int) -> None:
    changed = bytearray(valid_states())
    changed[place % len(changed)] = value
    manager = state_manager(state_params())
    try:
        saved = moving.read_sequence(bytes(changed))
        assert manager.import_sequence(saved.context("r"), saved)
    except ValueError:
        assert not manager.contains("r")
        return
    assert manager.export_sequence("r") == valid_states()


def test_contents_are_what_the_checksums_are_of() -> None:
    header, body = header_of(valid())
    sums = json.loads(header["__metadata__"]["sha256"])
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert sums[name] == hashlib.sha256(body[begin:end]).hexdigest()
