# SPDX-License-Identifier: Apache-2.0
"""Calls refuse to write an array whose elements share memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvcore
from builders import make_manager
from kvcore import PagedBatch, _core, ops
from kvcore.functional import PagedKVCache, allocate_blocks, append_kv
from kvcore.pools import make_shards

SHAPE = (4, 2, 1, 3)  # pages, page_size, heads, dim
TABLE, LENGTHS = np.array([[2, 0]], np.uint32), np.array([1], np.uint32)
OFFSETS = np.array([0, 2], np.uint32)
NEW = np.full((2, 1, 3), 5, np.float32)


def pool() -> Any:
    return np.arange(24, dtype=np.float32).reshape(SHAPE)


def one_page_for_all() -> Any:
    return as_strided(pool(), strides=(0, 12, 12, 4))


def one_token_for_all() -> Any:
    return as_strided(pool(), strides=(24, 0, 12, 4))


def sliding() -> Any:
    """Return pages that begin in the middle of the previous page."""
    return as_strided(pool(), strides=(12, 12, 12, 4))


BAD = [one_page_for_all, one_token_for_all, sliding]


def six(array: Any) -> Any:
    """[pages, kv, layers, page_size, heads, dim]"""
    return array[:, None, None]


WRITES: dict[str, Callable[[Any], object]] = {
    "append to K": lambda p: ops.append(
        PagedBatch(p, pool(), TABLE, LENGTHS), 0, NEW, NEW, OFFSETS
    ),
    "append to V": lambda p: ops.append(
        PagedBatch(pool(), p, TABLE, LENGTHS), 0, NEW, NEW, OFFSETS
    ),
    "scatter": lambda p: ops.scatter(PagedBatch(p, pool(), TABLE, LENGTHS), 0, NEW, NEW, OFFSETS),
    "append_slots": lambda p: ops.append_slots(
        PagedBatch(pool(), p, TABLE, LENGTHS), 0, NEW, NEW, np.array([1, 5])
    ),
    "transfer": lambda p: ops.transfer(
        ops.PoolLayout(six(pool()), "max"), ops.PoolLayout(six(p), "max"), [0], [1]
    ),
    "transfer to layers": lambda p: ops.transfer(
        ops.PoolLayout(([pool()], [pool()]), "layer_first_nhd"),
        ops.PoolLayout(([p], [pool()]), "layer_first_nhd"),
        [0],
        [1],
    ),
    "copy_partial": lambda p: ops.copy_partial(six(p), [(0, 1, 1)]),
    "append_kv": lambda p: append_kv(
        PagedKVCache(p, pool(), TABLE.astype(np.int32), LENGTHS.astype(np.int32)),
        0,
        NEW,
        NEW,
        donate=True,
    ),
    "store": lambda p: (
        kvcore.ContinuousBatchingKVCacheCollection(
            as_strided(p, (4, 2, 1, 2, 1, 3), (p.strides[0], 0, 0, *p.strides[1:])),
            LENGTHS,
            np.array([1], np.uint32),
            1,
            2,
        )
        .get_key_cache(0)
        .store(0, 0, 0, 0, 9)
    ),
}


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("name", WRITES)
def test_pools_that_share_memory_with_themselves_are_refused(
    name: str, make: Callable[[], Any]
) -> None:
    given = make()
    before = given.copy()
    with pytest.raises(ValueError, match="share memory"):
        WRITES[name](given)
    assert np.array_equal(given, before)


def test_layers_in_one_memory_are_refused() -> None:
    given = pool()
    target = ops.PoolLayout(([given, given], [pool(), pool()]), "layer_first_nhd")
    source = ops.PoolLayout(([pool(), pool()], [pool(), pool()]), "layer_first_nhd")
    with pytest.raises(ValueError, match="share memory"):
        ops.transfer(source, target, [0], [1])
    assert np.array_equal(given, pool())


@pytest.mark.parametrize("make", BAD)
def test_reading_such_a_pool_is_allowed(make: Callable[[], Any]) -> None:
    batch = PagedBatch(make(), make(), TABLE, LENGTHS)
    k, _, _ = ops.gather(batch, 0)
    assert np.array_equal(k[0], make()[2, 0])
    ops.attention(batch, 0, NEW, OFFSETS)


def test_pages_of_a_pool_that_is_one_page_are_refused() -> None:
    given = as_strided(np.zeros(6, np.float32), (4, 6), (0, 4))
    for call in (
        lambda: ops.copy_pages(given, [(0, 1)]),
        lambda: ops.fill_pages(given, [0], 9),
        lambda: ops.zero_pages(given, [0]),
    ):
        with pytest.raises(ValueError, match="share memory"):
            call()  # type: ignore[no-untyped-call]
    assert not given.any()


def test_scales_that_all_tokens_share_are_not_written() -> None:
    codes = np.zeros(SHAPE, np.int8)
    scales = as_strided(np.ones(1, np.float32), (*SHAPE[:3], 1), (0, 0, 0, 4))
    batch = PagedBatch(codes, codes.copy(), TABLE, LENGTHS, key_scales=scales, value_scales=scales)
    with pytest.raises(ValueError, match="share memory"):
        ops.append(batch, 0, NEW, NEW, OFFSETS)
    assert not codes.any()
    assert scales.max() == 1
    assert ops.gather(batch, 0)[0].shape == (1, 1, 3)


def test_k_and_v_in_one_memory_are_refused() -> None:
    given = pool()
    for values in (given, given[:, ::-1], as_strided(given, strides=(24, 12, 12, 4))):
        batch = PagedBatch(given, values, TABLE, LENGTHS)
        with pytest.raises(ValueError, match="share memory"):
            ops.append(batch, 0, NEW, NEW, OFFSETS)
        with pytest.raises(ValueError, match="share memory"):
            ops.append_slots(batch, 0, NEW, NEW, np.array([1, 5]))
    assert np.array_equal(given, pool())


@pytest.mark.parametrize("layout", ["interleaved heads", "interleaved tokens", "rows", "pages"])
def test_k_and_v_in_each_others_gaps_are_written(layout: str) -> None:
    memory = np.zeros((4, 2, 2, 2, 3), np.float32)
    parts = {
        "interleaved heads": lambda m: (m[:, :, 0, ::2], m[:, :, 0, 1::2]),
        "interleaved tokens": lambda m: (m[:, :, 0, :1], m[:, :, 1, :1]),
        "rows": lambda m: (m[:, 0, :, :1], m[:, 1, :, :1]),
        "pages": lambda m: (m[:, :, 0, :1, :2], m[:, :, 0, :1, 2:]),
    }
    keys, values = parts[layout](memory)
    batch = PagedBatch(keys, values, TABLE, LENGTHS)
    k, v = NEW[..., : keys.shape[3]], 2 * NEW[..., : values.shape[3]]
    ops.append(batch, 0, k, v, OFFSETS)
    assert float(keys.sum()) == float(k.sum())
    assert float(values.sum()) == float(v.sum())
    ops.append_slots(batch, 0, k, v, np.array([0, 1]))


def test_results_in_one_memory_are_refused() -> None:
    batch = PagedBatch(pool(), pool(), TABLE, LENGTHS)
    one = np.full((1, 1, 3), 8, np.float32)
    with pytest.raises(ValueError, match="share memory"):
        ops.gather(batch, 0, out=(one, one))
    flat = as_strided(np.full(3, 8, np.float32), (2, 1, 3), (0, 12, 4))
    with pytest.raises(ValueError, match="share memory"):
        ops.gather(batch, 0, lengths=np.array([2], np.uint32), out=(flat, NEW.copy()))
    assert one.min() == flat.min() == 8


def test_table_and_lengths_in_the_pool_are_refused() -> None:
    memory = np.zeros(24, np.uint32)
    given = memory.view(np.float32).reshape(SHAPE)
    table, lengths = memory[4:6].reshape(1, 2), memory[6:7]
    with pytest.raises(ValueError, match="lookup_table share memory"):
        ops.append(PagedBatch(given, pool(), table, LENGTHS), 0, NEW, NEW, OFFSETS)
    with pytest.raises(ValueError, match="cache_lengths share memory"):
        ops.append(PagedBatch(given, pool(), TABLE, lengths), 0, NEW, NEW, OFFSETS)
    assert not memory.any()


def test_codes_over_what_they_are_made_of_are_refused() -> None:
    x = np.ones((4, 8), np.float32)
    codes, scales = x.view(np.int8)[:, :8].copy(), np.empty((4, 1), np.float32)
    memory = x.reshape(-1)[:8].view(np.int8).reshape(4, 8)
    with pytest.raises(ValueError, match="share memory"):
        ops.quantize(x, "int8", 8, out=(memory, scales))
    with pytest.raises(ValueError, match="share memory"):
        ops.quantize(x, "int8", 8, out=(codes, x.reshape(-1)[:4].reshape(4, 1)))
    assert (x == 1).all()


def test_donated_table_and_lengths_that_share_memory_are_refused() -> None:
    table = as_strided(np.full(4, -1, np.int32), (2, 4), (0, 4))
    cache = PagedKVCache(pool(), pool(), table, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="share memory"):
        allocate_blocks(cache, sequence_idx=0, num_new_tokens=1, free_block_ids=[1], donate=True)
    assert (table == -1).all()
    lengths = as_strided(np.zeros(1, np.int32), (2,), (0,))
    cache = PagedKVCache(pool(), pool(), np.array([[0], [1]], np.int32), lengths)
    with pytest.raises(ValueError, match="share memory"):
        append_kv(cache, 0, NEW[:1], NEW[:1], donate=True)
    assert np.array_equal(cache.key_pool, pool())
    assert append_kv(cache, 0, NEW[:1], NEW[:1]).seq_lengths.tolist() == [1, 0]


@pytest.mark.parametrize("axis", range(5))
def test_adopted_pool_that_shares_memory_with_itself_is_refused(axis: int) -> None:
    shape = (8, 2, 2, 4, 2, 2)
    whole = np.zeros(shape, np.float32)
    strides = list(whole.strides)
    strides[axis] = 0
    with pytest.raises(ValueError, match="share memory"):
        make_manager(4, 8, params={"n_kv_heads": 2}, blocks=[as_strided(whole, strides=strides)])


def test_devices_and_parts_of_a_pool_have_memory_of_their_own() -> None:
    one = np.zeros((8, 2, 2, 4, 1, 2), np.float32)
    with pytest.raises(ValueError, match="share memory"):
        make_manager(4, 8, shards=2, blocks=[one, one])
    half = np.zeros((8, 1, 2, 4, 1, 2), np.float32)
    params = kvcore.KVCacheParams("float32", 1, 2, 2, page_size=4, v_head_dim=1)
    with pytest.raises(ValueError, match="share memory"):
        make_shards(params, (kvcore.Device("cpu"),), 8, [(half, half[..., :1])])


def test_answer_is_that_of_counting_addresses() -> None:
    """Compare with every address of every element, over all small shapes and strides."""
    sizes, steps = (1, 2, 3), (-3, -2, 0, 1, 2, 3, 4, 6)
    cases = itertools.product(
        itertools.product(sizes, repeat=3), itertools.product(steps, repeat=3)
    )
    for shape, strides in cases:
        for item in (1, 2):
            places = [
                sum(i * s for i, s in zip(index, strides, strict=True)) + byte
                for index in itertools.product(*map(range, shape))
                for byte in range(item)
            ]
            expected = len(set(places)) < len(places)
            found = _core.has_shared_elements(shape, strides, item)
            assert found is expected, (shape, strides, item)
