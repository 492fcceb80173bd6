# SPDX-License-Identifier: Apache-2.0
"""Traces from pipes, and traces without an end."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import slow_but
from kvcore.apps.traces import blocks, source
from kvcore.replay import TraceError, read_trace
from trace_files import row

ROWS = [row([0, n], timestamp=n) for n in range(40)]
TEXT = "".join(f"{json.dumps(each)}\n" for each in ROWS).encode()
PACKED = gzip.compress(TEXT)

needs_fifos = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")


def whole(data: bytes) -> list[bytes]:
    return [data]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[:1], data[1:2], data[2:3], data[3:]]


@needs_fifos
@pytest.mark.parametrize("data", [TEXT, PACKED], ids=["plain", "gzip"])
@pytest.mark.parametrize("cut", [whole, byte_by_byte])
def test_named_pipe_is_read_as_a_file(
    tmp_path: Path, data: bytes, cut: Callable[[bytes], list[bytes]]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as pipe:
            for part in cut(data):
                pipe.write(part)

    writer = threading.Thread(target=write)
    writer.start()
    workload = read_trace(path)
    writer.join()
    assert workload.prompt_lengths.tolist() == [1024] * 40
    assert workload.arrivals.tolist() == [n / 1e3 for n in range(40)]


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="there is no /dev/stdin")
@pytest.mark.parametrize("data", slow_but([TEXT], [TEXT, PACKED]), ids=["plain", "gzip"])
def test_program_reads_its_input(data: bytes) -> None:
    command = [sys.executable, "-m", "kvcore", "replay", "/dev/stdin", "--json"]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["requests"] == 40


@pytest.mark.parametrize("data", [b"", b"\x1f", b"\n", TEXT[:1]])
def test_beginnings_that_are_too_short_to_tell_are_text(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="expected"):
        read_trace(path)


def test_several_gzip_members_are_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(PACKED + PACKED)
    assert len(read_trace(path)) == 80


# -- bounds ----------------------------------------------------------------------------------------
def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    return str(caught.value)


@pytest.mark.slow
def test_small_file_of_many_lines_is_refused_at_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(11):
            file.write(b"\n" * 1_000_000)
    assert path.stat().st_size < 100_000
    assert refused(path) == (
        f"{path}:10000001: expected at most 10000000 lines, including blank lines"
    )


def test_line_without_an_end_is_refused_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MOST_LINE_CHARACTERS", 5_000)
    path = tmp_path / "line"
    path.write_bytes(TEXT + b" " * 5_000 + b"\n")
    assert refused(path) == f"{path}:41: expected at most 5000 characters in a line"
    path.write_bytes(TEXT + b" " * 4_999 + b"\n")
    assert len(read_trace(path)) == 40


def test_text_is_counted_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    path.write_bytes(PACKED)
    monkeypatch.setattr(source, "MOST_CHARACTERS", len(TEXT))
    assert len(read_trace(path)) == 40
    monkeypatch.setattr(source, "MOST_CHARACTERS", len(TEXT) - 1)
    assert refused(path) == f"{path}:40: expected at most {len(TEXT) - 1} characters, decompressed"
    assert len(read_trace(path, limit=39)) == 39


def test_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    path.write_bytes(TEXT)
    monkeypatch.setattr(blocks, "MAX_BLOCKS", 79)
    assert ":40: hash_ids: expected at most 79 ids in all requests, got 80" in refused(path)
    assert len(read_trace(path, limit=39)) == 39


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_device_without_an_end_is_refused() -> None:
    told = refused(Path("/dev/zero"))
    assert told == f"/dev/zero:1: expected at most {1 << 24} characters in a line"


def test_help_tells_the_bounds() -> None:
    command = [sys.executable, "-m", "kvcore", "replay", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "10,000,000 lines and 4 GiB decompressed" in " ".join(done.stdout.split())
