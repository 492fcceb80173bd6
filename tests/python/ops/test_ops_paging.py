# SPDX-License-Identifier: Apache-2.0
"""append and gather against numpy loops over whole pools, untouched bytes included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
import kvcore
from builders import make_context, make_params
from kvcore import ops
from random_arrays import fused, random_bytes
from same_arrays import same_bytes
from tables import table

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


@st.composite
def batches(draw: st.DrawFn) -> tuple[kvcore.PagedBatch, Any, Any, Any, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    page = draw(st.sampled_from([1, 3, 16, 24]))
    rows, heads = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    dims = [draw(st.sampled_from([1, 5, 59, 64])) for _ in range(draw(st.integers(1, 2)))]
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["NHD", "HND"]))
    lengths = rng.integers(0, 2 * page + 1, rows)
    new = rng.integers(0, 2 * page + 1, rows)
    columns = -(-(lengths + new) // page)
    num_pages = int(columns.sum()) + 2
    table = np.full((rows, int(columns.max(initial=0)) + 1), num_pages, np.uint32)
    ids = iter(rng.permutation(num_pages))
    for row, count in enumerate(columns):
        table[row, :count] = [next(ids) for _ in range(count)]
    inner = (page, heads) if layout == "NHD" else (heads, page)
    pools = [random_bytes(rng, (num_pages, *inner, dim), dtype) for dim in dims]
    batch = kvcore.PagedBatch(
        pools[0],
        pools[1] if len(pools) == 2 else None,
        table,
        lengths.astype(np.uint32),
        layout,
    )
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
    return batch, fused(rng, int(offsets[-1]), heads, dims, dtype), offsets, page, rng


def places(batch: kvcore.PagedBatch, row: int, token: int, page: int) -> Any:
    at = batch.lookup_table[row, token // page], token % page
    return at if batch.layout == "NHD" else (at[0], slice(None), at[1])


@given(batches(), st.integers(1, 3), st.booleans())
def test_append_writes_the_new_positions_and_nothing_else(
    drawn: Any, threads: int, holes: bool
) -> None:
    batch, tokens, offsets, page, _ = drawn
    if holes:  # pages that windows gave back
        for row, length in enumerate(batch.cache_lengths):
            batch.lookup_table[row, : length // page] = 2**32 - 1
    pools = [pool for pool in (batch.key_pool, batch.value_pool) if pool is not None]
    expected = [pool.copy() for pool in pools]
    for row in range(len(offsets) - 1):
        for j, at in enumerate(range(offsets[row], offsets[row + 1])):
            place = places(batch, row, int(batch.cache_lengths[row]) + j, page)
            for pool, source in zip(expected, tokens, strict=True):
                pool[place] = source[at]
    v = tokens[1] if len(tokens) == 2 else None
    ops.append(batch, 0, tokens[0], v, offsets, threads=threads)
    assert all(same_bytes(a, b) for a, b in zip(pools, expected, strict=True))


@given(batches(), st.integers(1, 3), st.booleans())
def test_gather_reads_rows_one_behind_the_other(drawn: Any, threads: int, into: bool) -> None:
    batch, _, _, page, _ = drawn
    pools = [pool for pool in (batch.key_pool, batch.value_pool) if pool is not None]
    total = int(batch.cache_lengths.sum())
    heads_axis = 2 if batch.layout == "NHD" else 1
    shapes = [(total, pool.shape[heads_axis], pool.shape[3]) for pool in pools]
    expected = [np.zeros(shape, pool.dtype) for shape, pool in zip(shapes, pools, strict=True)]
    at = 0
    for row, length in enumerate(batch.cache_lengths):
        for token in range(int(length)):
            for pool, wanted in zip(pools, expected, strict=True):
                wanted[at] = pool[places(batch, row, token, page)]
            at += 1
    out = tuple(np.empty(s, p.dtype) for s, p in zip(shapes, pools, strict=True)) if into else None
    k, v, offsets = ops.gather(batch, 0, out=(*out, None) if out else None, threads=threads)
    assert same_bytes(k, expected[0])
    assert (v is None) == (len(pools) == 1)
    if v is not None:
        assert same_bytes(v, expected[1])
    if out:
        assert k is out[0]
    assert offsets.tolist() == [0, *np.cumsum(batch.cache_lengths).tolist()]


def test_holes_are_none_of_those_who_write_behind_them() -> None:
    pool = np.zeros((4, 4, 1, 2), np.float32)
    table = np.array([[4, 2**32 - 1, 3, 0], [7, 1, 4, 4]], np.uint32)
    lengths, offsets = np.array([8, 6], np.uint32), np.array([0, 6, 8], np.uint32)
    batch = kvcore.PagedBatch(pool, pool.copy(), table, lengths)
    rows = np.arange(1, 17, dtype=np.float32).reshape(8, 1, 2)
    ops.append(batch, 0, rows, -rows, offsets)
    places = [12, 13, 14, 15, 0, 1, 6, 7]
    assert np.array_equal(pool.reshape(-1, 1, 2)[places], rows)
    slots = ops.build_slots(batch, offsets)
    assert slots.tolist() == places
    again = kvcore.PagedBatch(np.zeros_like(pool), np.zeros_like(pool), table, lengths)
    assert ops.append_slots(again, 0, rows, -rows, slots) == 0
    assert same_bytes(again.key_pool, pool)
    assert same_bytes(again.value_pool, batch.value_pool)
    for call in (
        lambda: ops.gather(batch, 0),
        lambda: ops.scatter(batch, 0, rows, -rows, offsets),
    ):
        with pytest.raises(IndexError, match="position 0 of row 0 has no page"):
            call()
    before = pool.copy()
    with pytest.raises(IndexError, match="position 8 of row 1 has no page: column 2"):
        ops.append(batch, 0, rows, -rows, np.array([0, 5, 8], np.uint32))
    with pytest.raises(IndexError, match="position 8 of row 1 has no page: column 2"):
        ops.build_slots(batch, np.array([0, 5, 8], np.uint32))
    assert same_bytes(pool, before)


def manager_of(dtype: str, **rest: Any) -> kvcore.PagedKVCacheManager:
    params = make_params(4, dtype=dtype, n_kv_heads=2, head_dim=8, num_layers=3, **rest)
    return kvcore.PagedKVCacheManager(params, 8, 256, num_pages=32)


def fetched(manager: kvcore.PagedKVCacheManager, *prompts: int) -> tuple[Any, Any]:
    contexts = [make_context(range(n)) for n in prompts]
    for context in contexts:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(contexts)
    return inputs, np.concatenate([[0], np.cumsum(prompts)]).astype(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_a_fetched_pool(dtype: str) -> None:
    rng = np.random.default_rng(7)
    inputs, offsets = fetched(manager_of(dtype, caching=False), 5, 9)
    k, v = random_bytes(rng, (14, 2, 8), dtype), random_bytes(rng, (14, 2, 8), dtype)
    ops.append(inputs, 2, k, v, offsets)
    assert not inputs.blocks[:, :, :2].view(np.uint8).any()
    read_k, read_v, read = ops.gather(inputs, 2, lengths=np.array([5, 9], np.uint32))
    assert same_bytes(read_k, k)
    assert same_bytes(read_v, v)
    assert np.array_equal(read, offsets)


def test_latent_rows_have_no_values() -> None:
    params = make_params(4, dtype="float32", n_kv_heads=1, head_dim=8, is_mla=True)
    manager = kvcore.PagedKVCacheManager(params, 8, 256, num_pages=32)
    inputs, offsets = fetched(manager, 5)
    rows = np.ones((5, 1, 8), np.float32)
    ops.append(inputs, 1, rows, None, offsets)
    k, v, _ = ops.gather(inputs, 1, lengths=offsets[1:])
    assert v is None
    assert np.array_equal(k, rows)
    with pytest.raises(ValueError, match="latent rows"):
        ops.append(inputs, 1, rows, rows, offsets)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("granularity", [4, 8])
def test_pools_with_scales_quantise_per_token_and_head(dtype: str, granularity: int) -> None:
    rng = np.random.default_rng(8)
    inputs, offsets = fetched(manager_of(dtype, kv_scale_granularity=granularity), 6, 3)
    k, v = rng.normal(size=(9, 2, 8)).astype(np.float16), rng.normal(size=(9, 2, 8))
    ops.append(inputs, 0, k, v.astype(np.float32), offsets, threads=2)
    read_k, read_v, _ = ops.gather(inputs, 0, lengths=np.array([6, 3], np.uint32))
    for given_values, read in ((k, read_k), (v.astype(np.float32), read_v)):
        codes, scales = ops.quantize(given_values, dtype, granularity)
        assert np.array_equal(read, ops.dequantize(codes, scales, "float32"))
    out = np.empty((9, 2, 8), np.float16), np.empty((9, 2, 8), np.float16)
    ops.gather(inputs, 0, lengths=np.array([6, 3], np.uint32), out=out)
    assert np.array_equal(out[0], read_k.astype(np.float16))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_pools_without_scales_take_a_scale_with_the_call(dtype: str) -> None:
    x = np.random.default_rng(9).normal(size=(6, 2, 8)).astype(np.float32)
    inputs, offsets = fetched(manager_of(dtype), 6)
    per_head = np.array([0.01, 0.5], np.float32)
    ops.append(inputs, 0, x, x, offsets, scale=(0.25, per_head))
    k, v, _ = ops.gather(inputs, 0, lengths=offsets[1:])
    assert np.array_equal(k.astype(np.float32), (x * 4).astype(k.dtype).astype(np.float32)) or (
        dtype == "int8" and np.array_equal(k, np.rint(x * 4).astype(np.int8))
    )
    step = np.array([0.01, 0.5])[:, None] * (0.5 if dtype == "int8" else 0.07)
    near = np.abs(v.astype(np.float32) * per_head[:, None] - x)
    limit = 127 if dtype == "int8" else 448
    inside = np.abs(x / per_head[:, None]) < limit
    assert (near <= np.maximum(step, np.abs(x) * 0.07))[inside].all()


def test_torch_tensors_are_read_and_written_in_place() -> None:
    torch = conftest.require("torch")
    pool = torch.zeros(4, 4, 2, 8, dtype=torch.bfloat16)
    table, lengths = np.array([[2, 0]], np.uint32), np.array([3], np.uint32)
    batch = kvcore.PagedBatch(pool, None, table, lengths)
    k = torch.arange(32, dtype=torch.bfloat16).reshape(2, 2, 8)
    ops.append(batch, 0, k, None, np.array([0, 2], np.uint32))
    assert torch.equal(pool[2, 3], k[0])
    assert torch.equal(pool[0, 0], k[1])


def scene() -> dict[str, Any]:
    inputs, offsets = fetched(manager_of("float16"), 5, 3)
    k = np.ones((8, 2, 8), np.float16)
    return {"inputs": inputs, "layer": 0, "k": k, "v": k, "row_offsets": offsets}


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layer": 3}, IndexError, "layer is 3"),
    ({"layer": -1}, IndexError, "layer is -1"),
    ({"k": np.ones((7, 2, 8), np.float16)}, ValueError, r"shape \(7, 2, 8\), must be \(8, 2, 8\)"),
    ({"k": np.ones((8, 1, 8), np.float16)}, ValueError, "must be"),
    ({"v": np.ones((8, 2, 8), np.float32)}, TypeError, "dtype float32, the pool has float16"),
    ({"v": None}, TypeError, "v is a NoneType"),
    ({"v": np.ones((8, 2, 16), np.float16)[..., ::2]}, ValueError, "contiguous"),
    ({"row_offsets": np.array([0.0, 5.0, 8.0])}, TypeError, "row_offsets has dtype float64"),
    ({"row_offsets": np.array([0, 8], np.uint32)}, ValueError, "row_offsets has 2 entries"),
    ({"row_offsets": np.array([1, 5, 8], np.uint32)}, ValueError, r"row_offsets\[0\] is 1"),
    ({"row_offsets": np.array([0, 9, 8], np.uint32)}, ValueError, "must not be below"),
    (
        {"row_offsets": np.array([0, 0, 8], np.uint32)},
        IndexError,
        "position 4 of row 1 has no page",
    ),
    ({"threads": 0}, ValueError, "threads is 0"),
    ({"scale": 0.5}, ValueError, "scale is given"),
    ({"inputs": 7}, TypeError, "inputs are a int"),
]


@table(("change", "error", "match"), BAD)
def test_refused_append_writes_nothing(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = scene()
    pool = arguments["inputs"].blocks
    with pytest.raises(error, match=match):
        ops.append(**(arguments | change))
    assert not pool.view(np.uint8).any()


def test_inputs_without_a_pool_are_refused() -> None:
    params = make_params(4)
    manager = kvcore.PagedKVCacheManager(params, 8, 256, num_pages=32, blocks=None)
    inputs, offsets = fetched(manager, 5)
    with pytest.raises(
        ValueError, match=r"the inputs have no pool .*; pass kvcore.PagedBatch over your own"
    ):
        ops.append(inputs, 0, None, None, offsets)


def test_bad_gathers_are_refused() -> None:
    inputs = scene()["inputs"]
    with pytest.raises(ValueError, match="lengths has shape"):
        ops.gather(inputs, 0, lengths=np.array([1], np.uint32))
    with pytest.raises(IndexError, match="position 8 of row 0"):
        ops.gather(inputs, 0, lengths=np.array([9, 3], np.uint32))
    with pytest.raises(ValueError, match="must be"):
        ops.gather(inputs, 0, out=(np.empty((1, 2, 8), np.float16),) * 2)
    with pytest.raises(ValueError, match="layout is 'DHN'"):
        kvcore.PagedBatch(inputs.blocks[:, 0, 0], None, None, None, "DHN")
    with pytest.raises(ValueError, match="must have 4 axes"):
        kvcore.PagedBatch(inputs.blocks, None, None, None)


def test_page_ids_beyond_two_to_the_31_bytes() -> None:
    """The pool is a sparse mapping: only written pages use memory."""
    pool = np.zeros((70_000, 16, 4, 512), np.float32)  # 9 GB of address space, pages of 128 KiB
    table, lengths = np.array([[69_999, 3, 40_000]], np.uint32), np.array([15], np.uint32)
    batch = kvcore.PagedBatch(pool, None, table, lengths)
    k = np.random.default_rng(1).normal(size=(20, 4, 512)).astype(np.float32)
    ops.append(batch, 0, k, None, np.array([0, 20], np.uint32))
    assert np.array_equal(pool[69_999, 15], k[0])
    assert np.array_equal(pool[3], k[1:17])
    assert np.array_equal(pool[40_000, :3], k[17:])
    read, _, _ = ops.gather(batch, 0, lengths=np.array([35], np.uint32))
    assert np.array_equal(read[15:], k)
