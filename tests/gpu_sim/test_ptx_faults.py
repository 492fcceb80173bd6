# SPDX-License-Identifier: Apache-2.0
"""Forbidden actions of kernels, and the simulation's errors for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ptx_text import Runner, kernel, require_simulation, runner

require_simulation()


@pytest.fixture
def on() -> Iterator[Runner]:
    with runner() as found:
        yield found


READ = kernel("add.s64 %from, %a, %at;\nld.global.u64 %d, [%from];", ["a"])
READ_BYTE = kernel("add.s64 %from, %a, %i;\nld.u8 %d, [%a];", ["a"])


def test_reads_beyond_an_allocation(on: Runner) -> None:
    array = on.machine.memory((31,), np.uint64)
    with pytest.raises(RuntimeError, match=r"block 0, warp 0, lane 31: 8 bytes .* no allocation"):
        on.run(READ, array)
    on.run(READ, array, threads=31)


def test_reads_across_the_end_of_an_allocation(on: Runner) -> None:
    wide = kernel("ld.global.v2.u64 {%a0, %a1}, [%a];", ["a"])
    with pytest.raises(RuntimeError, match="end beyond an allocation of 8 bytes"):
        on.run(wide, on.machine.memory((1,), np.uint64))


def test_reads_before_an_allocation(on: Runner) -> None:
    array = on.machine.memory((4,), np.uint64)
    with pytest.raises(RuntimeError, match="no allocation"):
        on.run(kernel("ld.global.u64 %d, [%a+-8];", ["a"]), array)


def test_addresses_that_the_width_does_not_divide(on: Runner) -> None:
    array = on.machine.memory((8,), np.uint64)
    for offset, text in ((4, "ld.global.u64 %d"), (8, "ld.global.v2.u64 {%d, %e}")):
        with pytest.raises(RuntimeError, match="is no multiple of"):
            on.run(kernel(f"{text}, [%a+{offset}];", ["a"]), array)


def test_memory_that_was_freed(on: Runner) -> None:
    owner = on.machine.kernels.DeviceMemory(0, 64)
    address = owner.ptr
    on.run(READ_BYTE, address)
    del owner
    with pytest.raises(RuntimeError, match="were freed"):
        on.run(READ_BYTE, address)


def test_memory_of_another_device(on: Runner) -> None:
    with pytest.raises(RuntimeError, match="are of device 1"):
        on.run(READ_BYTE, on.machine.memory((8,), np.uint64, device=1))


def test_memory_of_the_host(on: Runner) -> None:
    address = np.zeros(8).__array_interface__["data"][0]
    with pytest.raises(RuntimeError, match="neither a device's nor pinned"):
        on.run(READ_BYTE, address)
    pinned = on.machine.kernels.PinnedMemory(0, 64)
    on.run(READ_BYTE, pinned.ptr)


def test_parameters_are_no_global_memory(on: Runner) -> None:
    text = kernel("mov.u64 %p, a;\nld.global.u64 %d, [%p];", ["a"])
    with pytest.raises(RuntimeError, match="of another space"):
        on.run(text, 1)
    with pytest.raises(RuntimeError, match="beyond its space"):
        on.run(kernel("ld.param.u64 %d, [a+8];", ["a"]), 1)


def test_lanes_that_never_arrive(on: Runner) -> None:
    apart = "setp.eq.u32 %p, %i, 3;\n@%p bra out;\n{}\nout:\n"
    for exchange in ("bar.warp.sync -1;", "shfl.sync.bfly.b32 %v, %i, 1, 31, -1;"):
        with pytest.raises(RuntimeError, match="lanes that do not arrive"):
            on.run(kernel(apart.format(exchange)))


def test_lanes_that_their_mask_does_not_name(on: Runner) -> None:
    with pytest.raises(RuntimeError, match="its own mask does not name"):
        on.run(kernel("bar.warp.sync 15;"))
    on.run(kernel("bar.warp.sync 15;"), threads=4)


def test_the_instruction_and_its_line_are_named(on: Runner) -> None:
    body = '.file 1 "/src/kernels/pages.hpp"\n.loc 1 17 4\nld.global.u64 %d, [%a+8];'
    with pytest.raises(RuntimeError, match=r"k, block 0.*\n +pages.hpp:17: ld.global.u64 %d"):
        on.run(kernel(body, ["a"]), on.machine.memory((1,), np.uint64))


@pytest.mark.parametrize(
    "line",
    ["tanh.approx.f32 %a, %b;", "mov.u32 %a, %smid;", "bar.sync 1;", "ld.const.u32 %a, [%b];",
     "atom.global.add.f32 %a, [%b], %c;", "bra nowhere;", "call f;"],
)  # fmt: skip
def test_what_it_does_not_know_is_an_error(on: Runner, line: str) -> None:
    with pytest.raises(RuntimeError, match="does not know"):
        on.run(kernel(line))
