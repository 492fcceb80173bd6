# SPDX-License-Identifier: Apache-2.0
"""The script for machines with a GPU, tested as far as possible without a GPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1] / "bench"
EXAMPLE = HERE / "gpu_result.json"

pytestmark = pytest.mark.slow  # runs bench scripts


class Graph:
    """Calls in the form of a graph of kernels."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def launch(self, stream: Any) -> None:
        for call in self.calls:
            call()


def host_library() -> Any:
    """Return the parts of cupy that the benches use, over host memory."""
    names = ("arange", "asarray", "empty", "float32", "full", "int32", "int64", "ones", "uint16",
             "uint32", "uint8", "zeros")  # fmt: skip
    rng = np.random.default_rng(1)
    library = SimpleNamespace(**{name: getattr(np, name) for name in names})
    library.random = SimpleNamespace(
        randint=np.random.RandomState(1).randint,
        standard_normal=lambda shape, kind: rng.standard_normal(shape, kind),
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    library.cuda = SimpleNamespace(get_current_stream=lambda: stream)
    return library


@pytest.fixture
def gpu_result(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_result

    return gpu_result


def script(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(BENCH / "gpu_lease.sh"), *arguments]
    environment = os.environ | {"PYTHON": python}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def program(folder: Path, *lines: str) -> str:
    """Write a program that replaces Python."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def test_a_dry_run_begins_every_step() -> None:
    done = script("--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "first_call_is_captured" in lines
    assert lines[0].startswith("ready")
    assert lines[-1] == "ready: every step can begin"


def test_without_a_gpu_it_ends_at_once_with_one_line(tmp_path: Path) -> None:
    python = program(tmp_path, "echo 'a driver that says why' >&2", "exit 1")
    out = tmp_path / "out"
    done = script(str(out), python=python)
    assert done.returncode == 2
    assert done.stderr == "no GPU: a driver that says why\n"
    assert not out.exists()


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "0"], ["a", "1", "c"], ["--unknown"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_a_step_that_hangs_ends_with_the_run_and_leaves_its_log(tmp_path: Path) -> None:
    line = '{"check": "first", "result": "ok"}'
    hangs = f"*gpu_checks*) echo '{line}'; exec sleep 600 ;;"
    python = program(tmp_path, 'case "$*" in', hangs, "*) echo done ;;", "esac")
    out = tmp_path / "out"
    done = script(str(out), "12", python=python)
    assert done.returncode == 1
    steps = [row.split("\t") for row in (out / "steps.tsv").read_text().splitlines()]
    names = "checks new-tests moves attention hosts memcheck other-tests racecheck"
    assert [row[0] for row in steps[1:]] == names.split()
    assert steps[0][1] == "0"
    assert {row[1] for row in steps[1:]} == {"124"}
    assert sum(int(row[2]) for row in steps) <= 12
    assert (out / "checks.jsonl").read_text().splitlines()[1:] == [line]
    again = script(str(out), python=python)
    assert (again.returncode, again.stderr) == (
        2,
        f"{out} has the steps of another run; name another folder\n",
    )


def test_the_example_is_what_rows_and_steps_make(gpu_result: Any) -> None:
    from harness import Row

    example = json.loads(EXAMPLE.read_text())
    gpu_result.check(example)
    rows = [
        Row(**{name: value for name, value in row.items() if name != "share"})
        for row in [*example["limits"], *example["rows"]]
    ]
    assert gpu_result.result(example["machine"], example["steps"], rows) == example
    assert {True, False} == {goal["met"] for goal in example["goals"]}


@pytest.mark.parametrize(
    ("part", "key"), [("machine", "device"), ("rows", "median"), ("steps", "exit_code")]
)
def test_what_is_no_result_is_refused_by_its_place(part: str, key: str, gpu_result: Any) -> None:
    found = copy.deepcopy(json.loads(EXAMPLE.read_text()))
    holder = found[part] if part == "machine" else found[part][0]
    del holder[key]
    with pytest.raises(ValueError, match=rf"{part}.*\.{key} is None"):
        gpu_result.check(found)
    del found[part]
    with pytest.raises(ValueError, match=part):
        gpu_result.check(found)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Benches over little host memory; they make the same calls as for a GPU."""
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_attention
    import gpu_limits
    import gpu_moves
    import gpu_timing

    def timed(calls: list[Any]) -> list[float]:
        for call in calls:
            call()
        return [1.0] * len(calls)

    library = host_library()
    for module in (gpu_attention, gpu_limits, gpu_moves, gpu_timing):
        monkeypatch.setattr(module, "library", lambda: library)
    for module in (gpu_attention, gpu_moves, gpu_timing):
        monkeypatch.setattr(module, "gpu_us", timed)
    for module in (gpu_moves, gpu_timing):
        monkeypatch.setattr(module, "copy_call", lambda to, source: lambda: np.copyto(to, source))
    monkeypatch.setattr(gpu_moves, "captured", Graph)
    sizes = {"_POOL_BYTES": 4 << 20, "_COPY_BYTES": 4 << 20, "_MOVED_BYTES": 1 << 20}
    counts = {"_LENGTH": 128, "_TOKENS": 64, "_STATES": 64, "_ROWS": 2, "_GRAPH_NODES": 2}
    for name, value in (sizes | counts).items():
        monkeypatch.setattr(gpu_moves, name, value)
    monkeypatch.setattr(gpu_attention, "_POOL_BYTES", 4 << 20)
    monkeypatch.setattr(gpu_attention, "_BATCHES", ((1, 256, 1), (2, 100, 1), (1, 64, 32)))
    for name in ("_NARROW_BATCH", "_HOST_BATCH"):
        monkeypatch.setattr(gpu_attention, name, (2, 100))
    return monkeypatch


@pytest.mark.usefixtures("on_host")
def test_every_move_is_made_and_timed() -> None:
    import gpu_moves

    rows = gpu_moves.measure(Namespace(quick=True))
    assert len({row.key for row in rows}) == len(rows) == 37
    moves = {"append", "gather", "copy_pages", "graph", "transfer"}
    assert {row.key.split(".")[1] for row in rows} >= moves


@pytest.mark.usefixtures("on_host")
def test_attention_is_timed_beside_what_is_there() -> None:
    import gpu_attention

    rows = gpu_attention.measure(Namespace(quick=True))
    names = [
        name
        for page in (16, 64)
        for name in (
            f"decode.1x256.{page}.copy",
            f"decode.2x100.{page}.copy",
            f"prefill.1x64.{page}",  # neither torch nor FlashInfer has a GPU here
        )
    ]
    names += [*(f"decode.{kind}.copy" for kind in ("float8_e4m3fn", "int8", "nvfp4")), "host"]
    assert [row.key for row in rows] == [f"gpu.attention.{name}" for name in names]


def test_a_result_has_each_bench_as_soon_as_it_ends(
    tmp_path: Path, on_host: pytest.MonkeyPatch, gpu_result: Any
) -> None:
    import gpu_run

    example = json.loads(EXAMPLE.read_text())
    stored = gpu_run.rows_of(example)
    limits = [row for row in stored if row.key.startswith("gpu.limit.")]
    moves = [row for row in stored if row not in limits]

    def fail(_: Any) -> Any:
        raise RuntimeError("an error of the GPU")

    def bench(rows: Any) -> Any:
        return SimpleNamespace(measure=rows if callable(rows) else lambda _: rows)

    cp = host_library()
    cp.cuda.Stream = lambda **_: nullcontext()
    cp.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    on_host.setattr(gpu_run, "library", lambda: cp)
    on_host.setattr(gpu_run, "why_no_gpu", lambda: "")
    on_host.setattr(gpu_run, "facts", lambda: example["machine"])
    benches = {"limits": bench(limits), "moves": bench(moves), "hosts": bench(fail)}
    on_host.setattr(gpu_run, "BENCHES", benches)
    out = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match="an error of the GPU"):
        gpu_run.main(["--json", str(out), "--only", "limits", "hosts"])
    found = json.loads(out.read_text())
    gpu_result.check(found)
    assert found["limits"] == example["limits"]
    assert found["rows"] == []
    assert gpu_run.main(["--json", str(out), "--only", "moves"]) == 0
    found = json.loads(out.read_text())
    assert (found["limits"], found["rows"]) == (example["limits"], example["rows"])
    on_host.setattr(gpu_run, "facts", lambda: example["machine"] | {"device": "another"})
    with pytest.raises(ValueError, match="this GPU is another; pass another path"):
        gpu_run.main(["--json", str(out), "--only", "moves"])
