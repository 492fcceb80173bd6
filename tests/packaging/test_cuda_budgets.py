# SPDX-License-Identifier: Apache-2.0
"""Limits on a kernel's share of a multiprocessor, read from the built machine code.

The code is for Ampere and Hopper. With more registers or more shared memory a multiprocessor runs
fewer lanes than it needs to keep the loads of a copy in flight. Registers spilled to the stack
cause traffic that no floor counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import machine_code

ROOT = Path(__file__).resolve().parents[2]

MAX_REGISTERS = 64  # per lane: four blocks of 256 on a multiprocessor
# A lane that quantises K and V has 128 bytes in flight: three blocks fill a multiprocessor's loads.
TWO_TENSORS = re.compile(r"QuantizeBody.*ELi2E")
MAX_REGISTERS_OF_TWO = 80
ARCHITECTURES = ("sm_80", "sm_90")


@dataclass(frozen=True)
class Kernel:
    """The resources of a kernel's code for an architecture; sizes in bytes."""

    name: str
    architecture: str
    registers: int
    stack: int
    shared: int
    local: int

    def excess(self) -> list[str]:
        """Return the budgets that it exceeds."""
        registers = MAX_REGISTERS_OF_TWO if TWO_TENSORS.search(self.name) else MAX_REGISTERS
        taken = {
            "registers": (self.registers, registers),
            "bytes of stack": (self.stack, 0),
            "bytes of static shared memory": (self.shared, 0),
            "bytes of local memory": (self.local, 0),
        }
        return [
            f"{self.name} takes {found} {what} on {self.architecture}, may take {budget}"
            for what, (found, budget) in taken.items()
            if found > budget
        ]


_ARCHITECTURE = re.compile(r"^arch = (\w+)$", re.M)
_KERNEL = re.compile(
    r"Function (?P<name>\w+):\n\s*"
    r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)


def kernels_of(report: str) -> list[Kernel]:
    """Read the report of ``cuobjdump --dump-resource-usage``."""
    found = []
    _, *parts = _ARCHITECTURE.split(report)
    for architecture, text in zip(parts[::2], parts[1::2], strict=True):
        for match in _KERNEL.finditer(text):
            numbers = (int(match[name]) for name in ("registers", "stack", "shared", "local"))
            found.append(Kernel(match["name"], architecture, *numbers))
    return found


def test_reports_are_read() -> None:
    report = """
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z1aPi:
  REG:72 STACK:8 SHARED:48 LOCAL:16 CONSTANT[0]:380 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1cPi:
  REG:64 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:380 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_80

Resource usage:
 Function _Z1bv:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:368 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    first, second, third = kernels_of(report)
    assert first == Kernel("_Z1aPi", "sm_90", 72, 8, 48, 16)
    assert third == Kernel("_Z1bv", "sm_80", 8, 0, 0, 0)
    assert len(first.excess()) == 4
    assert first.excess()[0] == "_Z1aPi takes 72 registers on sm_90, may take 64"
    assert second.excess() == third.excess() == []


def test_every_source_of_kernels_is_built() -> None:
    listed = set(re.findall(r"cpp/cuda/(\w+\.cu)\b", (ROOT / "CMakeLists.txt").read_text()))
    assert listed == {source.name for source in (ROOT / "cpp" / "cuda").glob("*.cu")}


def test_kernels_keep_to_their_budgets() -> None:
    module = machine_code.built_module(*ARCHITECTURES)
    kernels = kernels_of(machine_code.cuobjdump("--dump-resource-usage", module))
    of = {name: [k.name for k in kernels if k.architecture == name] for name in ARCHITECTURES}
    assert sorted(of["sm_80"]) == sorted(of["sm_90"])
    assert len(of["sm_90"]) > 100
    excess = [line for kernel in kernels for line in kernel.excess()]
    assert excess == []
