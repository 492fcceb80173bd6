# SPDX-License-Identifier: Apache-2.0
"""The program writes to pipes without a reader, full disks and closed streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.apps.cli.main import main
from trace_files import row, write_trace

PLAN = ["plan", "llama-3.1-8b", "--memory", "80GiB", "--max-seq-len", "32k"]
COMMANDS = {"help": ["--help"], "info": ["info"], "table": PLAN, "json": [*PLAN, "--json"]}

needs_shell = pytest.mark.skipif(not Path("/bin/sh").exists(), reason="there is no shell")


def program(*arguments: str, shell: str) -> subprocess.CompletedProcess[str]:
    """Run the program from a shell line, which calls it as "$@"."""
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "kvcore", *arguments]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=buffered)


def run_unread(*arguments: str) -> tuple[int, str]:
    """Run the program with an output that no process reads; return exit code and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvcore", *arguments]
    with open(writer, "wb") as output:  # noqa: PTH123 - a descriptor
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_nobody_reads_ends_quietly(command: str) -> None:
    assert run_unread(*COMMANDS[command]) == (1, "")


def test_replay_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, row([0]))
    assert run_unread("replay", str(trace)) == (1, "")


@needs_shell
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_full_disk_is_one_line_and_exit_1(command: str) -> None:
    done = program(*COMMANDS[command], shell='"$@" >/dev/full')
    assert done.returncode == 1
    assert done.stderr.startswith("kvcore: error: ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_shell
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("closed", ["1", "2"])
def test_closed_streams_change_nothing_else(command: str, closed: str) -> None:
    done = program(*COMMANDS[command], shell=f'"$@" {closed}>&-')
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2")


@needs_shell
def test_replay_with_a_closed_stream(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, row([0]))
    done = program("replay", str(trace), shell='"$@" 2>&-')
    assert done.returncode == 0
    assert "requests served" in done.stdout


@needs_shell
def test_error_that_nobody_reads_keeps_its_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvcore", "fly"]
    with open(writer, "wb") as unread:  # noqa: PTH123 - a descriptor
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=unread, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


def test_characters_that_the_output_lacks_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    folder = tmp_path / "ñ"
    folder.mkdir()
    trace = write_trace(folder, row([0])).rename(folder / "[b]\udcffñ.jsonl")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    assert main(["replay", str(trace)]) == 0
    assert b"[b]\\udcff\\xf1.jsonl, online" in written.getvalue()


def test_errors_are_one_line_of_bounded_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x" * 100_000 + "\nfly"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert len(told) < 2_100
