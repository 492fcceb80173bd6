# SPDX-License-Identifier: Apache-2.0
"""Host arrays in calls on a GPU: the caller may change them right after, and no call waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import ops
from kvcore.backends.cuda import staging
from kvcore.backends.cuda.pinned import pinned_zeros

KERNELS = require_emulation()

PAGES = 300_000
SIZES = (3, 1000, 200_000)  # ids of 24 bytes, 8 kB and 1.6 MB


def ids_of(count: int, *, is_pinned: bool) -> np.ndarray[Any, Any]:
    ids = pinned_zeros((count,), np.dtype(np.int64)) if is_pinned else np.empty(count, np.int64)
    ids[:] = np.random.default_rng(1).permutation(PAGES)[:count]
    return ids


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_ids_may_change_right_after_the_call(machine: Machine, count: int, is_pinned: bool) -> None:
    ids = ids_of(count, is_pinned=is_pinned)
    expected = np.zeros((PAGES, 1), np.uint8)
    expected[ids] = 7
    pool = machine.array(np.zeros((PAGES, 1), np.uint8))
    machine.in_any_order(1)
    ops.fill_pages(pool, ids, 7)
    ids[:] = 0
    assert np.array_equal(machine.host(pool), expected)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_ids_of_any_length_wait_for_nothing(machine: Machine, count: int, is_pinned: bool) -> None:
    ids = ids_of(count, is_pinned=is_pinned)
    pool = machine.array(np.zeros((PAGES, 1), np.uint8))
    first = machine.array(np.zeros(1, np.int64))
    machine.in_any_order(1)
    ops.fill_pages(pool, first, 7)
    ops.fill_pages(pool, ids, 8)
    assert KERNELS.emulation.num_waiting() >= 3
    assert not machine.view(pool).any()


def test_memory_of_copies_that_are_done_is_used_again(machine: Machine) -> None:
    ids = ids_of(200_000, is_pinned=False)
    pool = machine.array(np.zeros((PAGES, 1), np.uint8))
    ops.fill_pages(pool, ids, 7)
    pinned = KERNELS.emulation.alive()["pinned"]
    for _ in range(3):
        ops.fill_pages(pool, ids, 8)
    assert KERNELS.emulation.alive()["pinned"] == pinned
    machine.in_any_order(1)
    ops.fill_pages(pool, ids, 9)
    ops.fill_pages(pool, ids, 9)
    assert KERNELS.emulation.alive()["pinned"] > pinned


def test_only_so_much_memory_is_under_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MOST_BUFFERS", 3)
    pool = machine.array(np.zeros((PAGES, 1), np.uint8))
    machine.in_any_order(1)
    expected = np.zeros((PAGES, 1), np.uint8)
    for byte in range(1, 6):
        ids = ids_of(200_000, is_pinned=False)
        ops.fill_pages(pool, ids, byte)
        expected[ids] = byte
        ids[:] = 0
    assert KERNELS.emulation.alive()["pinned"] == 3
    assert np.array_equal(machine.host(pool), expected)
