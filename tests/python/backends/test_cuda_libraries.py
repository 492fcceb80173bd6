# SPDX-License-Identifier: Apache-2.0
"""A call without ``stream=`` runs on the current stream of its arrays' library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from builders import in_groups
from cuda_machine import Machine, require_emulation
from fake_torch import FakeTorch
from kvcore import KVCacheParams, PagedBatch, PagedKVCacheManager, TextGenerationContext, ops

KERNELS = require_emulation()

Put = Callable[[Any], Any]
Call = Callable[[Put, Put], Any]


@pytest.fixture
def torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


class Streams:
    """Two selectable streams and the default stream; the tests check which of them has work."""

    def __init__(self, machine: Machine) -> None:
        self.of_cupy, self.of_torch = KERNELS.Stream(0), KERNELS.Stream(0)
        self._machine = machine
        machine.in_any_order(1)

    def used(self) -> set[str]:
        found = set()
        handles = {"cupy": self.of_cupy.ptr, "torch": self.of_torch.ptr, "default": 0}
        for name, handle in handles.items():
            before = KERNELS.emulation.num_waiting()
            KERNELS.synchronize(0, handle)
            if KERNELS.emulation.num_waiting() < before:
                found.add(name)
        return found


def append(pools: Put, tokens: Put) -> None:
    pool = pools(np.zeros((3, 2, 1, 4), np.float32))
    table, lengths = pools(np.array([[1, 2]], np.uint32)), pools(np.zeros(1, np.uint32))
    k = tokens(np.ones((3, 1, 4), np.float32))
    ops.append(PagedBatch(pool, None, table, lengths), 0, k, None, np.array([0, 3], np.uint32))


def fill(pools: Put, ids: Put) -> None:
    ops.fill_pages(pools(np.zeros((3, 4), np.uint8)), ids(np.ones(1, np.int64)), 7)


def scale(pools: Put, other: Put) -> None:
    batch = PagedBatch(
        pools(np.zeros((3, 2, 1, 4), np.int8)),
        None,
        pools(np.array([[1, 2]], np.uint32)),
        pools(np.zeros(1, np.uint32)),
    )
    k, factors = pools(np.ones((3, 1, 4), np.float32)), other(np.ones(1, np.float32))
    ops.append(batch, 0, k, None, pools(np.array([0, 3], np.uint32)), scale=(factors,))


def transfer(pools: Put, ids: Put) -> None:
    layouts = [
        ops.PoolLayout(pools(np.zeros((3, 2, 1, 2, 1, 4), np.int8)), "max") for _ in range(2)
    ]
    both = ids(np.ones(1, np.int64)), ids(np.ones(1, np.int64))
    ops.transfer(layouts[0], layouts[1], both[0], both[1])


def slots(pools: Put, offsets: Put) -> None:
    lengths = pools(np.zeros(1, np.uint32))
    ops.advance_lengths(lengths, offsets(np.array([0, 3], np.uint32)), out=lengths)


def dequantize(values: Put, out: Put) -> None:
    codes, scales = values(np.ones((2, 4), np.int8)), values(np.ones((2, 1), np.float32))
    ops.dequantize(codes, scales, "float32", out=out(np.zeros((2, 4), np.float32)))


CALLS = (append, fill, scale, transfer, slots, dequantize)


# ---- one library ---------------------------------------------------------------------------------
@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_torch_are_worked_on_on_torch_s_stream(
    machine: Machine, torch: FakeTorch, call: Call
) -> None:
    """The call ignores cupy's current stream."""
    streams = Streams(machine)
    torch.streams[0], machine.streams[0] = streams.of_torch, streams.of_cupy.ptr

    def tensor(array: Any) -> Any:
        return torch.Tensor(machine.array(array))

    call(tensor, tensor)
    assert streams.used() == {"torch"}
    del torch.streams[0]
    call(tensor, tensor)
    assert streams.used() == {"default"}


def test_arrays_of_cupy_are_worked_on_on_cupy_s_stream(machine: Machine, torch: FakeTorch) -> None:
    streams = Streams(machine)
    torch.streams[0], machine.streams[0] = streams.of_torch, streams.of_cupy.ptr
    append(machine.array, machine.array)
    assert streams.used() == {"cupy"}
    del machine.streams[0]
    append(machine.array, machine.array)
    assert streams.used() == {"default"}


def test_a_stream_that_is_named_is_the_one(machine: Machine, torch: FakeTorch) -> None:
    streams = Streams(machine)
    torch.streams[0] = streams.of_torch
    pool = torch.Tensor(machine.array(np.zeros((3, 4), np.uint8)))
    ops.fill_pages(pool, [1], 7, stream=streams.of_cupy)
    assert streams.used() == {"cupy"}


def test_a_torch_that_uses_no_gpu_is_not_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of the current stream would initialise torch."""
    fake = FakeTorch(is_initialized=False)
    fake.cuda.current_stream = None
    monkeypatch.setitem(sys.modules, "torch", fake)
    sizes = {"pages": 3, "layers": 1, "page_size": 2, "heads": 1, "head_dim": 4}
    pool = ops.PoolLayout.allocate("max", **sizes, dtype="int8", device="cuda:0")
    ops.fill_pages(pool.arrays, [1], 7)
    assert (machine.host(pool.arrays)[1] == 7).all()


# ---- two libraries -------------------------------------------------------------------------------
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chosen", ["cupy", "torch"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_of_two_libraries_the_one_that_chose_a_stream_decides(
    machine: Machine, torch: FakeTorch, call: Call, chosen: str, is_turned: bool
) -> None:
    streams = Streams(machine)
    if chosen == "torch":
        torch.streams[0] = streams.of_torch
    else:
        machine.streams[0] = streams.of_cupy.ptr

    def tensor(array: Any) -> Any:
        return torch.Tensor(machine.array(array))

    first, second = (machine.array, tensor) if is_turned else (tensor, machine.array)
    call(first, second)
    assert streams.used() == {chosen}


def test_two_libraries_that_chose_different_streams_are_refused(
    machine: Machine, torch: FakeTorch
) -> None:
    streams = Streams(machine)
    torch.streams[0], machine.streams[0] = streams.of_torch, streams.of_cupy.ptr
    pool = machine.array(np.zeros((3, 4), np.uint8))
    ids = torch.Tensor(machine.array(np.ones(1, np.int64)))
    with pytest.raises(
        ValueError, match=r"several libraries, whose current streams on cuda:0 .* pass stream="
    ):
        ops.fill_pages(pool, ids, 7)
    assert streams.used() == set()
    ops.fill_pages(pool, ids, 7, stream=streams.of_torch)
    assert streams.used() == {"torch"}


def test_two_libraries_that_chose_the_same_stream_agree(machine: Machine, torch: FakeTorch) -> None:
    streams = Streams(machine)
    torch.streams[0], machine.streams[0] = streams.of_torch, streams.of_torch.ptr
    fill(machine.array, lambda array: torch.Tensor(machine.array(array)))
    assert streams.used() == {"torch"}


# ---- DLPack --------------------------------------------------------------------------------------
class Exchanged:
    """A DLPack array of a library that writes it on the library's own stream."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.stream = KERNELS.Stream(0)

    def copy_from(self, other: Any) -> None:
        addresses = self._array.data.ptr, other.data.ptr
        KERNELS.copy(*addresses, other.nbytes, 0, self.stream.ptr)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        event = KERNELS.Event(0)
        KERNELS.record(event.ptr, 0, self.stream.ptr)
        KERNELS.wait(event.ptr, 0, stream)
        return self._array


@pytest.mark.parametrize("chosen", ["named", "torch", "cupy"])
@pytest.mark.parametrize("seed", range(10))
def test_what_dlpack_hands_over_is_waited_for_on_every_stream(
    machine: Machine, torch: FakeTorch, seed: int, chosen: str
) -> None:
    k = Exchanged(machine.array(np.zeros((3, 1, 4), np.int8)))
    offsets = Exchanged(machine.array(np.zeros(2, "u4")))
    contents = machine.array(np.full((3, 1, 4), 7, np.int8)), machine.array(np.array([0, 3], "u4"))
    pool = torch.Tensor(machine.array(np.zeros((3, 2, 1, 4), np.int8)))
    table, lengths = machine.array(np.array([[1, 2]], np.uint32)), machine.array(np.zeros(1, "u4"))
    batch = PagedBatch(pool, None, table, lengths)
    stream = KERNELS.Stream(0)
    if chosen == "torch":
        torch.streams[0] = stream
    elif chosen == "cupy":
        machine.streams[0] = stream.ptr
    machine.in_any_order(seed)
    k.copy_from(contents[0])
    offsets.copy_from(contents[1])
    ops.append(batch, 0, k, None, offsets, stream=stream if chosen == "named" else None)
    assert machine.host(pool.array)[1:].ravel().tolist() == [7] * 12 + [0] * 4


# ---- managers ------------------------------------------------------------------------------------
@pytest.mark.parametrize("owner", ["manager", "torch"])
def test_a_manager_below_torch_works_on_torch_s_stream(
    machine: Machine, torch: FakeTorch, owner: str
) -> None:
    """Its tables, its copies, and calls with only its arrays run on torch's stream."""
    params = KVCacheParams("float32", 1, 4, num_layers=1, page_size=2, enable_prefix_caching=True)
    more: dict[str, Any] = {}
    if owner == "torch":
        pool = np.zeros((8, 2, 1, 2, 1, 4), np.float32)
        more["blocks"] = [torch.Tensor(machine.array(pool))]
    manager = PagedKVCacheManager(params, 2, 16, devices=["cuda:0"], num_pages=8, **in_groups(more))
    streams = Streams(machine)
    torch.streams[0] = streams.of_torch
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    (inputs,) = manager.fetch([context])
    ops.build_slots(inputs, np.array([0, 3], np.uint32))
    k = torch.Tensor(machine.array(np.ones((3, 1, 4), np.float32)))
    ops.append(inputs, 0, k, k, np.array([0, 3], np.uint32))
    assert streams.used() == {"torch"}
    context.update(4)
    manager.step([context])
    assert manager.export_sequence("a")
    assert streams.used() <= {"torch"}
    assert KERNELS.emulation.num_waiting() == 0


def test_a_manager_works_on_cupy_s_stream_where_both_chose_one(
    machine: Machine, torch: FakeTorch
) -> None:
    params = KVCacheParams("float32", 1, 4, num_layers=1, page_size=2)
    manager = PagedKVCacheManager(params, 2, 16, devices=["cuda:0"], num_pages=8)
    streams = Streams(machine)
    torch.streams[0], machine.streams[0] = streams.of_torch, streams.of_cupy.ptr
    manager.claim("a")
    (inputs,) = manager.fetch([TextGenerationContext("a", [1, 2, 3])])
    assert streams.used() == {"cupy"}
    k = torch.Tensor(machine.array(np.ones((3, 1, 4), np.float32)))
    with pytest.raises(ValueError, match="pass stream="):
        ops.append(inputs, 0, k, k, np.array([0, 3], np.uint32))
