# SPDX-License-Identifier: Apache-2.0
"""Files in formats that no reader reads: one line names the format and a command."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from cli_runs import refused
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.replay import TraceError, read_trace

ROW = b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n'


def zipped(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.jsonl", data)
    return packed.getvalue()


FILES = {
    # A frame of zstd with one raw block, and the first page header of a Parquet file.
    "zstd": (b"\x28\xb5\x2f\xfd\x20\x41\x09\x02\x00" + ROW, "zstd -dc FILE | kvcore replay -"),
    "Parquet": (b"PAR1\x15\x04\x15\xc0\x0c\x15\x90", "pandas.read_parquet(FILE).to_json("),
    "xz": (lzma.compress(ROW), "xz -dc FILE | kvcore replay -"),
    "bzip2": (bz2.compress(ROW), "bzip2 -dc FILE | kvcore replay -"),
    "zip": (zipped(ROW), "unzip -p FILE | kvcore replay -"),
    "lz4": (b"\x04\x22\x4d\x18\x64\x40\xa7" + ROW, "lz4 -dc FILE | kvcore replay -"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c\x00\x04" + ROW, "7z x -so FILE | kvcore replay -"),
    "Arrow": (b"ARROW1\x00\x00\xff\xff\xff\xff" + ROW, "pandas.read_feather(FILE).to_json("),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_reader_reads_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    data, remedy = FILES[name]
    path = tmp_path / "trace.jsonl"
    for content in (data, gzip.compress(data)):
        path.write_bytes(content)
        for option in ([], ["--format", "mooncake"]):
            error = refused(capsys, "replay", path, *option)
            assert f"expected text, gzip or tar, got a file in the format {name}; " in error
            assert remedy in error
    target = tmp_path / "out.jsonl"
    assert remedy in refused(capsys, "trace", "convert", path, target)
    assert not target.exists()


@pytest.mark.parametrize("name", ["PAR1", "BZh", "PK", "7z"])
def test_text_with_the_same_first_letters_is_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{name},Timestamp,Request tokens,Response tokens\n1,0,5,1\n")
    assert len(read_trace(path)) == 1
    path.write_text(name)
    with pytest.raises(TraceError, match=f"got {name}"):
        read_trace(path)


@pytest.mark.parametrize("name", ["out.jsonl.zst", "out.parquet", "out.XZ", "out.tgz"])
def test_no_file_has_the_name_of_another_format(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path, target = tmp_path / "in", tmp_path / name
    path.write_bytes(ROW)
    suffix = target.suffix
    for command in (
        ["convert", path, target, "--block-size", 5],
        ["capture", "inproc://x", target],
    ):
        told = f"'OUT': {name}: expected a name for JSON lines, or .gz for gzip, got {suffix}"
        assert told in refused(capsys, "trace", *command)
    with pytest.raises(ValueError, match=f"got {suffix}"):
        write_trace(load_trace(str(path), ReadOptions(block_size=5)), target)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
