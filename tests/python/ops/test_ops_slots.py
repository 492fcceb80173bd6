# SPDX-License-Identifier: Apache-2.0
"""build_slots, append_slots, advance_lengths and fill_pages against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
import kvcore
from builders import make_context, make_params
from kvcore import ops
from kvcore.support.dtypes import numpy_dtype
from random_arrays import fused, random_bytes
from same_arrays import read_only
from tables import table

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


@st.composite
def appends(draw: st.DrawFn) -> Any:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    page, pages = draw(st.sampled_from([1, 3, 16, 24, 48])), draw(st.integers(1, 5))
    heads, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(DTYPES))
    dims = [draw(st.sampled_from([1, 5, 59, 80, 112])) for _ in range(draw(st.integers(1, 2)))]
    layout = draw(st.sampled_from(["NHD", "HND"]))
    inner = (page, heads) if layout == "NHD" else (heads, page)
    pools = [random_bytes(rng, (pages, *inner, dim), dtype) for dim in dims]
    batch = kvcore.PagedBatch(
        pools[0],
        pools[1] if len(pools) == 2 else None,
        np.zeros((0, 0), np.uint32),
        np.zeros(0, np.uint32),
        layout=layout,
    )
    slots = rng.permutation(pages * page)[: draw(st.integers(0, pages * page))]
    slots = np.concatenate([slots, -1 - rng.integers(0, 5, 2), pages * page + np.arange(2)])
    slots = rng.permutation(slots) if draw(st.booleans()) else np.sort(slots)
    slots = slots.astype(draw(st.sampled_from([np.int32, np.int64])))
    tokens = fused(rng, len(slots) + draw(st.integers(0, 3)), heads, dims, dtype)
    return batch, tokens, slots, draw(st.integers(1, 3))


@given(appends())
def test_tokens_go_to_their_slots_and_nowhere_else(case: Any) -> None:
    batch, tokens, slots, threads = case
    pools = [pool for pool in (batch.key_pool, batch.value_pool) if pool is not None]
    expected = [pool.copy() for pool in pools]
    views = [p.transpose(0, 2, 1, 3) if batch.layout == "HND" else p for p in expected]
    page = views[0].shape[1]
    for i, slot in enumerate(slots):
        if 0 <= slot < len(views[0]) * page:
            for view, rows in zip(views, tokens, strict=True):
                view[slot // page, slot % page] = rows[i]
    v = tokens[1] if len(tokens) == 2 else None
    assert ops.append_slots(batch, 0, tokens[0], v, slots, threads=threads) == 2
    for pool, wanted in zip(pools, expected, strict=True):
        assert np.array_equal(pool.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_slots_of_a_managers_batch_write_what_append_writes(page: int) -> None:
    params = make_params(page_size=page, n_kv_heads=2, head_dim=8)
    manager = kvcore.PagedKVCacheManager(params, 4, 64, num_pages=200)
    contexts = [make_context(range(n), f"r{n}") for n in (5, 1, 17)]
    for context in contexts:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(contexts)
    offsets = np.array([0, 5, 6, 23], np.uint32)
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, 23, 2, 8)).astype(numpy_dtype(params.dtype))
    ops.append(inputs, 1, k, v, offsets)
    expected = inputs.blocks.copy()
    inputs.blocks[:, :, 1] = 0
    padded = np.full(40, 7, np.int32)
    slots = ops.build_slots(inputs, offsets, out=padded[:30])
    assert np.shares_memory(slots, padded)
    assert slots[23:].tolist() == [-1] * 7
    assert padded[30:].tolist() == [7] * 10
    assert ops.build_slots(inputs, offsets).tolist() == slots[:23].tolist()
    longer = [np.concatenate([rows, rows[:17]]) for rows in (k, v)]  # as in a padded graph
    assert ops.append_slots(inputs, 1, longer[0], longer[1], padded[:30]) == 0
    assert np.array_equal(inputs.blocks, expected)


def test_empty_batches() -> None:
    pool = np.ones((2, 4, 1, 3), np.float32)
    batch = kvcore.PagedBatch(
        pool, pool.copy(), np.zeros((0, 0), np.uint32), np.zeros(0, np.uint32)
    )
    offsets = np.zeros(1, np.uint32)
    assert ops.build_slots(batch, offsets).shape == (0,)
    assert ops.build_slots(batch, offsets, out=np.zeros(2, np.int64)).tolist() == [-1, -1]
    rows = np.zeros((0, 1, 3), np.float32)
    assert ops.append_slots(batch, 0, rows, rows, np.zeros(0, np.int64)) == 0
    assert ops.advance_lengths(np.zeros(0, np.uint32), offsets).shape == (0,)
    assert (pool == 1).all()


def test_latent_rows_in_two_arrays_come_as_one() -> None:
    latents, rope = np.zeros((3, 2, 16), np.float32), np.zeros((3, 2, 4), np.float32)
    table, lengths = np.array([[2]], np.uint32), np.array([0], np.uint32)
    batch = kvcore.PagedBatch(latents, rope, table, lengths, layout="MLA")
    rows = np.arange(40, dtype=np.float32).reshape(2, 1, 20)
    slots = ops.build_slots(batch, np.array([0, 2], np.uint32))
    assert ops.append_slots(batch, 0, rows, None, slots) == 0
    assert np.array_equal(latents[2], rows[:, 0, :16])
    assert np.array_equal(rope[2], rows[:, 0, 16:])
    assert not latents[:2].any()
    with pytest.raises(ValueError, match=r"k has shape \(2, 1, 19\), must be .* 16 \+ 4"):
        ops.append_slots(batch, 0, rows[..., :19], None, slots)
    with pytest.raises(ValueError, match=r"v is given for a pool of latent rows, .* pass None"):
        ops.append_slots(batch, 0, rows, rows, slots)


def test_torch_tensors_are_read_and_written_in_place() -> None:
    torch = conftest.require("torch")
    pool = torch.zeros(4, 4, 2, 8, dtype=torch.bfloat16)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.uint32), torch.tensor([3]).to(torch.uint32)
    batch = kvcore.PagedBatch(pool, pool.clone(), table, lengths)
    offsets = torch.tensor([0, 2]).to(torch.uint32)
    out = torch.zeros(3, dtype=torch.int64)
    assert ops.build_slots(batch, offsets, out=out) is out
    assert out.tolist() == [11, 0, -1]
    k = torch.arange(32, dtype=torch.bfloat16).reshape(2, 2, 8)
    assert ops.append_slots(batch, 0, k, -k, out[:2]) == 0
    assert torch.equal(pool[2, 3], k[0])
    assert torch.equal(batch.value_pool[0, 0], -k[1])
    assert ops.advance_lengths(lengths, offsets, out=lengths) is lengths
    assert lengths.tolist() == [5]


# -- lengths -------------------------------------------------------------------------------------
def test_lengths_advance_where_rows_are_active() -> None:
    lengths = np.array([5, 0, 7], np.uint32)
    offsets = np.array([0, 2, 2, 9], np.uint32)
    active = np.array([False, True, True])
    assert ops.advance_lengths(lengths, offsets).tolist() == [7, 0, 14]
    assert ops.advance_lengths(lengths, offsets, active=active).tolist() == [5, 0, 14]
    assert lengths.tolist() == [5, 0, 7]
    assert ops.advance_lengths(lengths, offsets, out=lengths) is lengths
    assert lengths.tolist() == [7, 0, 14]


# -- refusals ------------------------------------------------------------------------------------
ROWS = np.zeros((3, 1, 3), np.float32)
U32 = np.uint32


@table(
    ("call", "error", "match"),
    [
        (lambda b: ops.append_slots(b, 1, ROWS, ROWS, np.array([0])), IndexError, "layer is 1"),
        (
            lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.array([1, 2, 1])),
            ValueError,
            "named twice",
        ),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.arange(4)), ValueError, r"least \(4, 1"),
        (lambda b: ops.append_slots(b, 0, ROWS, None, np.arange(2)), TypeError, "v is a NoneType"),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS[:1], np.arange(2)), ValueError, "tokens have"),
        (lambda b: ops.append_slots(b, 0, ROWS[..., :2], ROWS, np.arange(2)), ValueError, "tokens"),
        (
            lambda b: ops.append_slots(b, 0, ROWS, ROWS.astype("f8"), np.arange(2)),
            TypeError,
            "float64, the pool has float32",
        ),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.zeros(2)), TypeError, "slots has dtype"),
        (
            lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.arange(4)[::2]),
            ValueError,
            "slots is strided",
        ),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS, [0]), TypeError, "slots is a list"),
        (
            lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.arange(2), threads=0),
            ValueError,
            "threads is 0",
        ),
        (
            lambda b: ops.append_slots(b, 0, b.key_pool[0, :3], ROWS, np.arange(2)),
            ValueError,
            "overlap",
        ),
        (lambda b: ops.build_slots(b, np.array([0, 4], U32)), IndexError, "position 4 of row 0"),
        (lambda b: ops.build_slots(b, [0.0, 1.0]), TypeError, "row_offsets has dtype float64"),
        (lambda b: ops.build_slots(b, np.array([0, 1, 2], U32)), ValueError, "has 3 entries for 1"),
        (
            lambda b: ops.build_slots(b, np.array([0, 2], U32), out=np.zeros(1, np.int64)),
            ValueError,
            "out has 1 entries for 2 tokens",
        ),
        (
            lambda b: ops.build_slots(b, np.array([0, 1], U32), out=np.zeros(1, U32)),
            TypeError,
            "out has dtype uint32",
        ),
        (
            lambda b: ops.build_slots(
                b, np.array([0, 1], U32), out=read_only(np.zeros(1, np.int64))
            ),
            ValueError,
            "out is read-only",
        ),
        (lambda b: ops.build_slots(b, 3), TypeError, "row_offsets is a int"),
        (
            lambda b: ops.advance_lengths(b.cache_lengths, np.array([0, 1, 2], U32)),
            ValueError,
            "row_offsets has 3 entries, must have 2",
        ),
        (
            lambda b: ops.advance_lengths(b.cache_lengths, np.array([2, 1], U32)),
            ValueError,
            "row_offsets.1. is 1",
        ),
        (
            lambda b: ops.advance_lengths(np.array([2**32 - 2], U32), np.array([0, 2], U32)),
            ValueError,
            "beyond uint32",
        ),
        (
            lambda b: ops.advance_lengths(b.cache_lengths, np.array([0, 2], U32), active=[True]),
            TypeError,
            "active is a list",
        ),
        (
            lambda b: ops.advance_lengths(
                b.cache_lengths, np.array([0, 2], U32), active=np.ones(2, bool)
            ),
            ValueError,
            "active is bool",
        ),
        (lambda b: ops.fill_pages(b.key_pool, [0, 9], 1), IndexError, "page 9"),
        (lambda b: ops.fill_pages(b.key_pool, [0], 256), ValueError, "byte is 256"),
        (lambda b: ops.fill_pages(b.key_pool, [0], -1), ValueError, "byte is -1"),
    ],
)
def test_refused_calls_change_nothing(
    call: Callable[[kvcore.PagedBatch], object], error: type[Exception], match: str
) -> None:
    pools = [np.ones((3, 4, 1, 3), np.float32) for _ in range(2)]
    table, lengths = np.array([[2, 9]], np.uint32), np.array([3], np.uint32)
    batch = kvcore.PagedBatch(pools[0], pools[1], table, lengths)
    with pytest.raises(error, match=match):
        call(batch)
    assert all((pool == 1).all() for pool in pools)
    assert batch.cache_lengths.tolist() == [3]


def test_pools_with_scales_are_refused() -> None:
    pool, scales = np.zeros((2, 4, 1, 8), np.int8), np.ones((2, 4, 1, 1), np.float32)
    table, lengths = np.array([[0]], np.uint32), np.array([0], np.uint32)
    batch = kvcore.PagedBatch(
        pool, pool.copy(), table, lengths, key_scales=scales, value_scales=scales.copy()
    )
    rows = np.zeros((1, 1, 8), np.int8)
    with pytest.raises(ValueError, match=r"use ops\.append"):
        ops.append_slots(batch, 0, rows, rows, np.array([0]))


def test_int32_slots_of_a_pool_beyond_them_are_refused() -> None:
    pool = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.int8), (2**16, 2**15 + 1, 1, 1), (0, 0, 0, 0)
    )
    table, lengths = np.array([[2**16 - 1]], np.uint32), np.array([2**15], np.uint32)
    batch = kvcore.PagedBatch(pool, None, table, lengths)
    offsets = np.array([0, 1], np.uint32)
    assert ops.build_slots(batch, offsets).tolist() == [2**16 * (2**15 + 1) - 1]
    with pytest.raises(ValueError, match="out has dtype int32"):
        ops.build_slots(batch, offsets, out=np.zeros(1, np.int32))


# -- fills ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES[:5])
def test_poisoned_pages_are_nan(dtype: str) -> None:
    pool = np.zeros((5, 2, 3), numpy_dtype(dtype))
    ops.fill_pages(pool, [1, 4], 0xFF)
    assert np.isnan(pool[[1, 4]].astype(np.float32)).tolist() == np.ones((2, 2, 3), bool).tolist()
    assert not pool[[0, 2, 3]].astype(np.float32).any()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_fills_and_copies_leave_other_pages_alone(threads: int) -> None:
    """The fills are large enough to bypass the CPU caches; pages have odd sizes and addresses."""
    pool = np.zeros((97, 100_001), np.uint8)
    ids = np.arange(1, 97, 2)
    ops.fill_pages(pool, ids, 0x5A, threads=threads)
    assert (pool[1::2] == 0x5A).all()
    assert not pool[::2].any()
    pool[0] = np.arange(100_001) % 251
    ops.copy_pages(pool, np.stack([np.zeros_like(ids), ids], axis=1), threads=threads)
    assert (pool[1::2] == pool[0]).all()
    assert not pool[2::2].any()
