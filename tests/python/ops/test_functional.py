# SPDX-License-Identifier: Apache-2.0
"""kvcore.functional against lists of tokens: stored, shared and unchanged arrays."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_cache import (
    DTYPES,
    Array,
    allocation,
    filled,
    make_cache,
    numbers_in,
    refused,
    rows_of,
    snapshot,
)
from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    gather_kv,
    init_paged_kv_cache,
)


# -- results of the functions --------------------------------------------------------------------
def test_new_cache_is_empty() -> None:
    cache = make_cache(num_kv_heads=5, dtype="float16")
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads, cache.head_dim) == (4, 2, 5, 3)
    assert cache.key_pool.shape == cache.value_pool.shape == (4, 2, 5, 3)
    assert not cache.key_pool.any()
    assert not np.shares_memory(cache.key_pool, cache.value_pool)
    assert cache.block_table.tolist() == [[-1] * 4] * 2
    assert cache.seq_lengths.tolist() == [0, 0]
    assert (cache.block_table.dtype, cache.seq_lengths.dtype) == (np.int32, np.int32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.block_table = None  # type: ignore[misc]


def test_worked_example() -> None:
    cache, consumed = allocate_blocks(
        make_cache(), sequence_idx=0, num_new_tokens=3, free_block_ids=[3, 1, 0, 2]
    )
    assert (consumed, cache.block_table[0].tolist()) == (2, [3, 1, -1, -1])
    cache = append_kv(cache, 0, rows_of([1, 2, 3]), rows_of([-1, -2, -3]))
    assert numbers_in(cache, 0) == [1, 2, 3]
    assert cache.key_pool[:, :, 0, 0].tolist() == [[0, 0], [3, 0], [0, 0], [1, 2]]
    with pytest.raises(ValueError, match=r"\b4\b.*\b5\b"):
        allocate_blocks(cache, sequence_idx=1, num_new_tokens=9, free_block_ids=[3, 1, 0, 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_row_gathers_nothing_of_the_right_shape(dtype: str) -> None:
    keys, values, seq_len = gather_kv(make_cache(dtype=dtype, num_kv_heads=2), 1)
    assert seq_len == 0
    assert keys.shape == values.shape == (0, 2, 3)
    assert keys.dtype.name == values.dtype.name == dtype


@pytest.mark.parametrize(
    ("length", "more", "consumed"),
    [(0, 0, 0), (0, 1, 1), (0, 2, 1), (0, 3, 2), (3, 0, 0), (3, 1, 0), (3, 2, 1), (2, 1, 1)],
)
def test_consumed_is_what_the_last_block_has_no_room_for(
    length: int, more: int, consumed: int
) -> None:
    cache, used = allocate_blocks(
        make_cache(), sequence_idx=1, num_new_tokens=length, free_block_ids=np.arange(4)
    )
    cache = append_kv(cache, 1, rows_of([7] * length), rows_of([7] * length))
    free = np.arange(4)[used:]
    cache, taken = allocate_blocks(cache, sequence_idx=1, num_new_tokens=more, free_block_ids=free)
    assert taken == consumed
    assert cache.block_table[1].tolist() == [*range(used + consumed)] + [-1] * (4 - used - consumed)


@pytest.mark.parametrize("ids", [[3, 1], (3, 1), np.array([3, 1], np.int32), np.array([3, 1])])
def test_free_ids_come_as_list_or_array(ids: Any) -> None:
    cache, consumed = allocate_blocks(
        make_cache(), sequence_idx=0, num_new_tokens=3, free_block_ids=ids
    )
    assert (consumed, cache.block_table[0].tolist()) == (2, [3, 1, -1, -1])


def test_index_may_be_any_integer_object() -> None:
    cache = filled()
    assert gather_kv(cache, np.int64(0))[2] == 3  # type: ignore[arg-type]
    assert numbers_in(append_kv(cache, np.int32(0), rows_of([4]), rows_of([-4])), 0)[-1] == 4  # type: ignore[arg-type]


# -- functional and donated ----------------------------------------------------------------------
def test_results_share_nothing_that_changes() -> None:
    before = filled()
    kept = snapshot(before)
    appended = append_kv(before, 0, rows_of([4]), rows_of([-4]))
    allocated, _ = allocate_blocks(appended, sequence_idx=1, num_new_tokens=1, free_block_ids=[0])
    assert snapshot(before) == kept
    assert (numbers_in(before, 0), numbers_in(appended, 0)) == ([1, 2, 3], [1, 2, 3, 4])
    assert appended.block_table[1, 0] == -1
    for old, new in ((before, appended), (appended, allocated)):
        assert not np.shares_memory(old.block_table, new.block_table)
        assert not np.shares_memory(old.seq_lengths, new.seq_lengths)
    assert not np.shares_memory(before.key_pool, appended.key_pool)
    assert not np.shares_memory(before.value_pool, appended.value_pool)
    assert allocated.key_pool is appended.key_pool  # an allocation writes no pool


def test_two_futures_of_one_cache_do_not_meet() -> None:
    cache = filled()
    left = append_kv(cache, 0, rows_of([4]), rows_of([-4]))
    right = append_kv(cache, 0, rows_of([5]), rows_of([-5]))
    assert (numbers_in(left, 0), numbers_in(right, 0)) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_donation_updates_in_place() -> None:
    cache = filled()
    same, consumed = allocate_blocks(
        cache, sequence_idx=1, num_new_tokens=2, free_block_ids=[0, 2], donate=True
    )
    assert (same, consumed) == (cache, 1)
    assert cache.block_table[1].tolist() == [0, -1, -1, -1]
    assert append_kv(cache, 1, rows_of([8, 9]), rows_of([-8, -9]), donate=True) is cache
    assert cache.seq_lengths.tolist() == [3, 2]
    assert (numbers_in(cache, 0), numbers_in(cache, 1)) == ([1, 2, 3], [8, 9])


def test_gathered_arrays_are_the_callers_own() -> None:
    cache = filled()
    kept = snapshot(cache)
    keys, values, _ = gather_kv(cache, 0)
    keys[:] = values[:] = 77
    assert snapshot(cache) == kept
    keys, values, _ = gather_kv(cache, 0)
    del cache
    gc.collect()
    assert keys[:, 0, 0].tolist() == [1, 2, 3]


def test_donated_rows_may_come_from_the_pool_itself() -> None:
    cache = make_cache(num_blocks=3, batch_size=1, block_size=4)
    cache.key_pool[:] = np.arange(36, dtype=np.float32).reshape(3, 4, 1, 3)
    cache.value_pool[:] = -cache.key_pool
    cache.block_table[0, :2] = [1, 0]
    source = cache.key_pool.reshape(12, 1, 3)[2:10]  # overlaps the blocks that are written
    expected = source.copy()
    append_kv(cache, 0, source, -source, donate=True)
    keys, values, _ = gather_kv(cache, 0)
    assert (keys == expected).all()
    assert (values == -expected).all()


def test_offsets_beyond_32_bits() -> None:
    memory = np.zeros((2, (1 << 31) + 64), np.int8)  # touched in two places only
    pools = [memory[:, None, None, at : at + 8] for at in (0, 8)]
    cache = PagedKVCache(pools[0], pools[1], np.array([[1, 0]], np.int32), np.zeros(1, np.int32))
    rows = np.arange(16, dtype=np.int8).reshape(2, 1, 8)
    append_kv(cache, 0, rows, -rows, donate=True)
    assert memory[1, :16].tolist() == [*range(8), *(-n for n in range(8))]
    keys, values, seq_len = gather_kv(cache, 0)
    assert seq_len == 2
    assert (keys == rows).all()
    assert (values == -rows).all()


# -- any sizes, dtypes, strides and orders of calls ----------------------------------------------
def random_array(draw: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return random bits in the given shape, with random strides, in their own memory."""
    seed = draw(st.integers(0, 2**32 - 1))
    kind = draw(st.sampled_from(["plain", "fused", "reversed", "inner", "heads first"]))
    tokens, heads, width = shape
    spread = {
        "fused": (tokens, heads + 3, width),
        "inner": (tokens, heads, 2 * width),
        "heads first": (heads, tokens, width),
    }.get(kind, shape)
    size = int(np.prod(spread)) * dtype.itemsize
    whole = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    array: Array = whole.view(dtype).reshape(spread)
    if kind == "fused":
        return array[:, 1 : heads + 1]
    if kind == "reversed":
        return array[::-1, ::-1]
    if kind == "inner":
        return array[..., ::2]
    return array.transpose(1, 0, 2) if kind == "heads first" else array


def strided_cache(draw: Any, cache: PagedKVCache) -> PagedKVCache:
    """Return the same empty cache over pools and a table of other strides."""
    blocks, size, heads, width = cache.key_pool.shape
    kind = draw(st.sampled_from(["plain", "layer of six axes", "heads first"]))
    if kind == "plain":
        return cache
    if kind == "heads first":
        pools = [
            np.zeros((blocks, heads, size, width), cache.key_pool.dtype).transpose(0, 2, 1, 3)
            for _ in range(2)
        ]
    else:
        six = np.zeros((blocks, 2, 3, size, heads, width), cache.key_pool.dtype)
        pools = [six[:, kv, 1] for kv in range(2)]
    table = np.asfortranarray(cache.block_table)
    return PagedKVCache(pools[0], pools[1], table, cache.seq_lengths)


def as_bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def blocks_of(cache: PagedKVCache, row: int) -> list[int]:
    return [block for block in cache.block_table[row].tolist() if block >= 0]


def grow(
    cache: PagedKVCache, row: int, keys: Array, values: Array, free: list[int], donate: bool
) -> PagedKVCache:
    """Allocate and append, and check that the arguments changed only if they were donated."""
    kept, held = snapshot(cache), blocks_of(cache, row)
    ready, consumed = allocate_blocks(
        cache, sequence_idx=row, num_new_tokens=len(keys), free_block_ids=free, donate=donate
    )
    assert blocks_of(ready, row) == held + free[:consumed]
    del free[:consumed]
    between = snapshot(ready)
    after = append_kv(ready, row, keys, values, donate=donate)
    if donate:
        assert after is ready is cache
    else:
        assert (snapshot(cache), snapshot(ready)) == (kept, between)
    return after


@given(data=st.data())
def test_rows_come_back_as_they_were_appended(data: st.DataObject) -> None:
    draw = data.draw
    dtype = np.dtype(make_cache(dtype=draw(st.sampled_from(DTYPES))).key_pool.dtype)
    size, heads, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    blocks, batch, columns = (draw(st.integers(1, n)) for n in (9, 3, 5))
    cache = init_paged_kv_cache(
        num_blocks=blocks,
        block_size=size,
        num_kv_heads=heads,
        head_dim=width,
        batch_size=batch,
        max_blocks_per_seq=columns,
        dtype=dtype,
    )
    cache = strided_cache(draw, cache)
    free = draw(st.permutations(range(blocks)))
    written: list[list[tuple[bytes, bytes]]] = [[] for _ in range(batch)]
    for _ in range(draw(st.integers(0, 8))):
        row, count = draw(st.integers(0, batch - 1)), draw(st.integers(0, 2 * size + 1))
        keys = random_array(draw, (count, heads, width), dtype)
        values = random_array(draw, (count, heads, width), dtype)
        needed = -(-(len(written[row]) + count) // size)
        if needed > columns or needed - -(-len(written[row]) // size) > len(free):
            refused(ValueError, cache, allocation(row, count, free))
            continue
        cache = grow(cache, row, keys, values, free, draw(st.booleans()))
        written[row] += [(as_bytes(k), as_bytes(v)) for k, v in zip(keys, values, strict=True)]
    for row, expected in enumerate(written):
        keys, values, seq_len = gather_kv(cache, row)
        assert seq_len == cache.seq_lengths[row] == len(expected)
        assert keys.dtype == values.dtype == dtype
        assert keys.flags.c_contiguous
        got = [(as_bytes(k), as_bytes(v)) for k, v in zip(keys, values, strict=True)]
        assert got == expected
