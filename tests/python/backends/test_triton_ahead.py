# SPDX-License-Identifier: Apache-2.0
"""The attention kernels compile for absent GPUs, and stay within the GPUs' registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import triton_ahead
import triton_launches
from triton_interpreter import require_interpreter

require_interpreter()

#: Bytes of stack, for some byte conversions and for values that wait until a loop is done.
_STACK = 192
#: Bytes of shared memory that a block may have.
_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compiled(folder: Path, arch: int, *cases: str) -> list[dict[str, Any]]:
    """Return the resources that the kernels of some cases use."""
    return uninterpreted(folder, triton_ahead.__file__, str(arch), *cases)


def uninterpreted(folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program in a process that does not interpret kernels; return its JSON, line by line."""
    run = subprocess.run(
        [sys.executable, "-W", "error", program, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(made: dict[str, Any]) -> None:
    assert made["reg"] <= 255, made
    assert made["stack"] <= _STACK, made
    assert made["spilled"] == 0, made
    assert made["local"] == 0, made
    assert made["shared"] <= _SHARED[made["arch"]], made


def test_a_decoding_kernel_loads_16_bytes_at_a_time_and_multiplies_matrices(tmp_path: Path) -> None:
    attend, join = compiled(tmp_path, 90, "decode")
    check(attend)
    check(join)
    assert attend["mma"] > 0
    assert attend["async_16"] >= 16
    assert 2 * 128 * attend["reg"] <= 65536  # two blocks of 4 warps on a multiprocessor, at least


def test_launches_go_to_the_call_s_stream_and_compile_once(tmp_path: Path) -> None:
    """Launches need no torch, use the arrays' device, and take any lengths, tables and windows."""
    (found,) = uninterpreted(tmp_path, triton_launches.__file__, "some")
    major, minor, *_ = metadata.version("triton").split(".")
    loads_torch_itself = (int(major), int(minor)) < (3, 8)
    assert found["torch"] <= loads_torch_itself
    assert found["after"] == triton_launches.OTHER
    assert [call["compiled"] for call in found["calls"]] == [3] * 4
    for call in found["calls"]:
        names = [each["function"].split()[-1] for each in call["launches"]]
        assert names == ["attend", "attend", "join"]
        for each in call["launches"]:
            assert (each["device"], each["stream"]) == (
                triton_launches.BUSY,
                triton_launches.STREAM,
            )
    grids = [each["grid"] for each in found["calls"][0]["launches"]]
    assert grids == [[5, 2, 1], [5, 2, 4], [4, 8, 1]]


def test_batches_that_grow_compile_each_kernel_once(tmp_path: Path) -> None:
    """A dtype has three kernels: attention to the result, attention to split states, their join."""
    for found in uninterpreted(tmp_path, triton_launches.__file__, "growing"):
        assert sorted(found["compiled"]) == ["attend", "attend", "join"], found
    (lists,) = uninterpreted(tmp_path, triton_launches.__file__, "lists")
    assert sorted(lists["compiled"]) == ["_count", "_list"]


# A process compiles several cases, because its start takes longer than a compilation.
_CASES = list(triton_ahead.CASES)


# The middle architecture runs all cases, each other architecture a third of the cases.
@pytest.mark.slow
@pytest.mark.parametrize(("part", "arch"), [(0, 90), (1, 90), (2, 90), (0, 80), (1, 100)])
def test_loops_spill_no_registers(tmp_path: Path, arch: int, part: int) -> None:
    cases = _CASES[part::3]
    found = compiled(tmp_path, arch, *cases)
    assert [(made["case"], made["kernel"]) for made in found] == [
        (case, kernel) for case in cases for kernel in ("attend", "join")
    ]
    for made in found:
        check(made)
        assert made["mma"] > 0 or made["kernel"] == "join" or made["case"] == "float32", made
