# SPDX-License-Identifier: Apache-2.0
"""Page copies between pools on GPUs and pinned memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore.backends.cuda.mover import GpuMover
from kvcore.backends.cuda.pools import GpuPools
from kvcore.backends.protocol import STORE
from kvcore.device import Device

KERNELS = require_emulation()


class Calls:
    """The recorded arguments of one function of the kernels."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.all: list[tuple[Any, ...]] = []
        call = getattr(KERNELS, name)

        def noted(*args: Any) -> Any:
            self.all.append(args)
            return call(*args)

        patch.setattr(KERNELS, name, noted)


def mover_of(machine: Machine, page_bytes: int) -> tuple[GpuMover, Any, Any]:
    """Make a mover for a pool of 8 pages with a host tier of 8 pages."""
    rows = np.random.default_rng(1).integers(0, 256, (8, 1, 1, 1, 1, page_bytes), np.uint8)
    pool = machine.array(rows)
    devices = (Device.parse("cuda:0"),)
    return GpuMover([[(pool, None)]], devices, 8, GpuPools(devices, 1)), pool, rows.reshape(8, -1)


def orders(pairs: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    return np.array([(0, STORE, *pair) for pair in pairs], np.int32)


@pytest.mark.parametrize("page_bytes", [4096, 64 << 10])
def test_pages_are_stored_where_orders_say(machine: Machine, page_bytes: int) -> None:
    mover, _, rows = mover_of(machine, page_bytes)
    pairs = [(2, 4), (3, 5), (5, 1), (6, 2), (0, 0)]
    mover.run(orders(pairs))
    mover.wait(0)
    host = mover.memory(0)
    for page, kept in pairs:
        assert np.array_equal(host[kept], rows[page])


def test_small_pages_leave_multiprocessors_to_the_model(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, *_ = mover_of(machine, 4096)
    calls = Calls(monkeypatch, "transfer")
    mover.run(orders([(2, 4)]))
    (args,) = calls.all
    most_blocks = args[7]
    assert 1 <= most_blocks <= 32


def test_neighbours_of_a_pool_move_in_one_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, pool, _ = mover_of(machine, 64 << 10)
    calls = Calls(monkeypatch, "copy_batch")
    mover.run(orders([(2, 4), (3, 5), (4, 6), (6, 1), (7, 3)]))
    ((targets, sources, sizes, *_),) = calls.all
    page = 64 << 10
    assert sizes.tolist() == [3 * page, page, page]
    assert (sources - np.uint64(pool.data.ptr)).tolist() == [2 * page, 6 * page, 7 * page]
    assert (targets - targets.min()).tolist() == [3 * page, 0, 2 * page]


def test_pinned_memory_is_not_copied_by_forks(machine: Machine) -> None:
    """A write by child or parent would copy the page, and the device would keep the old page."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("there is no /proc/self/smaps")
    memory = KERNELS.PinnedMemory(0, 1 << 20)
    flags: list[str] = []
    is_there = False
    for line in maps.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
            is_there = begin <= memory.ptr < end
        elif is_there and line.startswith("VmFlags:"):
            flags = line.split()
    assert "dc" in flags
