# SPDX-License-Identifier: Apache-2.0
"""Memory of other libraries must stay until the kernels that read it have run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from fake_torch import FakeTorch
from kvcore import PagedBatch, ops
from kvcore.backends.cuda.arrays import over_memory
from kvcore.backends.cuda.loans import loans_of
from kvcore.backends.cuda.memory import device_zeros

KERNELS = require_emulation()

TOKENS = 6


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    found = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", found)
    return found


class Memory:
    """Memory that its library reuses as soon as the last array over it is gone."""

    def __init__(self, machine: Machine, contents: np.ndarray[Any, Any]) -> None:
        self.array = machine.array(contents)
        self._view = machine.view(self.array)
        self.gone: list[bool] = []

    def lend(self) -> Any:
        array, view, gone = self.array, self._view, self.gone

        class Owner:
            def __del__(self) -> None:
                view[...] = 99
                gone.append(True)

        return over_memory(array.data.ptr, array.shape, array.dtype, 0, Owner())


class Exchanged:
    """An array of a library with DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        return self._array


class Interface:
    """An array of a library with CUDA's interface."""

    def __init__(self, array: Any) -> None:
        self.owner = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, False),
            "version": 3,
        }


def pool_of(machine: Machine) -> tuple[Any, PagedBatch]:
    pool = device_zeros((3, 2, 1, 4), np.dtype(np.float32), 0)
    table = machine.array(np.array([[2, 0, 1]], np.uint32))
    return pool, PagedBatch(pool, None, table, machine.array(np.zeros(1, np.uint32)))


def append(batch: PagedBatch, k: Any, stream: Any) -> None:
    ops.append(batch, 0, k, None, np.array([0, TOKENS], np.uint32), stream=stream)


LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "dlpack": Exchanged,
    "interface": Interface,
    "cupy": lambda array: array,
}


@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
@pytest.mark.parametrize("seed", range(5))
def test_memory_is_there_until_the_kernel_has_read_it(
    machine: Machine, torch: FakeTorch, library: str, seed: int
) -> None:
    wrap = LIBRARIES.get(library, torch.Tensor)
    pool, batch = pool_of(machine)
    side = KERNELS.Stream(0)
    contents = np.arange(TOKENS * 4, dtype=np.float32).reshape(TOKENS, 1, 4)
    memory = Memory(machine, contents)
    machine.in_any_order(seed)
    append(batch, wrap(memory.lend()), side)
    gc.collect()
    assert not memory.gone
    found = machine.host(pool)[[2, 0, 1]].reshape(TOKENS, 1, 4)
    assert (found == contents).all()
    append(batch, machine.array(contents), None)  # a later call of any kind
    assert memory.gone


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_on_their_library_s_own_stream_nothing_is_held(
    machine: Machine, torch: FakeTorch, library: str
) -> None:
    """The library reuses the memory in the order of that stream."""
    side = KERNELS.Stream(0)
    machine.streams[0] = side.ptr
    torch.streams[0] = side
    _, batch = pool_of(machine)
    memory = Memory(machine, np.zeros((TOKENS, 1, 4), np.float32))
    machine.in_any_order(1)
    lent = memory.lend()
    append(batch, torch.Tensor(lent) if library == "torch" else lent, None)
    del lent
    assert memory.gone


def test_a_call_that_fails_holds_nothing_for_long(machine: Machine) -> None:
    _, batch = pool_of(machine)
    memory = Memory(machine, np.zeros((TOKENS, 2, 4), np.float32))
    with pytest.raises(ValueError, match="k has shape"):
        append(batch, Exchanged(memory.lend()), KERNELS.Stream(0))
    loans_of(0).drop_done()
    gc.collect()
    assert memory.gone


def test_a_pool_is_not_held(machine: Machine) -> None:
    """The release of a pool's memory waits for the device."""
    pool, batch = pool_of(machine)
    machine.in_any_order(1)
    ops.zero_pages(pool, np.array([1]), stream=KERNELS.Stream(0))
    before = KERNELS.emulation.alive()["allocations"]
    del pool, batch
    gc.collect()
    assert KERNELS.emulation.alive()["allocations"] == before - 1


def test_on_a_stream_that_is_gone_the_host_waits(machine: Machine) -> None:
    memory = Memory(machine, np.zeros((TOKENS, 1, 4), np.float32))
    machine.in_any_order(1)
    stream = KERNELS.Stream(0)
    KERNELS.fill(memory.array.data.ptr, 0, 16, 0, stream.ptr)
    handle = stream.ptr
    del stream
    assert KERNELS.emulation.num_waiting() == 1
    loans_of(0).hold([memory.lend()], handle)
    assert KERNELS.emulation.num_waiting() == 0
    assert memory.gone
