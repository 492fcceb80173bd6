# SPDX-License-Identifier: Apache-2.0
"""Calls to cupy: memory is allocated in stream order, and cupy compiles nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, check_bytes, require_emulation
from kvcore import PagedBatch, ops
from kvcore.backends.cuda import driver
from kvcore.support.dtypes import numpy_dtype

KERNELS = require_emulation()


# ---- arrays in C order ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_strided_codes_are_dequantised(machine: Machine, dtype: str) -> None:
    """cupy has no kernels for float8."""
    codes = np.random.default_rng(1).integers(0, 120, (4, 6, 8), np.uint8).view(numpy_dtype(dtype))
    scales = np.ones((6, 4, 8), np.float32)[..., ::2]
    given = codes.transpose(1, 0, 2), scales
    on_device = machine.array(codes).transpose(1, 0, 2), machine.array(scales.base)[..., ::2]
    expected = ops.dequantize(*given, "bfloat16")
    check_bytes(machine, ops.dequantize(*on_device, "bfloat16"), expected)


def test_an_x_of_too_many_axes_is_refused(machine: Machine) -> None:
    x = machine.array(np.zeros((1,) * 7 + (2, 4), np.float32))
    with pytest.raises(ValueError, match="an array has 9 axes, must have 8 at most"):
        ops.quantize(x.swapaxes(7, 8), "int8", 2)


# ---- lists on the device -------------------------------------------------------------------------
def test_lengths_on_the_device_may_be_strided(machine: Machine) -> None:
    pool = np.arange(4 * 2 * 3, dtype=np.float32).reshape(4, 2, 1, 3)
    table, lengths = np.array([[3, 0], [1, 2]], np.uint32), np.array([3, 9, 1, 9], np.uint32)
    host = PagedBatch(pool, None, table, lengths[::2].copy())
    device = PagedBatch(
        machine.array(pool), None, machine.array(table), machine.array(lengths[::2].copy())
    )
    found = ops.gather(device, 0, lengths=machine.array(lengths)[::2])
    expected = ops.gather(host, 0)
    check_bytes(machine, found[0], expected[0])
    check_bytes(machine, found[2], expected[2])


@pytest.mark.parametrize("where", ["device", "both", "host"])
def test_pages_move_by_ids_from_anywhere(machine: Machine, where: str) -> None:
    shape = (5, 2, 1, 3, 2, 4)
    content = np.random.default_rng(1).random(shape, np.float32)
    source = ops.PoolLayout(machine.array(content), "max")
    target = ops.PoolLayout(machine.array(np.zeros(shape, np.float32)), "max")
    ids = np.array([3, 0, 1]), np.array([4, 2, 0])
    given: tuple[Any, Any] = ids
    if where != "host":
        given = machine.array(np.repeat(ids[0], 2))[::2], ids[1]
    if where == "device":
        given = given[0], machine.array(ids[1])
    ops.transfer(source, target, given[0], given[1])
    expected = np.zeros(shape, np.float32)
    expected[ids[1]] = content[ids[0]]
    check_bytes(machine, target.arrays, expected)


def test_ids_on_the_device_are_int64(machine: Machine) -> None:
    pools = [ops.PoolLayout(machine.array(np.zeros((3, 2, 1, 2, 1, 4))), "max") for _ in range(2)]
    narrow = machine.array(np.zeros(1, np.int32))
    with pytest.raises(TypeError, match="destination_ids has dtype int32, must be int64 on a GPU"):
        ops.transfer(pools[0], pools[1], np.zeros(1, np.int64), narrow)


# ---- memory --------------------------------------------------------------------------------------
def test_memory_is_used_again_in_the_order_of_the_stream_that_had_it(machine: Machine) -> None:
    one, two = KERNELS.Stream(1), KERNELS.Stream(1)
    kind = np.dtype(np.int8)
    first = driver.empty((8,), kind, 1, one.ptr)
    address = first.data.ptr
    del first
    other = driver.empty((8,), kind, 1, two.ptr)
    again = driver.empty((8,), kind, 1, one.ptr)
    assert (other.data.ptr != address, again.data.ptr) == (True, address)
    assert KERNELS.device_of(address) == 1


def test_streams_of_an_older_cupy_are_entered(machine: Machine) -> None:
    del machine.cupy.cuda.Stream.from_external
    assert driver.empty((2, 3), np.dtype(np.float16), 1, 7).shape == (2, 3)


def test_slots_beyond_the_pool_are_counted_from_zero(machine: Machine) -> None:
    """The counter's memory held other data before."""
    pool = machine.array(np.zeros((2, 2, 1, 4), np.float32))
    table, lengths = (machine.array(np.zeros(s, np.uint32)) for s in ((1, 1), (1,)))
    batch = PagedBatch(pool, None, table, lengths)
    k = machine.array(np.ones((2, 1, 4), np.float32))
    for _ in range(2):
        bad = ops.append_slots(batch, 0, k, None, np.array([1, 99]))
        assert machine.host(bad).tolist() == [1]
        del bad
