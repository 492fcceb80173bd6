# SPDX-License-Identifier: Apache-2.0
"""Kernels of a few instructions, for tests of the simulation's instructions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from conftest import REQUIRED
from cuda_machine import Machine, emulated, require_emulation

Array = np.ndarray[Any, Any]


def require_simulation() -> Any:
    """Return the module of simulated GPUs, or skip the calling test file."""
    kernels = require_emulation()
    if hasattr(kernels, "simulation"):
        return kernels.simulation
    if "simulation" in REQUIRED:
        raise ImportError("this build has no simulated GPUs (KVCORE_CUDA=SIMULATED)")
    pytest.skip("this build has no simulated GPUs (KVCORE_CUDA=SIMULATED)", allow_module_level=True)


def kernel(body: str, parameters: Sequence[str] = (), declarations: str = "") -> str:
    """Return the text of a kernel `k` with 64-bit parameters, which `%<name>` hold in `body`.

    `%i` is the number of the thread in the grid, `%at` is eight times `%i`.
    """
    given = ",\n".join(f".param .u64 {name}" for name in parameters)
    loads = "\n".join(f"ld.param.u64 %{name}, [{name}];" for name in parameters)
    return f"""
.version 9.0
.target sm_90
.address_size 64
.visible .entry k(
{given}
)
{{
{declarations}
mov.u32 %tid, %tid.x;
mov.u32 %ntid, %ntid.x;
mov.u32 %ctaid, %ctaid.x;
mad.lo.u32 %i, %ctaid, %ntid, %tid;
mul.wide.u32 %at, %i, 8;
{loads}
{body}
ret;
}}
"""


class Runner:
    """A machine and the kernels that tests run on its first device."""

    def __init__(self, machine: Machine, simulation: Any) -> None:
        self.machine = machine
        self.simulation = simulation

    def run(
        self, text: str, *arguments: Any, blocks: int = 1, threads: int = 32, seed: int = 0
    ) -> None:
        """Run a kernel with arrays or numbers as its parameters."""
        words = [a if isinstance(a, int) else a.data.ptr for a in arguments]
        packed = struct.pack(f"<{len(words)}Q", *words)
        self.simulation.run_ptx(text, "k", blocks, threads, packed, seed=seed)

    def compute(self, opcode: str, operands: Sequence[Array], out: Any) -> Array:
        """Run an instruction on operands [n] of any dtypes, n whole warps; return results [n]."""
        kind, n = np.dtype(out), len(operands[0])
        names = [f"x{i}" for i in range(len(operands))]
        lines = []
        for name, one in zip(names, operands, strict=True):
            lines.append(f"add.s64 %p_{name}, %{name}, %at;")
            if one.dtype.kind == "b":
                lines.append(f"ld.global.u64 %w_{name}, [%p_{name}];")
                lines.append(f"setp.ne.u64 %v_{name}, %w_{name}, 0;")
            else:
                lines.append(f"ld.global.b{8 * one.itemsize} %v_{name}, [%p_{name}];")
        lines.append(f"{opcode} %d, {', '.join(f'%v_{name}' for name in names)};")
        if kind.kind == "b":
            lines.append("selp.u64 %d, 1, 0, %d;")
        lines.append("add.s64 %to, %out, %at;")
        lines.append(f"st.global.b{8 * kind.itemsize} [%to], %d;")
        arrays = [self.machine.array(_words(one)) for one in operands]
        results = self.machine.memory((n,), np.uint64)
        self.run(kernel("\n".join(lines), [*names, "out"]), *arrays, results, blocks=n // 32)
        raw = self.machine.host(results).astype(f"u{kind.itemsize}")
        return raw.astype(bool) if kind.kind == "b" else raw.view(kind)

    def check(
        self, opcode: str, operands: Sequence[Array], out: Any, oracle: Callable[..., Any]
    ) -> None:
        """Compare an instruction's results with a function of arrays, bit by bit."""
        with np.errstate(all="ignore"):
            expected = np.asarray(oracle(*operands)).astype(np.dtype(out))
        found = self.compute(opcode, operands, out)
        bits = f"u{expected.itemsize}"
        wrong = np.flatnonzero(found.view(bits) != expected.view(bits))[:1]
        given = [one[wrong] for one in operands]
        assert not wrong.size, (opcode, given, found[wrong], expected[wrong])


def _words(values: Array) -> Array:
    words = np.zeros(len(values), np.uint64)
    words.view(np.uint8).reshape(-1, 8)[:, : values.itemsize] = values.view(np.uint8).reshape(
        len(values), -1
    )
    return words


@contextmanager
def runner() -> Iterator[Runner]:
    """Yield a machine of two devices; kernels may access the memory of the first device only."""
    simulation = require_simulation()
    with emulated() as machine:
        yield Runner(machine, simulation)
