# SPDX-License-Identifier: Apache-2.0
"""Streams, graphs, arrays of other libraries and refused arguments, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
import kvcore
from builders import make_params
from gpu_arrays import normal, on_gpu, to_host
from kvcore import PagedBatch, ops
from same_arrays import same_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 4, 64
TABLE = np.array([[2, 0], [1, 3]], np.uint32)
LENGTHS = np.array([3, 16], np.uint32)
ENDS = np.array([0, 20, 25], np.uint32)


def tokens(seed: int) -> Any:
    return normal(np.random.default_rng(seed), (int(ENDS[-1]), HEADS, DIM), np.float16)


def expected_pool(k: Any) -> Any:
    pool = np.full((5, PAGE, HEADS, DIM), 3, np.float16)
    ops.append(PagedBatch(pool, None, TABLE, LENGTHS), 0, k, None, ENDS)
    return pool


def fresh_batch() -> PagedBatch:
    pool = on_gpu(np.full((5, PAGE, HEADS, DIM), 3, np.float16))
    return PagedBatch(pool, None, on_gpu(TABLE), on_gpu(LENGTHS))


@pytest.fixture
def side() -> Any:
    """A stream that does not wait for the default stream, whose work is done."""
    cupy.cuda.Device(0).synchronize()
    return cupy.cuda.Stream(non_blocking=True)


def wait_for_much() -> None:
    """Give cupy's current stream work for some milliseconds."""
    load = cupy.ones((4096, 4096), cupy.float32)
    for _ in range(20):
        load = load @ load


@pytest.mark.parametrize("form", ["current", "argument", "handle"])
def test_work_runs_in_the_order_of_the_stream(side: Any, form: str) -> None:
    """The stream itself writes the tokens, after other work."""
    batch, offsets, ready = fresh_batch(), on_gpu(ENDS), on_gpu(tokens(1))
    k = cupy.zeros_like(ready)
    cupy.cuda.Device(0).synchronize()
    with side:
        wait_for_much()
        k[...] = ready
        if form == "current":
            ops.append(batch, 0, k, None, offsets)
    if form != "current":
        ops.append(batch, 0, k, None, offsets, stream=side if form == "argument" else side.ptr)
    side.synchronize()
    assert same_bytes(expected_pool(tokens(1)), to_host(batch.key_pool))


def test_the_legacy_default_stream_is_taken() -> None:
    batch = fresh_batch()
    with cupy.cuda.Stream.null:
        ops.append(batch, 0, on_gpu(tokens(1)), None, on_gpu(ENDS))
        ops.copy_pages(batch.key_pool, [(2, 4)])
    cupy.cuda.Stream.null.synchronize()
    expected = expected_pool(tokens(1))
    expected[4] = expected[2]
    assert same_bytes(expected, to_host(batch.key_pool))


def test_a_captured_append_writes_what_its_arrays_hold_when_it_is_replayed(side: Any) -> None:
    batch, offsets, k = fresh_batch(), on_gpu(ENDS), on_gpu(tokens(1))
    cupy.cuda.Device(0).synchronize()
    with side:
        side.begin_capture()
        ops.append(batch, 0, k, None, offsets)
        graph = side.end_capture()
        assert (to_host(batch.key_pool) == 3).all()  # captured, not run
        k[...] = on_gpu(tokens(2))
        graph.launch(side)
        side.synchronize()
        assert same_bytes(expected_pool(tokens(2)), to_host(batch.key_pool))
        # Fewer tokens than in the capture: tokens after the last offset are padding.
        batch.key_pool[...] = 3
        offsets[...] = on_gpu(np.array([0, 1, 2], np.uint32))
        graph.launch(side)
        side.synchronize()
    pool = np.full((5, PAGE, HEADS, DIM), 3, np.float16)
    step = np.array([0, 1, 2], np.uint32)
    ops.append(PagedBatch(pool, None, TABLE, LENGTHS), 0, tokens(2)[:2], None, step)
    assert same_bytes(pool, to_host(batch.key_pool))


def test_other_verbs_are_captured_as_well(side: Any) -> None:
    """These calls have their lists on the device, so no call waits for the GPU."""
    batch, offsets = fresh_batch(), on_gpu(ENDS)
    slots = on_gpu(np.full(30, 9, np.int64))
    k = on_gpu(normal(np.random.default_rng(1), (30, HEADS, DIM), np.float16))
    x, lengths, skipped = on_gpu(tokens(4)), on_gpu(LENGTHS), on_gpu(np.full(1, 7, np.int32))
    out = on_gpu(np.zeros(x.shape, np.int8)), on_gpu(np.zeros((*x.shape[:2], 1), np.float32))
    cupy.cuda.Device(0).synchronize()

    def step() -> None:
        ops.build_slots(batch, offsets, out=slots)
        ops.append_slots(batch, 0, k, None, slots, out=skipped)
        ops.quantize(x, "int8", DIM, out=out)
        ops.advance_lengths(lengths, offsets, out=lengths)

    with side:
        step()  # after this, cupy's pool has the memory that the capture needs
        side.synchronize()
        for array, value in ((batch.key_pool, 3), (slots, 9), (out[0], 0)):
            array[...] = value
        lengths[...] = on_gpu(LENGTHS)
        side.begin_capture()
        step()
        graph = side.end_capture()
        graph.launch(side)
        side.synchronize()
    assert same_bytes(expected_pool(to_host(k)[:25]), to_host(batch.key_pool))
    codes, scales = ops.quantize(tokens(4), "int8", DIM)
    assert same_bytes(codes, to_host(out[0]))
    assert same_bytes(scales, to_host(out[1]))
    assert to_host(skipped).tolist() == [0]
    assert to_host(lengths).tolist() == [23, 21]


@pytest.mark.parametrize("name", ["row_offsets", "the count"])
def test_what_a_graph_cannot_hold_is_refused_by_name(side: Any, name: str) -> None:
    batch, offsets, k = fresh_batch(), on_gpu(ENDS), on_gpu(tokens(1))
    slots = on_gpu(np.zeros(25, np.int64))
    call, numbers = (ops.append, ENDS) if name == "row_offsets" else (ops.append_slots, slots)
    cupy.cuda.Device(0).synchronize()
    with side:
        side.begin_capture()
        with pytest.raises(ValueError, match=f"{name} .* captured into a graph"):
            call(batch, 0, k, None, numbers)
        ops.append(batch, 0, k, None, offsets)  # the capture goes on
        side.end_capture().launch(side)
        side.synchronize()
    assert same_bytes(expected_pool(tokens(1)), to_host(batch.key_pool))


@pytest.mark.parametrize("form", ["current", "graph"])
def test_torch_s_stream_is_taken_for_tensors(form: str) -> None:
    torch = gpu_arrays.require_torch()
    pool = torch.full((5, PAGE, HEADS, DIM), 3, dtype=torch.float16).cuda()
    table, lengths, ends = (
        torch.from_numpy(array.view(np.int32).copy()).cuda().view(torch.uint32)
        for array in (TABLE, LENGTHS, ENDS)
    )
    k = torch.from_numpy(tokens(1).copy()).cuda()
    paged = PagedBatch(pool, None, table, lengths)
    torch.cuda.synchronize()
    if form == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.append(paged, 0, k, None, ends)
        assert (pool == 3).all()
        graph.replay()
    else:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            ops.append(paged, 0, k, None, ends)
        stream.synchronize()
    torch.cuda.synchronize()
    assert same_bytes(expected_pool(tokens(1)), pool.cpu().numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_torch_tensors_go_in_and_come_out(dtype: str) -> None:
    torch = gpu_arrays.require_torch()
    kind = getattr(torch, dtype)
    whole = torch.randn(25, 3 * HEADS, DIM).to(kind).cuda()
    pool = torch.zeros(5, PAGE, HEADS, DIM).to(kind).cuda()
    step = [
        torch.from_numpy(x.astype(np.int32)).cuda().view(torch.uint32) for x in (TABLE, LENGTHS)
    ]
    batch = PagedBatch(pool, None, step[0], step[1])
    torch.cuda.synchronize()
    ops.append(batch, 0, whole[:, HEADS : 2 * HEADS], None, on_gpu(ENDS))
    lengths = np.array([23, 21], np.uint32)
    k, _, _ = ops.gather(batch, 0, lengths=lengths)
    cupy.cuda.get_current_stream().synchronize()
    assert isinstance(k, torch.Tensor)
    assert (k.device, k.dtype) == (pool.device, kind)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.itemsize]
    written = torch.cat([k[3:23], k[39:44]]).view(bits)
    assert torch.equal(written, whole[:, HEADS : 2 * HEADS].contiguous().view(bits))


def test_a_torch_stream_is_taken() -> None:
    torch = gpu_arrays.require_torch()
    stream = torch.cuda.Stream()
    batch, k, offsets = fresh_batch(), on_gpu(tokens(1)), on_gpu(ENDS)
    cupy.cuda.Device(0).synchronize()
    ops.append(batch, 0, k, None, offsets, stream=stream)
    stream.synchronize()
    assert same_bytes(expected_pool(tokens(1)), to_host(batch.key_pool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_go_in_and_come_out(dtype: str) -> None:
    jax = gpu_arrays.require_jax()
    x = jax.numpy.asarray(tokens(1), dtype)
    codes, scales = ops.quantize(x, "int8", DIM)
    assert isinstance(codes, jax.Array)
    expected = ops.quantize(np.asarray(x), "int8", DIM)
    assert same_bytes(expected[0], np.asarray(codes))
    assert same_bytes(expected[1], np.asarray(scales))
    pool = on_gpu(np.zeros((5, PAGE, HEADS, DIM), np.asarray(x).dtype))
    ops.append(PagedBatch(pool, None, on_gpu(TABLE), on_gpu(LENGTHS)), 0, x, None, on_gpu(ENDS))
    assert to_host(pool).any()


def test_the_current_device_stays_what_it_was() -> None:
    before = cupy.cuda.runtime.getDevice()
    batch = fresh_batch()
    ops.append(batch, 0, on_gpu(tokens(1)), None, on_gpu(ENDS))
    with pytest.raises((ValueError, TypeError)):
        ops.append(batch, 0, tokens(1), None, on_gpu(ENDS))
    assert cupy.cuda.runtime.getDevice() == before


# -- refused arguments -----------------------------------------------------------------------------
def test_arrays_in_two_places_are_refused_by_name() -> None:
    batch = fresh_batch()
    before = to_host(batch.key_pool)
    with pytest.raises((ValueError, TypeError), match=r"\bk\b"):
        ops.append(batch, 0, tokens(1), None, on_gpu(ENDS))
    assert same_bytes(before, to_host(batch.key_pool))


def test_a_stream_for_arrays_in_host_memory_is_refused(side: Any) -> None:
    pool = np.zeros((5, PAGE, HEADS, DIM), np.float16)
    with pytest.raises(ValueError, match="stream"):
        ops.zero_pages(pool, [1], stream=side)


def test_shapes_and_dtypes_are_refused_before_anything_is_written() -> None:
    batch = fresh_batch()
    before = to_host(batch.key_pool)
    for k in (tokens(1)[:, :, :-1], tokens(1).astype(np.float32), tokens(1)[:-1]):
        with pytest.raises((ValueError, TypeError)):
            ops.append(batch, 0, on_gpu(k), None, on_gpu(ENDS[:-1]))
    assert same_bytes(before, to_host(batch.key_pool))


def test_memory_that_was_freed_is_refused() -> None:
    class Freed:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            array = {"shape": (4, 8), "typestr": "|u1", "data": (0, False), "strides": None}
            return array | {"version": 3}

    with pytest.raises(ValueError, match="freed"):
        ops.zero_pages(Freed(), [0])


def test_memory_that_there_is_not_is_named_in_bytes() -> None:
    total = cupy.cuda.runtime.memGetInfo()[1]
    params = make_params(16, dtype="float16", head_dim=128)
    pages = 2 * total // params.bytes_per_page
    with pytest.raises((MemoryError, kvcore.errors.KVCacheError), match=r"bytes.* free") as refused:
        kvcore.PagedKVCacheManager(params, 4, 64, devices=["cuda:0"], num_pages=pages)
    assert any(character.isdigit() for character in str(refused.value))
    batch = fresh_batch()  # the GPU still works
    ops.append(batch, 0, on_gpu(tokens(1)), None, on_gpu(ENDS))
    assert same_bytes(expected_pool(tokens(1)), to_host(batch.key_pool))


def test_a_gpu_that_there_is_not_is_named() -> None:
    missing = f"cuda:{cupy.cuda.runtime.getDeviceCount()}"
    with pytest.raises((ValueError, kvcore.errors.KVCacheError), match=missing):
        kvcore.PagedKVCacheManager(make_params(), 4, 64, devices=[missing], num_pages=4)
