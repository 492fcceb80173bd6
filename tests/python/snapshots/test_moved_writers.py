# SPDX-License-Identifier: Apache-2.0
"""Exported requests are written to files completely or not at all, with open()'s modes."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcore import moving
from moved_requests import PROMPT, moving_manager, written_request
from programs import HELPERS


class ShortWrites(io.RawIOBase):
    """A raw file that takes few bytes at a time, and later returns `answer`."""

    def __init__(self, most: int = 2**40, answer: Any = None) -> None:
        self.found, self.most, self.answer = b"", most, answer

    def write(self, data: Any) -> Any:
        if len(self.found) >= self.most:
            return self.answer
        taken = bytes(data[: 1 + len(self.found) % 100])
        self.found += taken
        return len(taken)


def test_files_that_take_few_bytes_at_a_time() -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    file = ShortWrites()
    manager.export_sequence("r", file)  # type: ignore[call-overload]
    assert file.found == manager.export_sequence("r")
    with pytest.raises(BlockingIOError, match="takes no more bytes now"):
        manager.export_sequence("r", ShortWrites(1000))  # type: ignore[call-overload]
    for answer in (0, -1, 2**20):
        with pytest.raises(OSError, match=f"the file took {answer} of"):
            manager.export_sequence("r", ShortWrites(1000, answer))  # type: ignore[call-overload]


def test_permissions_are_those_of_a_file_that_is_opened(tmp_path: Path) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    for umask in (0o022, 0o027, 0o077):
        path, opened = tmp_path / f"r{umask}.kv", tmp_path / f"opened{umask}"
        before = os.umask(umask)
        try:
            manager.export_sequence("r", path)
            opened.touch()
        finally:
            os.umask(before)
        assert path.stat().st_mode == opened.stat().st_mode
        path.chmod(0o640)
        manager.export_sequence("r", path)
        assert path.stat().st_mode & 0o777 == 0o640


def test_links_are_followed(tmp_path: Path) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.kv", tmp_path / "r.kv"
    link.symlink_to("folder/target.kv")
    for _ in range(2):  # first the link's target is missing, then it exists
        manager.export_sequence("r", link)
        assert link.is_symlink()
        assert target.read_bytes() == manager.export_sequence("r")
        assert sorted(each.name for each in tmp_path.rglob("*")) == ["folder", "r.kv", "target.kv"]


def test_devices_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    manager.export_sequence("r", pipe)
    reader.join()
    assert pipe.is_fifo()
    assert found == [manager.export_sequence("r")]
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    manager.export_sequence("r", link)
    assert Path(os.devnull).is_char_device()
    assert link.is_symlink()


_WRITER = """
import sys
from moved_requests import moving_manager, moving_params, written_request
manager = moving_manager(moving_params(n_kv_heads=8, head_dim=256), num_pages=64)
written_request(manager, "r", list(range(150)))
print("ready", flush=True)
while True:
    manager.export_sequence("r", sys.argv[1])
"""


def kill_writer(path: Path, seconds: float) -> None:
    """Start a process that writes the file again and again, and kill it after some time."""
    environment = os.environ | {
        "PYTHONPATH": HELPERS + os.pathsep + os.environ.get("PYTHONPATH", "")
    }
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()


def run_kills(folder: Path, n: int) -> None:
    path, draw = folder / "r.kv", random.Random(n)
    for _ in range(n):
        kill_writer(path, draw.uniform(0.002, 0.1))
        if path.exists():
            assert moving.read_sequence(path).written == 150


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    run_kills(tmp_path, 3)


@pytest.mark.slow
def test_many_writers_that_are_killed(tmp_path: Path) -> None:
    run_kills(tmp_path, 25)
    assert (tmp_path / "r.kv").exists()
