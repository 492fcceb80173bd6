# SPDX-License-Identifier: Apache-2.0
"""kvcore.ops on cupy arrays over emulated memory, against the same calls on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, check_bytes, require_emulation
from kvcore import KVCacheError, PagedBatch, RaggedKVCacheInputs, ops
from kvcore.support.dtypes import WIDE, numpy_dtype

KERNELS = require_emulation()

TABLE, LENGTHS, NEW = [[4, 1, 0], [2, 9, 9], [5, 3, 6]], [5, 0, 3], [2, 0, 4]
PAGE = 3


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random numbers for arithmetic, or random bytes of a dtype, with NaN among them."""
    rng = np.random.default_rng(seed)
    if dtype in WIDE:
        return rng.normal(size=shape).astype(numpy_dtype(dtype))
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return rng.integers(0, 256, size, np.uint8).view(kind).reshape(shape)


def arguments(dtype: str = "float32", heads: int = 2, dim: int = 8) -> dict[str, Any]:
    table = np.array(TABLE, np.uint32)
    lengths = np.array(LENGTHS, np.uint32)
    offsets = np.cumsum([0, *NEW]).astype(np.uint32)
    pools = [drawn((7, PAGE, heads, dim), dtype, seed) for seed in (1, 2)]
    return {"pools": pools, "table": table, "lengths": lengths, "offsets": offsets}


def batches(machine: Machine, given: dict[str, Any]) -> tuple[PagedBatch, Any]:
    """Return the same batch in host memory and on device 1."""
    arrays = [a.copy() for a in (*given["pools"], given["table"], given["lengths"])]
    on_device = [machine.array(a, 1) for a in arrays]
    return PagedBatch(*arrays), PagedBatch(*on_device)


# ---- tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), ("float16", 59), ("int8", 7)])
@pytest.mark.parametrize("offsets_from", ["host", "device"])
def test_append_writes_the_bytes_of_the_cpu(
    machine: Machine, dtype: str, dim: int, offsets_from: str
) -> None:
    given = arguments(dtype, dim=dim)
    host, device = batches(machine, given)
    k, v = (drawn((6, 2, dim), dtype, seed) for seed in (3, 4))
    ops.append(host, 0, k, v, given["offsets"])
    offsets = given["offsets"]
    if offsets_from == "device":
        offsets = machine.array(offsets, 1)
    ops.append(device, 0, machine.array(k, 1), machine.array(v, 1), offsets)
    check_bytes(machine, device.key_pool, host.key_pool)
    check_bytes(machine, device.value_pool, host.value_pool)


def test_slices_of_a_fused_qkv_are_appended_where_they_lie(machine: Machine) -> None:
    given = arguments()
    host, device = batches(machine, given)
    fused = drawn((6, 3, 2, 8), "float32")
    on_device = machine.array(fused, 1)
    ops.append(host, 0, fused[:, 1], fused[:, 2], given["offsets"])
    ops.append(device, 0, on_device[:, 1], on_device[:, 2], given["offsets"])
    check_bytes(machine, device.key_pool, host.key_pool)
    check_bytes(machine, device.value_pool, host.value_pool)


def test_scatter_and_gather_are_each_others_inverse(machine: Machine) -> None:
    given = arguments()
    _, device = batches(machine, given)
    k, v = (drawn((10, 2, 8), "float32", seed) for seed in (3, 4))
    offsets = np.array([0, 6, 6, 10], np.uint32)
    ops.scatter(device, 0, machine.array(k, 1), machine.array(v, 1), offsets)
    lengths = np.diff(offsets).astype(np.uint32)
    for taken in (lengths, machine.array(lengths, 1)):
        found = ops.gather(device, 0, lengths=taken)
        check_bytes(machine, found[0], k)
        check_bytes(machine, found[1], v)
        check_bytes(machine, found[2], offsets)


def test_gather_takes_room_that_is_longer_than_the_tokens(machine: Machine) -> None:
    given = arguments()
    host, device = batches(machine, given)
    k, v, _ = ops.gather(host, 0)
    room = [machine.array(np.full((11, 2, 8), 7, np.float32), 1) for _ in range(2)]
    found = ops.gather(device, 0, out=tuple(room))
    assert found[0] is room[0]
    for array, expected in zip(room, (k, v), strict=True):
        check_bytes(machine, array[:8], expected)
        assert (machine.host(array)[8:] == 7).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale", [0.5, [0.25, 2.0]])
def test_append_quantises_by_given_scales_as_the_cpu(
    machine: Machine, dtype: str, scale: Any
) -> None:
    given = arguments(dtype)
    host, device = batches(machine, given)
    k, v = (drawn((6, 2, 8), "float32", seed) for seed in (3, 4))
    ops.append(host, 0, k, v, given["offsets"], scale=scale)
    ops.append(device, 0, machine.array(k, 1), machine.array(v, 1), given["offsets"], scale=scale)
    check_bytes(machine, device.key_pool, host.key_pool)
    check_bytes(machine, device.value_pool, host.value_pool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_inputs_write_and_read_their_scales(machine: Machine, dtype: str) -> None:
    given = arguments("int8")
    blocks = drawn((7, 2, 2, PAGE, 2, 8), "int8")
    scales = np.abs(drawn((7, 2, 2, PAGE, 2, 2), "float32"))
    steps = np.zeros((1, 2), np.uint32)
    host = RaggedKVCacheInputs(blocks, given["lengths"], given["table"], steps, scales)
    cached, table = machine.array(given["lengths"]), machine.array(given["table"])
    device = RaggedKVCacheInputs(machine.array(blocks), cached, table, steps, machine.array(scales))
    k, v = (drawn((6, 2, 8), dtype, seed) for seed in (3, 4))
    ops.append(device, 1, machine.array(k), machine.array(v), given["offsets"])
    found = ops.gather(device, 1, lengths=given["lengths"])
    ops.append(host, 1, k, v, given["offsets"])
    expected = ops.gather(host, 1, lengths=given["lengths"])
    check_bytes(machine, device.blocks, host.blocks)
    check_bytes(machine, device.kv_scales, host.kv_scales)
    for one, other in zip(found, expected, strict=True):
        check_bytes(machine, one, other)


def test_head_scales_of_a_batch_come_from_the_host(machine: Machine) -> None:
    given = arguments("int8")
    arrays = [*given["pools"], given["table"], given["lengths"]]
    scales: dict[str, Any] = {"key_scales": 0.5, "value_scales": 0.25}
    host = PagedBatch(*arrays, **scales)
    device = PagedBatch(*map(machine.array, arrays), **scales)
    for one, other in zip(ops.gather(device, 0), ops.gather(host, 0), strict=True):
        check_bytes(machine, one, other)


def test_latent_rows_of_656_bytes(machine: Machine) -> None:
    rows = np.zeros((4, 2, 656), np.uint8)
    table, lengths = np.array([[3, 1]], np.uint32), np.array([1], np.uint32)
    host = PagedBatch(rows, None, table, lengths, layout="MLA_FP8")
    arrays = machine.array(rows), None, machine.array(table), machine.array(lengths)
    device = PagedBatch(*arrays, layout="MLA_FP8")
    k = drawn((3, 1, 576), "bfloat16")
    offsets = np.array([0, 3], np.uint32)
    ops.append(host, 0, k, None, offsets)
    ops.append(device, 0, machine.array(k), None, offsets)
    check_bytes(machine, device.key_pool, rows)
    taken = np.array([4], np.uint32)
    found, expected = (ops.gather(b, 0, lengths=taken) for b in (device, host))
    check_bytes(machine, found[0], expected[0])
    assert found[1] is None


def test_tokens_without_a_page_are_skipped_on_a_gpu(machine: Machine) -> None:
    given = arguments()
    _, device = batches(machine, given)
    expected = given["pools"][0].copy()
    k = drawn((5, 2, 8), "float32")
    tokens = machine.array(k, 1)
    ops.scatter(device, 0, tokens, tokens, np.array([0, 0, 5, 5], np.uint32))  # row 1 has one page
    expected[2] = k[:PAGE]
    check_bytes(machine, device.key_pool, expected)


# ---- pages ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["host", "device"])
def test_pages_are_copied_filled_and_digested(machine: Machine, where: str) -> None:
    pool = drawn((7, 2, 3, PAGE, 2, 5), "float16")
    device = machine.array(pool)
    pairs, ids = np.array([[0, 5], [1, 6]]), np.array([2, 4])
    given = [pairs, ids] if where == "host" else [machine.array(pairs), machine.array(ids)]
    ops.copy_pages(pool, pairs)
    ops.copy_pages(device, given[0])
    ops.fill_pages(pool, ids, 0xFF)
    ops.fill_pages(device, given[1], 0xFF)
    check_bytes(machine, device, pool)
    check_bytes(machine, ops.checksum(device, given[1]), ops.checksum(pool, ids))
    ops.zero_pages(device, given[1])
    assert not machine.host(device)[[2, 4]].any()


def test_a_pair_of_pools_has_one_digest(machine: Machine) -> None:
    pools = tuple(drawn((3, 4), "float32", seed) for seed in (1, 2))
    device = tuple(map(machine.array, pools))
    check_bytes(machine, ops.checksum(device, [2, 0]), ops.checksum(pools, [2, 0]))


def test_bad_ids_of_the_host_are_refused_before_anything_is_written(machine: Machine) -> None:
    pool = machine.array(np.zeros((3, 4), np.float32))
    with pytest.raises(IndexError, match="page 3 is outside the pool of 3 pages"):
        ops.fill_pages(pool, [0, 3], 1)
    with pytest.raises(ValueError, match="to page 1 twice"):
        ops.copy_pages(pool, [(0, 1), (2, 1)])
    with pytest.raises(TypeError, match="ids has dtype int32, must be int64 and contiguous"):
        ops.fill_pages(pool, machine.array(np.zeros(1, np.int32)), 1)
    assert not machine.host(pool).any()


def test_keys_and_values_are_moved_by_one_kernel(machine: Machine) -> None:
    given = arguments()
    device = batches(machine, given)[1]
    offsets = machine.array(given["offsets"], 1)
    k, v = (machine.array(drawn((sum(NEW), 2, 8), "float32", seed), 1) for seed in (3, 4))
    machine.in_any_order(1)
    ops.append(device, 0, k, v, offsets)
    assert KERNELS.emulation.num_waiting() == 1


# ---- slots ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slots_are_those_of_the_cpu(machine: Machine, dtype: str) -> None:
    given = arguments()
    host, device = batches(machine, given)
    check_bytes(
        machine, ops.build_slots(device, given["offsets"]), ops.build_slots(host, given["offsets"])
    )
    out = np.zeros(9, dtype)
    room = machine.array(out, 1)
    ops.build_slots(host, given["offsets"], out=out)
    assert ops.build_slots(device, machine.array(given["offsets"], 1), out=room) is room
    check_bytes(machine, room, out)


def test_holes_in_front_of_the_new_tokens_are_not_looked_up(machine: Machine) -> None:
    """The holes are entries of pages that windows gave back."""
    given = arguments()
    host, _ = batches(machine, given)
    given["table"][[0, 2], 0] = 7, 2**32 - 1
    _, device = batches(machine, given)
    k, v = (drawn((6, 2, 8), "float32", seed) for seed in (3, 4))
    offsets = given["offsets"]
    slots = ops.build_slots(host, offsets)
    ops.append(host, 0, k, v, offsets)
    on_device = machine.array(k, 1), machine.array(v, 1), machine.array(offsets, 1)
    ops.append(device, 0, *on_device)
    room = machine.array(np.zeros(6, np.int64), 1)
    check_bytes(machine, ops.build_slots(device, on_device[2], out=room), slots)
    _, other = batches(machine, given)
    assert machine.host(ops.append_slots(other, 0, *on_device[:2], room)).tolist() == [0]
    for found in (device, other):
        check_bytes(machine, found.key_pool, host.key_pool)
        check_bytes(machine, found.value_pool, host.value_pool)


def test_how_many_slots_there_are_is_not_read_back(machine: Machine) -> None:
    given = arguments()
    _, device = batches(machine, given)
    with pytest.raises(ValueError, match="pass out for the slots"):
        ops.build_slots(device, machine.array(given["offsets"], 1))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_append_slots_counts_what_is_beyond_the_pool(
    machine: Machine, where: str, dtype: str
) -> None:
    host, device = batches(machine, arguments())
    slots = np.array([3, -1, 900, 0, 17], dtype)
    k, v = (drawn((5, 2, 8), "float32", seed) for seed in (3, 4))
    assert ops.append_slots(host, 0, k, v, slots) == 1
    given = slots if where == "host" else machine.array(slots, 1)
    bad = ops.append_slots(device, 0, machine.array(k, 1), machine.array(v, 1), given)
    assert machine.host(bad).tolist() == [1]
    check_bytes(machine, device.key_pool, host.key_pool)
    check_bytes(machine, device.value_pool, host.value_pool)


def test_a_slot_of_the_host_that_is_named_twice_is_refused(machine: Machine) -> None:
    _, device = batches(machine, arguments())
    k = machine.array(drawn((2, 2, 8), "float32"), 1)
    with pytest.raises(ValueError, match=r"slots\[1\] is 3, which is named twice"):
        ops.append_slots(device, 0, k, k, np.array([3, 3]))


@pytest.mark.parametrize("where", ["host", "device"])
def test_lengths_advance_on_the_device(machine: Machine, where: str) -> None:
    lengths, offsets = np.array([5, 9, 1], np.uint32), np.array([0, 3, 4, 9], np.uint32)
    active = np.array([True, False, True])
    expected = ops.advance_lengths(lengths, offsets, active=active)
    device = machine.array(lengths)
    given = offsets if where == "host" else machine.array(offsets)
    check_bytes(machine, ops.advance_lengths(device, given, active=machine.array(active)), expected)
    assert ops.advance_lengths(device, given, out=device) is device
    check_bytes(machine, device, ops.advance_lengths(lengths, offsets))


# ---- dtypes and states ---------------------------------------------------------------------------
@pytest.mark.parametrize("granularity", [4, 12, "head", "tensor"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_quantised_codes_are_those_of_the_cpu(
    machine: Machine, granularity: int | str, dtype: str
) -> None:
    x = drawn((5, 3, 12), "float16")
    expected = ops.quantize(x, dtype, granularity)
    found = ops.quantize(machine.array(x), dtype, granularity)
    for one, other in zip(found, expected, strict=True):
        check_bytes(machine, one, other)
    check_bytes(machine, ops.dequantize(*found, "bfloat16"), ops.dequantize(*expected, "bfloat16"))


def test_an_x_that_is_not_in_c_order_is_copied(machine: Machine) -> None:
    x = drawn((5, 3, 12), "float32")
    found = ops.quantize(machine.array(x).transpose(1, 0, 2), "int8", 12)
    for one, other in zip(found, ops.quantize(x.transpose(1, 0, 2), "int8", 12), strict=True):
        check_bytes(machine, one, other)


def test_merged_states_are_those_of_the_cpu(machine: Machine) -> None:
    o_a, o_b = (drawn((7, 3, 16), "float32", seed) for seed in (1, 2))
    lse_a, lse_b = (drawn((7, 3), "float32", seed) for seed in (3, 4))
    lse_a[0] = -np.inf
    states = o_a, lse_a, o_b, lse_b
    expected = ops.merge_states(*states)
    device = tuple(map(machine.array, states))
    for one, other in zip(ops.merge_states(*device), expected, strict=True):
        np.testing.assert_allclose(machine.host(one), other, rtol=1e-6, atol=1e-6)
    assert ops.merge_states(*device, out=device[:2]) == device[:2]


# ---- devices of the arrays -----------------------------------------------------------------------
def test_every_array_is_on_the_device_of_the_pool(machine: Machine) -> None:
    given = arguments()
    _, device = batches(machine, given)
    k = drawn((6, 2, 8), "float32")
    with pytest.raises(ValueError, match="v is in host memory, must be on cuda:1 as pool is"):
        ops.append(device, 0, machine.array(k, 1), k, given["offsets"])
    with pytest.raises(ValueError, match="k is on cuda:0, must be on cuda:1 as pool is"):
        ops.append(device, 0, machine.array(k, 0), machine.array(k, 1), given["offsets"])
    offsets = machine.array(given["offsets"], 0)
    with pytest.raises(ValueError, match="row_offsets is on cuda:0, must be on cuda:1"):
        ops.append(device, 0, machine.array(k, 1), machine.array(k, 1), offsets)
    with pytest.raises(ValueError, match="ids is on cuda:0, the other arrays of the call are in"):
        ops.fill_pages(k, machine.array(np.zeros(1, np.int64)), 0)


def test_a_stream_is_for_arrays_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="stream is given for arrays in host memory"):
        ops.zero_pages(np.zeros((2, 3)), [0], stream=0)


def test_shapes_are_checked_as_on_the_cpu(machine: Machine) -> None:
    given = arguments()
    host, device = batches(machine, given)
    k = drawn((5, 2, 8), "float32")
    for batch, tokens in ((host, k), (device, machine.array(k, 1))):
        with pytest.raises(ValueError, match=r"k has shape \(5, 2, 8\), must be \(6, 2, 8\)"):
            ops.append(batch, 0, tokens, tokens, given["offsets"])
        descending = np.array([0, 3, 2, 5], np.uint32)
        with pytest.raises(ValueError, match=r"row_offsets\[2\] is 2, must not be below"):
            ops.append(batch, 0, tokens, tokens, descending)


def test_a_failing_call_says_what_was_asked(machine: Machine) -> None:
    pool = machine.array(np.zeros((3, 4), np.float32))
    with pytest.raises(KVCacheError, match=r"filling 1 pages on cuda:0: .*code 400"):
        ops.fill_pages(pool, machine.array(np.zeros(1, np.int64)), 0, stream=12345)
