# SPDX-License-Identifier: Apache-2.0
"""Managers freed while copies of their pinned memory wait; streams and events freed early."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext

KERNELS = require_emulation()

#: Pages of 64 KiB, which the copy engines move.
PARAMS = KVCacheParams(
    "float32",
    8,
    128,
    num_layers=1,
    page_size=8,
    enable_prefix_caching=True,
    enable_kvcache_swapping_to_host=True,
    host_kvcache_swap_space_gb=8 / (1 << 14),
)


def store_pages() -> tuple[PagedKVCacheManager, Any]:
    """Serve prompts in turn, so that pages of the first prompt are in flight to the host.

    The pool outlives the manager, because freeing the pool would wait for all work.
    """
    manager = PagedKVCacheManager(PARAMS, 1, 64, devices=["cuda:0"], num_pages=3)
    for turn in range(3):
        context = TextGenerationContext(turn, [turn] * 17)
        manager.claim(turn)
        (inputs,) = manager.fetch([context])
        context.update(1)
        manager.step([context])
        manager.release(turn)
    return manager, inputs.blocks


@pytest.mark.parametrize("seed", range(5))
def test_a_manager_goes_when_its_copies_are_done(machine: Machine, seed: int) -> None:
    machine.in_any_order(seed)
    manager, pool = store_pages()
    assert KERNELS.emulation.num_waiting() > 0
    del manager
    gc.collect()
    assert KERNELS.emulation.faults() == 0
    assert pool.size


def test_tables_go_when_they_are_copied(machine: Machine) -> None:
    params = KVCacheParams("float32", 1, 4, num_layers=1, page_size=2)
    manager = PagedKVCacheManager(params, 1, 64, devices=["cuda:0"], num_pages=8)
    manager.claim("a")
    machine.in_any_order(1)
    (inputs,) = manager.fetch([TextGenerationContext("a", [1, 2, 3])])
    expected = manager.get_req_blocks("a")
    assert KERNELS.emulation.num_waiting() > 0
    del manager
    gc.collect()
    assert KERNELS.emulation.faults() == 0
    assert machine.host(inputs.lookup_table).tolist() == [expected]


def test_the_emulation_notices_memory_that_goes_too_early(machine: Machine) -> None:
    """The emulation reports the fault that the tests above look for."""
    pinned = KERNELS.PinnedMemory(0, 64)
    target = machine.memory((64,), np.uint8)
    machine.in_any_order(1)
    KERNELS.copy(target.data.ptr, pinned.ptr, 64, 0, 0)
    del pinned
    assert KERNELS.emulation.faults() == 1
    KERNELS.emulation.reset(1)


def test_a_stream_that_is_destroyed_still_does_its_work(machine: Machine) -> None:
    target = machine.array(np.zeros(4, np.uint8))
    machine.in_any_order(1)
    stream = KERNELS.Stream(0)
    KERNELS.fill(target.data.ptr, 7, 4, 0, stream.ptr)
    del stream
    assert KERNELS.emulation.num_waiting() == 1
    assert machine.host(target).tolist() == [7] * 4
