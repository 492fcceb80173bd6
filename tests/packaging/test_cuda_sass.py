# SPDX-License-Identifier: Apache-2.0
"""The machine code of kernels for Hopper, by nvdisasm: wide accesses, batched loads, size.

A lane that waits for each load before it issues the next load leaves memory idle. So kernels that
move units of 16 bytes issue all loads of a round before the first store. PTX does not show this
order, because ptxas moves loads and stores.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import machine_code

#: Part of kernels' names: the width of loads and of stores in bits, the number of loads before the
#: first such store, and the most instructions of a kernel.
EXPECTED = {
    "9SlotItems.*Unit16": (128, 128, 4, 560),
    "10BatchItems.*Unit16": (128, 128, 4, 860),
    "9PageItems.*Unit16": (128, 128, 4, 560),
    "8TurnBody.*ELi2E": (128, 128, 4, 490),  # K and V, of two bytes
    "8TurnBody.*ELi1E": (128, 128, 4, 525),
    "9HeadItems.*Unit16": (128, 128, 4, 650),
    "11CompactBody": (0, 0, 0, 910),
    "12QuantizeBody.*E2E.*ELi8ELi1E": (128, 64, 4, 1790),  # from bfloat16
    "12QuantizeBody.*E2E.*ELi8ELi2E": (128, 64, 8, 2600),  # K and V
    "9WidenBody.*E2ELi8E": (128, 128, 4, 1800),  # to bfloat16
    "14DequantizeBody.*ELS4_2ELi1E": (64, 128, 4, 1300),
    "14DequantizeBody.*ELS4_2ELi2E": (64, 128, 8, 1760),
    "14CodeBlocksBody.*E2E": (128, 64, 4, 1840),  # from bfloat16
    "14ReadBlocksBody.*E2E": (64, 128, 1, 900),
    "9MergeBody.*E2ELi8E": (128, 128, 2, 450),
    "8FillBody.*Unit16": (0, 128, 0, 90),
    "10DigestBody.*Unit16": (128, 0, 8, 780),
}
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")


def kernels_of(text: str) -> dict[str, list[str]]:
    """Read opcodes in order, by the names of kernels."""
    kernels: dict[str, list[str]] = {}
    opcodes: list[str] = []
    for line in text.splitlines():
        if line.startswith(".text."):
            opcodes = kernels[line.removeprefix(".text.").rstrip(":")] = []
        elif found := _INSTRUCTION.match(line):
            opcodes.append(found[1])
    return kernels


def faults(opcodes: list[str], loads: int, stores: int, together: int, most: int) -> list[str]:
    """Return the differences between a kernel and its expected values."""
    wide_load, wide_store = (
        f"{verb}.E.{bits}" if bits else "" for verb, bits in (("LDG", loads), ("STG", stores))
    )
    first = opcodes.index(wide_store) if wide_store in opcodes else len(opcodes)
    before = opcodes[:first].count(wide_load)
    found = []
    if wide_store and wide_store not in opcodes:
        found.append(f"no {wide_store}")
    if before < together:
        found.append(f"{before} of {together} {wide_load} before the first store")
    if any(opcode.startswith(("LDL", "STL")) for opcode in opcodes):
        found.append("memory of lanes")
    size = sum(opcode != "NOP" for opcode in opcodes)
    if size > most:
        found.append(f"{size} instructions, may have {most}")
    return found


def test_disassembly_is_read() -> None:
    text = """
.text._Z1a:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP1 STG.E.128 desc[UR4][R6.64], R4 ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/                   NOP ;
"""
    (name, opcodes), *_ = kernels_of(text).items()
    assert name == "_Z1a"
    assert opcodes == ["LDC", "LDG.E.128", "STG.E.128", "STL", "NOP"]
    assert faults(opcodes, 128, 128, 1, 4) == ["memory of lanes"]
    assert len(faults(opcodes, 128, 64, 2, 3)) == 4


@pytest.mark.slow  # the disassembler reads every kernel
def test_loads_are_wide_and_under_way_together(tmp_path: Path) -> None:
    kernels = kernels_of(machine_code.disassembly("sm_90", tmp_path))
    for pattern, budget in EXPECTED.items():
        named = {name: opcodes for name, opcodes in kernels.items() if re.search(pattern, name)}
        assert named, pattern
        for name, opcodes in named.items():
            assert faults(opcodes, *budget) == [], name
