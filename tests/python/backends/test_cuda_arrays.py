# SPDX-License-Identifier: Apache-2.0
"""Arrays and streams of other libraries, as the GPU kernels accept them."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import require
from cuda_machine import Machine, emulated, require_emulation
from kvcore import KVCacheError, ops
from kvcore.backends.arrays import host_array, is_on_gpu
from kvcore.backends.cuda import availability
from kvcore.backends.cuda.pinned import is_pinned, pinned_zeros
from kvcore.backends.selection import any_array
from kvcore.cuda import device_array, read_only, stream_handle
from kvcore.support.dtypes import numpy_dtype

KERNELS = require_emulation()


class Interface:
    """An array of another library that has only ``__cuda_array_interface__``."""

    def __init__(self, array: Any, *, is_read_only: bool = False, **changes: Any) -> None:
        self.array = array
        self.dtype = array.dtype
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, is_read_only),
            "strides": array.strides,
        } | changes


# ---- arrays --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "float8_e4m3fn"])
def test_an_interface_is_seen_where_it_lies(machine: Machine, dtype: str) -> None:
    array = machine.array(np.arange(24).reshape(2, 3, 4).astype(numpy_dtype(dtype)), 1)
    seen = device_array(Interface(array.transpose(1, 0, 2)), "x")
    assert (seen.data.ptr, seen.data.device_id) == (array.data.ptr, 1)
    assert (seen.dtype, seen.shape) == (numpy_dtype(dtype), (3, 2, 4))
    assert seen.strides == array.transpose(1, 0, 2).strides


def test_an_interface_without_strides_is_in_c_order(machine: Machine) -> None:
    array = machine.array(np.zeros((2, 3), np.float32))
    assert device_array(Interface(array, strides=None), "x").strides == (12, 4)


def test_a_seen_array_keeps_its_owner(machine: Machine) -> None:
    given = Interface(machine.array(np.zeros(3)))
    seen = device_array(given, "x")
    count = sys.getrefcount(given)
    del seen
    gc.collect()
    assert sys.getrefcount(given) == count - 1


def test_what_its_library_forbids_to_write_is_not_written(machine: Machine) -> None:
    array = machine.array(np.zeros((3, 4), np.float32))
    given = Interface(array, is_read_only=True)
    with pytest.raises(ValueError, match="the pool is read-only"):
        ops.fill_pages(given, [0], 1)
    with pytest.raises(ValueError, match="the pool is read-only"):
        ops.fill_pages(read_only(array)[1:], [0], 1)
    assert machine.host(ops.checksum(given, [0])).tolist() == [
        int(ops.checksum(np.zeros((1, 4), np.float32), [0])[0])
    ]
    assert not machine.host(array).any()


def test_freed_memory_is_noticed(machine: Machine) -> None:
    array = machine.array(np.zeros(3))
    with pytest.raises(ValueError, match="x has 3 elements and no memory; was it freed"):
        device_array(Interface(array, data=(0, False)), "x")
    with pytest.raises(ValueError, match="x names memory of no GPU; was it freed"):
        device_array(Interface(array, data=(4096, False)), "x")


def test_an_interface_that_names_a_stream_is_waited_for(machine: Machine) -> None:
    array = machine.array(np.zeros((1, 4), np.uint8))
    stream = KERNELS.Stream(0)
    ids = machine.array(np.zeros(1, np.int64))
    machine.in_any_order(1)
    ops.fill_pages(array, ids, 7, stream=stream)
    assert KERNELS.emulation.num_waiting() > 0
    device_array(Interface(array, stream=stream.ptr), "x")
    assert KERNELS.emulation.num_waiting() == 0


def test_torch_tensors_are_seen_by_their_bits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor:
        is_cuda = True
        device = SimpleNamespace(index=1)
        dtype = "torch.bfloat16"
        shape = (3, 4)

        def __init__(self, array: Any) -> None:
            self.array = array

        def stride(self) -> tuple[int, ...]:
            return 1, 3

        def data_ptr(self) -> int:
            return int(self.array.data.ptr)

        def numel(self) -> int:
            return 12

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    given = Tensor(machine.array(np.zeros((4, 3), numpy_dtype("bfloat16")), 1))
    seen = any_array(given, "x")
    assert (seen.dtype, seen.strides) == (numpy_dtype("bfloat16"), (2, 6))
    assert (seen.data.ptr, seen.data.device_id) == (given.data_ptr(), 1)
    given.is_cuda = False
    given.device = SimpleNamespace(index=None)
    with pytest.raises(TypeError, match=r"x is a torch tensor on .*, must be on a GPU"):
        device_array(given, "x")


def test_torch_tensors_in_host_memory_stay_there(machine: Machine) -> None:
    torch = require("torch")
    assert not is_on_gpu(torch.zeros(3))
    assert isinstance(any_array(torch.zeros(3), "x"), np.ndarray)
    with pytest.raises(TypeError, match="x is a torch tensor on cpu, must be on a GPU"):
        device_array(torch.zeros(3), "x")


def test_host_arrays_are_no_device_arrays(machine: Machine) -> None:
    with pytest.raises(TypeError, match="x is a ndarray in host memory, must be an array on a GPU"):
        device_array(np.zeros(3), "x")
    with pytest.raises(TypeError, match="x is a int"):
        device_array(3, "x")
    with pytest.raises(TypeError, match="x is on cuda:1, must be in host memory"):
        host_array(OnGpu(), "x")


class OnGpu:
    """An array that supports only DLPack."""

    def __dlpack__(self) -> None:
        raise AssertionError("not to be called")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1


# ---- streams -------------------------------------------------------------------------------------
def test_streams_of_every_kind_give_their_handle(machine: Machine) -> None:
    cupy_like = SimpleNamespace(ptr=11, device_id=1)
    torch_like = SimpleNamespace(cuda_stream=12, device_index=1, device="cuda:1")
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, 13))
    own = KERNELS.Stream(1)
    machine.streams[1] = 14
    given = [
        cupy_like,
        torch_like,
        protocol,
        own,
        None,
        15,
        0,
        SimpleNamespace(ptr=0, device_id=-1),
    ]
    assert [stream_handle(s, 1) for s in given] == [11, 12, 13, own.ptr, 14, 15, 0, 0]


@pytest.mark.parametrize("name", ["device_id", "device_index", "device"])
def test_a_stream_of_another_device_is_refused(machine: Machine, name: str) -> None:
    stream = SimpleNamespace(ptr=11, **{name: 0})
    with pytest.raises(ValueError, match="the stream is one of cuda:0, the arrays are on cuda:1"):
        stream_handle(stream, 1)


@pytest.mark.parametrize("stream", ["main", 1.5, True])
def test_what_is_no_stream_is_refused(machine: Machine, stream: object) -> None:
    with pytest.raises(TypeError, match="must be a stream of cupy or torch"):
        stream_handle(stream, 0)


def test_a_handle_is_no_negative_number(machine: Machine) -> None:
    with pytest.raises(ValueError, match="stream is -1, must be a handle"):
        stream_handle(-1, 0)


# ---- order ---------------------------------------------------------------------------------------
def write_then_read(machine: Machine, seed: int, *, is_ordered: bool) -> int:
    """Fill a page on one stream and copy it on another; return the copy's first byte."""
    pool = machine.array(np.zeros((2, 4), np.uint8))
    one, two, event = KERNELS.Stream(0), KERNELS.Stream(0), KERNELS.Event(0)
    ids = machine.array(np.zeros(1, np.int64))
    pairs = machine.array(np.array([[0, 1]]))
    machine.in_any_order(seed)
    ops.fill_pages(pool, ids, 9, stream=one)
    if is_ordered:
        KERNELS.record(event.ptr, 0, one.ptr)
        KERNELS.wait(event.ptr, 0, two.ptr)
    ops.copy_pages(pool, pairs, stream=two)
    return int(machine.host(pool)[1, 0])


def test_streams_have_no_order_but_by_events(machine: Machine) -> None:
    assert {write_then_read(machine, s, is_ordered=False) for s in range(20)} == {0, 9}
    assert {write_then_read(machine, s, is_ordered=True) for s in range(20)} == {9}


def test_numbers_of_the_host_may_change_right_after_the_call(machine: Machine) -> None:
    pool = machine.array(np.zeros((8, 4), np.uint8))
    ids = np.array([1, 2])
    stream = KERNELS.Stream(0)
    machine.in_any_order(3)
    ops.fill_pages(pool, ids, 9, stream=stream)
    ids[:] = [5, 6]
    assert machine.host(pool)[:, 0].tolist() == [0, 9, 9, 0, 0, 0, 0, 0]


def test_calls_wait_for_nothing(machine: Machine) -> None:
    pool = machine.array(np.zeros((8, 4), np.uint8))
    stream = KERNELS.Stream(0)
    machine.in_any_order(3)
    ops.fill_pages(pool, [1], 9, stream=stream)
    ops.copy_pages(pool, [(1, 2)], stream=stream)
    ops.checksum(pool, [2], stream=stream)
    assert KERNELS.emulation.num_waiting() >= 6  # three uploads, three kernels


def test_events_tell_when_they_are_done(machine: Machine) -> None:
    pool = machine.array(np.zeros((8, 4), np.uint8))
    stream, event = KERNELS.Stream(0), KERNELS.Event(0)
    machine.in_any_order(3)
    ops.fill_pages(pool, [1], 9, stream=stream)
    KERNELS.record(event.ptr, 0, stream.ptr)
    assert not KERNELS.query(event.ptr, event.device)
    KERNELS.synchronize_event(event.ptr, event.device)
    assert KERNELS.query(event.ptr, event.device)


# ---- memory --------------------------------------------------------------------------------------
def test_memory_that_is_not_there_is_told_in_bytes(machine: Machine) -> None:
    free, total = KERNELS.memory_info(0)
    with pytest.raises(
        MemoryError, match=f"{total + 1} bytes are asked for on cuda:0, {free} of {total} are free"
    ):
        KERNELS.DeviceMemory(0, total + 1)
    with pytest.raises(KVCacheError, match=r"10 bytes are asked for on cuda:7: .*code 101"):
        KERNELS.DeviceMemory(7, 10)
    with pytest.raises(ValueError, match="bytes is -1, must be at least 0"):
        KERNELS.DeviceMemory(0, -1)


def test_objects_give_back_what_they_own(machine: Machine) -> None:
    before = KERNELS.emulation.alive()
    held = [KERNELS.DeviceMemory(1, 10), KERNELS.PinnedMemory(1, 10), KERNELS.Stream(1)]
    held.append(KERNELS.Event(1))
    alive = KERNELS.emulation.alive()
    assert {k: alive[k] - before[k] for k in alive} == dict.fromkeys(before, 1)
    del held
    gc.collect()
    assert KERNELS.emulation.alive() == before


def test_pinned_memory_is_an_array_of_its_exact_size(machine: Machine) -> None:
    array = pinned_zeros((3, 5), np.dtype(np.float32))
    assert array.shape == (3, 5)
    assert array.dtype == np.float32
    assert not array.any()
    assert array.ctypes.data % 4096 == 0
    array[:] = 1
    assert is_pinned(array[1:, ::2])
    assert not is_pinned(np.zeros(3))


def test_copies_go_both_ways(machine: Machine) -> None:
    device = machine.memory((6,), np.uint8)
    source, back = (pinned_zeros((6,), np.dtype(np.uint8)) for _ in range(2))
    source[:] = range(6)
    stream = KERNELS.Stream(0)
    KERNELS.copy(device.data.ptr, source.ctypes.data, 6, 0, stream.ptr)
    addresses = np.array([back.ctypes.data, back.ctypes.data + 3], np.uint64)
    sources = np.array([device.data.ptr + 3, device.data.ptr], np.uint64)
    KERNELS.copy_batch(addresses, sources, np.array([3, 3]), 0, stream.ptr)
    KERNELS.synchronize(0, stream.ptr)
    assert back.tolist() == [3, 4, 5, 0, 1, 2]
    with pytest.raises(ValueError, match="2 destinations, 2 sources and 1 sizes"):
        KERNELS.copy_batch(addresses, sources, np.array([3]), 0, stream.ptr)
    with pytest.raises(ValueError, match=r"bytes\[0\] is -1, below 0"):
        KERNELS.copy_batch(addresses, sources, np.array([-1, 3]), 0, stream.ptr)


# ---- missing driver or library -------------------------------------------------------------------
def test_a_machine_without_a_driver_says_so(machine: Machine) -> None:
    KERNELS.emulation.reset(0)
    reason = "CUDA driver version is insufficient for CUDA runtime version (code 35)"
    assert availability.why_unavailable() == reason
    with pytest.raises(KVCacheError) as raised:
        availability.require_devices()
    assert str(raised.value) == f"CUDA unavailable: {reason}"
    with pytest.raises(KVCacheError, match="CUDA unavailable"):
        any_array(OnGpu(), "x")
    with pytest.raises(KVCacheError, match="CUDA unavailable"):
        pinned_zeros((1,), np.dtype(np.uint8))


def test_a_machine_without_cupy_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Interface(machine.array(np.zeros(3)))
    availability._imported.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    try:
        assert availability.why_unavailable().startswith("cupy is not installed; pip install")
        with pytest.raises(KVCacheError, match="CUDA unavailable: cupy is not installed"):
            ops.zero_pages(given, [0])
    finally:
        availability._imported.cache_clear()


def test_a_build_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    availability._imported.cache_clear()
    monkeypatch.setitem(sys.modules, "kvcore._cuda", None)
    try:
        assert not availability.is_built()
        assert availability.why_unavailable().startswith("kvcore was built without nvcc")
        with pytest.raises(KVCacheError, match="CUDA unavailable: kvcore was built without nvcc"):
            availability.kernels()
    finally:
        availability._imported.cache_clear()


def test_devices_are_counted(machine: Machine) -> None:
    assert availability.require_devices() == 2
    assert availability.why_unavailable() == ""


def test_memory_of_an_earlier_machine_frees_nothing_of_a_later_one() -> None:
    with emulated() as machine:
        old = machine.kernels.DeviceMemory(0, 4096)
    with emulated() as machine:
        owners = [machine.kernels.DeviceMemory(0, 4096) for _ in range(64)]
        assert old.ptr not in {owner.ptr for owner in owners}
        before = KERNELS.emulation.alive()
        del old
        assert KERNELS.emulation.alive() == before
