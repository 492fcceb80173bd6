# SPDX-License-Identifier: Apache-2.0
"""The script for machines with a GPU: as ready as can be seen on one without."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from argparse import Namespace
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
    """Calls in the place of a graph of kernels."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def launch(self, stream: Any) -> None:
        for call in self.calls:
            call()


def host_library() -> Any:
    """What the benches use of cupy, over host memory."""
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
    command = ["bash", str(BENCH / "gpu.sh"), *arguments]
    environment = os.environ | {"PYTHON": python}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_dry_run_checks_imports_arguments_and_the_example() -> None:
    done = script("--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ready")


def test_without_a_gpu_it_ends_at_once_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'a driver that says why' >&2\nexit 1\n")
    program.chmod(0o755)
    out = tmp_path / "out.json"
    done = script(str(out), python=str(program))
    assert done.returncode == 2
    assert done.stderr == "no GPU: a driver that says why\n"
    assert not out.exists()


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--unknown"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


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
    """Benches over host memory, with little of it: what is called, and with what, is the GPU's."""
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
