# SPDX-License-Identifier: Apache-2.0
"""NVFP4 on emulated devices against the CPU, which other tests compare with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, check_bytes, require_emulation
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_oracle import drawn, specials
from nvfp4_pools import NEW, Pools

KERNELS = require_emulation()

OFFSETS = np.cumsum([0, *NEW]).astype(np.uint32)
KINDS: list[dict[str, Any]] = [
    {},
    {"layout": "HND", "heads": 3},
    {"global_scales": (0.5, np.array([3e-3], np.float32))},
    {"dims": (16, 112), "heads": 1},
    {"dims": (128, 80), "layout": "HND"},
]


def both(machine: Machine, **kind: Any) -> tuple[Any, Any]:
    """Return the same batch in host memory and on device 1."""
    host = Pools(**kind).batch()
    device = Pools(**kind).batch(lambda array: machine.array(array, 1))
    return host, device


def same_pools(machine: Machine, device: Any, host: Any) -> None:
    for name in ("key_pool", "value_pool", "key_scales", "value_scales"):
        check_bytes(machine, getattr(device, name), getattr(host, name))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(5, 3, 48), (1, 16), (4, 2, 128), (0, 32), (3, 0), (257, 16)])
@pytest.mark.parametrize("global_scale", [1.0, 0.37, 1e-44, 3.4e38])
def test_blocks_have_the_bytes_of_the_cpu(
    machine: Machine, shape: tuple[int, ...], dtype: str, global_scale: float
) -> None:
    for x in (drawn(shape, dtype), drawn(shape, dtype, 1, 6), drawn(shape, dtype, 2, -9)):
        expected = ops.quantize(x, "nvfp4", 16, global_scale=global_scale)
        found = ops.quantize(machine.array(x), "nvfp4", 16, global_scale=global_scale)
        for one, other in zip(found, expected, strict=True):
            check_bytes(machine, one, other)
        for back in WIDE:
            check_bytes(
                machine,
                ops.dequantize(*found, back, global_scale=global_scale),
                ops.dequantize(*expected, back, global_scale=global_scale),
            )


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("global_scale", [1.0, 2.0**-12, 5e37])
def test_codes_ties_and_ends(machine: Machine, dtype: str, global_scale: float) -> None:
    with np.errstate(over="ignore"):
        x = specials().astype(numpy_dtype(dtype))
    expected = ops.quantize(x, "nvfp4", 16, global_scale=global_scale)
    found = ops.quantize(machine.array(x), "nvfp4", 16, global_scale=global_scale)
    for one, other in zip(found, expected, strict=True):
        check_bytes(machine, one, other)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_code_and_scale_is_read(machine: Machine, dtype: str) -> None:
    codes = np.random.default_rng(1).integers(0, 256, (256, 8), np.uint8)
    codes[:16] = np.arange(128).reshape(16, 8) * 2 + 1
    scales = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn"))[:, None]
    for global_scale in (1.0, 0.37, 1e-44, 3.4e38):
        found = ops.dequantize(
            machine.array(codes), machine.array(scales), dtype, global_scale=global_scale
        )
        check_bytes(machine, found, ops.dequantize(codes, scales, dtype, global_scale=global_scale))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_that_are_aligned_to_nothing(machine: Machine, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    x = drawn((6, 33), dtype)
    expected = ops.quantize(x[:, 1:], "nvfp4", 16)
    room = machine.memory((6 * 32 + 1,), kind)
    machine.view(room)[1:] = x[:, 1:].reshape(-1)
    codes = machine.memory((6 * 16 + 1,), np.uint8)
    out = codes[1:].reshape(6, 16), machine.memory((6, 2), numpy_dtype("float8_e4m3fn"))
    ops.quantize(room[1:].reshape(6, 32), "nvfp4", 16, out=out)
    for one, other in zip(out, expected, strict=True):
        check_bytes(machine, one, other)
    back = machine.memory((6 * 32 + 1,), kind)[1:].reshape(6, 32)
    ops.dequantize(*out, dtype, out=back)
    check_bytes(machine, back, ops.dequantize(*expected, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("offsets_from", ["host", "device"])
def test_append_and_gather_have_the_bytes_of_the_cpu(
    machine: Machine, kind: dict[str, Any], dtype: str, offsets_from: str
) -> None:
    host, device = both(machine, **kind)
    k, v = Pools(**kind).tokens(6, dtype)
    ops.append(host, 0, k, v, OFFSETS)
    offsets = OFFSETS if offsets_from == "host" else machine.array(OFFSETS, 1)
    ops.append(device, 0, machine.array(k, 1), machine.array(v, 1), offsets)
    same_pools(machine, device, host)
    new = np.array([6, 0, 4], np.uint32)
    for back in (None, *WIDE):
        expected = ops.gather(host, 0, lengths=new, dtype=back)
        found = ops.gather(device, 0, lengths=new, dtype=back)
        for one, other in zip(found, expected, strict=True):
            check_bytes(machine, one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
@pytest.mark.parametrize("slots_from", ["host", "device"])
def test_slots_have_the_bytes_of_the_cpu(
    machine: Machine, kind: dict[str, Any], slot_dtype: Any, slots_from: str
) -> None:
    host, device = both(machine, **kind)
    k, v = Pools(**kind).tokens(9, "float16")
    slots = np.array([4, -1, 20, 7, 21, 1000, 0], slot_dtype)
    given = slots if slots_from == "host" else machine.array(slots, 1)
    expected = ops.append_slots(host, 0, k, v, slots)
    bad = ops.append_slots(device, 0, machine.array(k, 1), machine.array(v, 1), given)
    assert machine.host(bad).tolist() == [expected] == [2]
    same_pools(machine, device, host)


def test_rows_of_k_and_v_may_differ_in_dtype(machine: Machine) -> None:
    host, device = both(machine)
    k, v = Pools().tokens(6)[0], Pools().tokens(6, "bfloat16")[1]
    ops.append(host, 0, k, v, OFFSETS)
    ops.append(device, 0, machine.array(k, 1), machine.array(v, 1), OFFSETS)
    same_pools(machine, device, host)


def test_strided_rows_and_pools_are_written_where_they_lie(machine: Machine) -> None:
    """The row size of the fused QKV is no multiple of 16, and heads have gaps between them."""
    host, device = both(machine, heads=3, dims=(32, 32))
    cut = [
        {name: getattr(batch, name)[:, :, 1:] for name in Pools().arrays}
        for batch in (host, device)
    ]
    fused = drawn((6, 3, 2, 33), "float16")
    on_device = machine.array(fused, 1)
    for batch, arrays, qkv in ((host, cut[0], fused), (device, cut[1], on_device)):
        of_heads = type(batch)(
            **arrays, lookup_table=batch.lookup_table, cache_lengths=batch.cache_lengths
        )
        ops.append(of_heads, 0, qkv[:, 1, :, 1:], qkv[:, 2, :, :32], OFFSETS)
    same_pools(machine, device, host)


def test_a_global_scale_on_the_device_is_read_when_the_work_runs(machine: Machine) -> None:
    scale = machine.array(np.array([1.0], np.float32))
    x = drawn((3, 32), "float16")
    given = machine.array(x)
    out = (
        machine.array(np.zeros((3, 16), np.uint8)),
        machine.array(np.zeros((3, 2), numpy_dtype("float8_e4m3fn"))),
    )
    machine.in_any_order(3)  # enqueued work runs later
    machine.view(scale)[...] = 0.25
    ops.quantize(given, "nvfp4", 16, global_scale=scale, out=out)
    for one, other in zip(out, ops.quantize(x, "nvfp4", 16, global_scale=0.25), strict=True):
        check_bytes(machine, one, other)
    back = ops.dequantize(*out, "float32", global_scale=scale)
    expected = ops.quantize(x, "nvfp4", 16, global_scale=0.25)
    check_bytes(machine, back, ops.dequantize(*expected, "float32", global_scale=0.25))


def test_global_scales_of_pools_may_lie_on_the_device(machine: Machine) -> None:
    scales = [machine.array(np.array([value], np.float32), 1) for value in (0.5, 3e-3)]
    host = Pools(global_scales=(0.5, 3e-3)).batch()
    device = Pools(global_scales=tuple(scales)).batch(lambda array: machine.array(array, 1))
    k, v = Pools().tokens(6)
    ops.append(host, 0, k, v, OFFSETS)
    ops.append(device, 0, machine.array(k, 1), machine.array(v, 1), OFFSETS)
    same_pools(machine, device, host)


def test_global_scales_elsewhere_are_refused(machine: Machine) -> None:
    elsewhere = machine.array(np.array([1.0], np.float32), 0)
    x = drawn((1, 16), "float32")
    with pytest.raises(ValueError, match="global_scale is on cuda:0, must be on cuda:1"):
        ops.quantize(machine.array(x, 1), "nvfp4", 16, global_scale=elsewhere)
    with pytest.raises(ValueError, match=r"global_scale is on cuda:0|are in host memory"):
        ops.quantize(x, "nvfp4", 16, global_scale=elsewhere)
    _, device = both(machine, global_scales=(elsewhere, 1.0))
    k, v = (machine.array(array, 1) for array in Pools().tokens(6))
    with pytest.raises(ValueError, match=r"global_scales\[0\] is on cuda:0"):
        ops.append(device, 0, k, v, OFFSETS)


def test_a_captured_graph_follows_a_global_scale_on_the_device(machine: Machine) -> None:
    scale = machine.array(np.array([1.0], np.float32))
    x = drawn((2, 32), "float16")
    given = machine.array(x)
    out = (
        machine.array(np.zeros((2, 16), np.uint8)),
        machine.array(np.zeros((2, 2), numpy_dtype("float8_e4m3fn"))),
    )
    stream = KERNELS.Stream(0)
    KERNELS.emulation.begin_capture(0, stream.ptr)
    ops.quantize(given, "nvfp4", 16, global_scale=scale, out=out, stream=stream.ptr)
    graph = KERNELS.emulation.end_capture(0, stream.ptr)
    for value in (0.5, 0.01):
        machine.view(scale)[...] = value
        KERNELS.emulation.replay(graph, 0, stream.ptr)
        for one, other in zip(out, ops.quantize(x, "nvfp4", 16, global_scale=value), strict=True):
            check_bytes(machine, one, other)
