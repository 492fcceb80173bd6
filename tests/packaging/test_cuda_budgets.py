# SPDX-License-Identifier: Apache-2.0
"""What kernels may take of a multiprocessor, read from the compiler's report.

Every file is compiled for Ampere and Hopper and to PTX. More registers, or memory of a block, would
leave fewer lanes on a multiprocessor than it takes to keep the loads of a copy under way; a spill
is traffic that no floor counts.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import require_program

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "cpp" / "cuda").glob("*.cu"))
HOST_ONLY = {"convert_batch.cu", "copy_batch.cu", "device.cu"}  # no kernels of their own

MAX_REGISTERS = 64  # of a lane: four blocks of 256 on a multiprocessor
# A lane that quantises K and V has 128 bytes under way: three blocks fill a multiprocessor's loads.
TWO_TENSORS = re.compile(r"QuantizeBody.*ELi2E")
MAX_REGISTERS_OF_TWO = 80
ARCHITECTURES = ("sm_80", "sm_90")
TARGETS = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel for an architecture; sizes in bytes."""

    name: str
    architecture: str
    registers: int
    stack: int
    spills: int
    shared: int

    def excess(self) -> list[str]:
        """Say which budgets it exceeds."""
        registers = MAX_REGISTERS_OF_TWO if TWO_TENSORS.search(self.name) else MAX_REGISTERS
        taken = {
            "registers": (self.registers, registers),
            "bytes of stack": (self.stack, 0),
            "bytes spilled": (self.spills, 0),
            "bytes of static shared memory": (self.shared, 0),
        }
        return [
            f"{self.name} takes {found} {what} on {self.architecture}, may take {budget}"
            for what, (found, budget) in taken.items()
            if found > budget
        ]


_REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'\n"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def kernels_of(report: str) -> list[Kernel]:
    """Read the report of ``ptxas -v``."""
    found = []
    for match in _REPORT.finditer(report):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            Kernel(
                match["name"],
                match["architecture"],
                int(match["registers"]),
                int(match["stack"]),
                int(match["stores"]) + int(match["loads"]),
                int(shared[1]) if shared else 0,
            )
        )
    return found


def test_reports_are_read() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aPi' for 'sm_90'
ptxas info    : Function properties for _Z1aPi
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 48 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 10.0 ms
ptxas info    : Compiling entry function '_Z1bv' for 'sm_80'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
"""
    first, second = kernels_of(report)
    assert first == Kernel("_Z1aPi", "sm_90", 72, 8, 16, 48)
    assert second == Kernel("_Z1bv", "sm_80", 8, 0, 0, 0)
    assert len(first.excess()) == 4
    assert first.excess()[0] == "_Z1aPi takes 72 registers on sm_90, may take 64"
    assert second.excess() == []


def test_every_kernel_is_built() -> None:
    listed = set(re.findall(r"cpp/cuda/(\w+\.cu)\b", (ROOT / "CMakeLists.txt").read_text()))
    assert listed == {source.name for source in SOURCES}


@pytest.mark.slow  # compiles every kernel once more
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_keep_to_their_budgets(source: Path, tmp_path: Path) -> None:
    folders = [f"-I{ROOT / 'cpp' / folder}" for folder in ("include", "cuda", "src")]
    output = ("-fatbin", "-o", str(tmp_path / "kernels.fatbin"))
    options = ("-std=c++17", "-fmad=false", "-Xptxas=-v", *TARGETS, *folders, *output)
    done = subprocess.run(
        [require_program("nvcc"), *options, str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    kernels = kernels_of(done.stdout)
    of = {name: [k.name for k in kernels if k.architecture == name] for name in ARCHITECTURES}
    assert sorted(of["sm_80"]) == sorted(of["sm_90"])
    assert bool(kernels) == (source.name not in HOST_ONLY)
    excess = [line for kernel in kernels for line in kernel.excess()]
    assert excess == []
