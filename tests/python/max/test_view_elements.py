# SPDX-License-Identifier: Apache-2.0
"""load and store of a layer's view: the right element, its scale, its bounds, its owner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_manager, prefilled
from kvcore import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection, RaggedKVCacheInputs
from kvcore.support.dtypes import NARROW, WIDE
from slot_managers import LAYERS, ROOM, SLOTS, slot_manager
from tables import table

HEADS = {"n_kv_heads": 3, "head_dim": 4}
DTYPES = [*WIDE, *NARROW]


def slot_view(**params: Any) -> tuple[Any, Any]:
    """Return a view of slots 0 and 2, and the pool."""
    manager = slot_manager(**(HEADS | params))
    manager.external_claim([0, 2])
    (view,) = manager.fetch_collection([2, 0])
    return view, manager.blocks[0]


def page_view(**params: Any) -> tuple[Any, Any]:
    """Return a view of 9 and 3 tokens in pages of 4, and the pool."""
    manager = make_manager(4, 8, blocks="allocate", params=HEADS | params)
    rows = [claimed(manager, range(n * 10, n * 10 + n)) for n in (9, 3)]
    (view,) = manager.fetch_collection(rows)
    return view, manager.fetch([])[0].blocks


# -- the right element ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_slot_elements(dtype: str) -> None:
    view, pool = slot_view(dtype=dtype)
    draw = np.random.default_rng(0)
    for _ in range(60):
        kv, layer, bs, head, tok, dim = (int(draw.integers(n)) for n in (2, LAYERS, 2, 3, ROOM, 4))
        cache = view.get_value_cache(layer) if kv else view.get_key_cache(layer)
        expected = pool.copy()
        value = int(draw.integers(-8, 8))
        expected[(2, 0)[bs], kv, layer, tok, head, dim] = value
        cache.store(bs, head, tok, dim, value)
        np.testing.assert_array_equal(pool, expected)
        assert cache.load(bs, head, tok, dim) == value
        assert cache.load(bs, head, tok, dim).dtype == pool.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_page_elements_count_tokens_from_the_start_of_the_sequence(dtype: str) -> None:
    view, pool = page_view(dtype=dtype)
    draw = np.random.default_rng(1)
    table = view.lookup_table
    for _ in range(60):
        kv, layer, head, dim = (int(draw.integers(n)) for n in (2, 2, 3, 4))
        bs = int(draw.integers(2))
        tok = int(draw.integers((9, 3)[bs]))
        cache = view.get_value_cache(layer) if kv else view.get_key_cache(layer)
        expected = pool.copy()
        value = int(draw.integers(-8, 8))
        expected[table[bs, tok // 4], kv, layer, tok % 4, head, dim] = value
        cache.store(bs=bs, head=head, tok=tok, dim=dim, value=value)
        np.testing.assert_array_equal(pool, expected)
        assert cache.load(bs=bs, head=head, tok=tok, dim=dim) == value


# -- bounds --------------------------------------------------------------------------------------
GOOD = {"bs": 1, "head": 2, "tok": 2, "dim": 3}


@table("make", [slot_view, page_view])
@table(
    ("name", "value"),
    [
        ("bs", -1), ("bs", 2), ("head", -1), ("head", 3), ("dim", -1), ("dim", 4), ("tok", -1),
        ("tok", 2**31), ("tok", 2**63), ("bs", 2**32), ("head", 2**64), ("dim", -(2**40)),
    ],
)  # fmt: skip
def test_index_out_of_range(make: Any, name: str, value: int) -> None:
    view, pool = make()
    before = pool.copy()
    for cache in (view.get_key_cache(0), view.get_value_cache(1)):
        with pytest.raises(IndexError, match=f"{name} is {value}"):
            cache.load(**(GOOD | {name: value}))
        with pytest.raises(IndexError, match=f"{name} is {value}"):
            cache.store(**(GOOD | {name: value}), value=5)
    np.testing.assert_array_equal(pool, before)


@pytest.mark.parametrize("name", ["bs", "head", "tok", "dim"])
def test_index_that_is_no_int(name: str) -> None:
    view, _ = slot_view()
    with pytest.raises(TypeError, match="is a float, must be an int"):
        view.get_key_cache(0).load(**(GOOD | {name: 1.0}))


def test_position_behind_a_slot() -> None:
    view, pool = slot_view()
    view.get_key_cache(0).store(0, 0, ROOM - 1, 0, 1)
    for tok in (ROOM, ROOM + 1):
        with pytest.raises(IndexError, match=f"tok is {tok}"):
            view.get_key_cache(0).store(0, 0, tok, 0, 1)
    assert np.count_nonzero(pool) == 1


def test_position_without_a_page() -> None:
    view, pool = page_view()
    cache = view.get_key_cache(1)
    assert view.lookup_table.tolist()[1][1:] == [8, 8]
    cache.store(1, 0, 3, 0, 1)  # the page is held, beyond the tokens so far
    for tok in (4, 11):
        with pytest.raises(IndexError, match=r"has no block: entry .* is 8"):
            cache.store(1, 0, tok, 0, 1)
    for row in (0, 1):
        with pytest.raises(IndexError, match="tok is 12"):
            cache.load(row, 0, 12, 0)
    assert np.count_nonzero(pool) == 1


@pytest.mark.parametrize("entry", [5, 6, 2**31, 2**32 - 1])
def test_table_entry_that_is_no_block(entry: int) -> None:
    pool = np.zeros((5, 2, 1, 4, 1, 2), np.float32)
    lengths, slots = np.zeros(1, np.uint32), np.array([entry], np.uint32)
    limits = np.array([[1, 1]], np.uint32)
    for view in (
        ContinuousBatchingKVCacheCollection(pool, lengths, slots, 1, 1),
        PagedKVCacheCollection(RaggedKVCacheInputs(pool, lengths, slots[:, None], limits)),
    ):
        with pytest.raises(IndexError, match=str(entry)):
            view.get_value_cache(0).store(0, 0, 0, 0, 1)
    assert not pool.any()


# -- numbers and scales --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("float8_e4m3fn", 1e6, 448.0), ("float8_e4m3fn", -math.inf, -448.0),
        ("float8_e5m2", 1e6, 57344.0), ("float8_e5m2", math.inf, 57344.0),
        ("int8", 300, 127), ("int8", -1e9, -128), ("int8", 2.5, 2), ("int8", 3.5, 4),
        ("int8", math.inf, 127), ("float16", 1e6, math.inf), ("bfloat16", 257.0, 256.0),
        ("float32", 1e300, math.inf), ("float8_e4m3fn", 1.0625, 1.0),
    ],
)  # fmt: skip
def test_values_are_stored_to_the_nearest(dtype: str, value: float, stored: float) -> None:
    cache = slot_view(dtype=dtype)[0].get_key_cache(0)
    cache.store(0, 0, 0, 0, value)
    assert float(cache.load(0, 0, 0, 0)) == stored


def test_nan() -> None:
    for dtype in DTYPES[:-1]:
        cache = slot_view(dtype=dtype)[0].get_key_cache(0)
        cache.store(0, 0, 0, 0, math.nan)
        assert math.isnan(cache.load(0, 0, 0, 0))
    view, pool = slot_view(dtype="int8")
    with pytest.raises(ValueError, match="NaN has no int8 element; store a number"):
        view.get_key_cache(0).store(0, 0, 0, 0, math.nan)
    assert not pool.any()


@pytest.mark.parametrize("make", [slot_view, page_view])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_are_used(make: Any, dtype: str) -> None:
    view, pool = make(dtype=dtype, kv_scale_granularity=2)
    assert view.scale_dtype == np.float32
    assert view.scales.shape == (*pool.shape[:5], 2)
    draw = np.random.default_rng(2)
    view.scales[:] = draw.integers(1, 9, view.scales.shape) / 4
    pool.view(np.int8)[:] = draw.integers(0, 50, pool.shape)
    for kv, tok, dim in ((0, 0, 0), (1, 2, 1), (0, 1, 2), (1, 0, 3)):
        cache = view.get_value_cache(1) if kv else view.get_key_cache(1)
        block = int(view.lookup_table.reshape(2, -1)[1, 0])
        scale = view.scales[block, kv, 1, tok, 2, dim // 2]
        element = np.float32(pool[block, kv, 1, tok, 2, dim])
        assert cache.load(1, 2, tok, dim) == element * scale
        assert cache.load(1, 2, tok, dim).dtype == np.float32
        before = pool.copy(), view.scales.copy()
        cache.store(1, 2, tok, dim, 6 * scale)
        before[0][block, kv, 1, tok, 2, dim] = 6
        np.testing.assert_array_equal(pool, before[0])
        np.testing.assert_array_equal(view.scales, before[1])
        cache.store(1, 2, tok, dim, 1e9)
        assert cache.load(1, 2, tok, dim) == {"int8": 127, "float8_e4m3fn": 448}[dtype] * scale


def test_scales_of_a_pair() -> None:
    view, (_, values) = page_view(dtype="int8", v_head_dim=6, kv_scale_granularity=2)
    view.scales[0][:], view.scales[1][:] = 2, 4
    view.get_key_cache(0).store(0, 0, 0, 3, 10)
    view.get_value_cache(0).store(0, 0, 0, 5, 10)
    assert view.get_key_cache(0).load(0, 0, 0, 3) == 10
    assert values[view.lookup_table[0, 0], 0, 0, 0, 0, 5] == 2  # 10 / 4, ties to even
    assert view.get_value_cache(0).load(0, 0, 0, 5) == 8


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_store_needs_a_scale(scale: float) -> None:
    view, pool = slot_view(dtype="int8", kv_scale_granularity=4)
    view.scales[:] = scale
    with pytest.raises(ValueError, match="write it into the view's scales first"):
        view.get_key_cache(0).store(0, 0, 0, 0, 1)
    assert not pool.any()
    if scale == 0.0:
        assert view.get_key_cache(0).load(0, 0, 0, 0) == 0


# -- the right owner -----------------------------------------------------------------------------
def refused(view: Any, bs: int, tok: int, words: str) -> None:
    for cache in (view.get_key_cache(0), view.get_value_cache(1)):
        with pytest.raises(kvcore.InvalidHandleError, match=words):
            cache.load(bs, 0, tok, 0)
        with pytest.raises(kvcore.InvalidHandleError, match=words):
            cache.store(bs, 0, tok, 0, 7)


@pytest.mark.parametrize("again", [False, True])
def test_view_of_a_released_slot(again: bool) -> None:
    manager = slot_manager()
    ids = manager.claim(2)
    (view,) = manager.fetch_collection(ids)
    layer = view.get_key_cache(0)
    manager.release(ids[1])
    if again:
        manager.external_claim([ids[1]])
    refused(view, 1, 0, "sequence 1 was released")
    with pytest.raises(kvcore.InvalidHandleError):
        layer.load(1, 0, 0, 0)
    layer.store(0, 0, 0, 0, 7)
    assert np.count_nonzero(manager.blocks[0]) == 1
    if again:
        manager.fetch_collection(ids)[0].get_key_cache(0).store(1, 0, 0, 0, 7)


@pytest.mark.parametrize("again", [False, True])
def test_view_of_a_released_request(again: bool) -> None:
    manager = make_manager(4, 8, caching=False, blocks="allocate")
    rows = [claimed(manager, range(n), request_id=n) for n in (6, 3)]
    (view,) = manager.fetch_collection(rows)
    pages = manager.get_req_blocks(3)
    manager.release(3)
    if again:
        manager.external_claim(3)
        assert manager.maybe_reserve(rows[1])
        assert manager.get_req_blocks(3) == pages
    refused(view, 1, 0, "request 3 was released")
    view.get_key_cache(0).store(0, 0, 5, 0, 7)
    if again:
        manager.fetch_collection(rows)[0].get_key_cache(0).store(1, 0, 2, 0, 7)


def test_view_of_a_page_that_was_swapped() -> None:
    """Deduplication gives the request another page and frees the view's page."""
    manager = make_manager(4, 8, blocks="allocate")
    twins = [claimed(manager, range(9)) for _ in range(2)]
    (view,) = manager.fetch_collection(twins)
    for context in twins:
        context.update(0)
    assert manager.step(twins).tolist() == [
        [1, column, page]
        for column, page in enumerate(manager.get_req_blocks(twins[0].request_id)[:2])
    ]
    for tok in (0, 7):
        refused(view, 1, tok, "no longer page")
    for bs, tok in ((0, 0), (0, 7), (1, 8)):
        view.get_key_cache(0).store(bs, 0, tok, 0, 7)
    (later,) = manager.fetch_collection(twins)
    assert later.get_key_cache(0).load(1, 0, 7, 0) == 7


def test_view_stays_good_while_its_request_grows() -> None:
    manager = make_manager(4, 8, blocks="allocate")
    context = prefilled(manager, range(7))
    (view,) = manager.fetch_collection([context])
    for token in range(6):
        manager.fetch([context])
        context.update(token)
        manager.step([context])
    view.get_key_cache(0).store(0, 0, 6, 0, 7)
    assert view.get_key_cache(0).load(0, 0, 6, 0) == 7


def test_views_keep_the_pool_alive() -> None:
    views = [slot_view()[0], page_view()[0]]
    for view in views:
        view.get_key_cache(0).store(1, 0, 0, 0, 7)
        assert view.get_key_cache(0).load(1, 0, 0, 0) == 7


def test_view_by_hand_asks_nobody() -> None:
    manager = slot_manager()
    ids = manager.claim(SLOTS)
    fetch = kvcore.FetchContinuousBatchingKVCacheCollection(manager.params)
    view = fetch(*manager.fetch(ids)[0])
    manager.release(0)
    view.get_key_cache(0).store(0, 0, 0, 0, 7)
    assert manager.blocks[0][0, 0, 0, 0, 0, 0] == 7


def test_read_only_pool_is_not_written() -> None:
    pool = np.zeros((2, 2, 1, 4, 1, 2), np.float32)
    pool.flags.writeable = False
    one = np.zeros(1, np.uint32)
    view = ContinuousBatchingKVCacheCollection(pool, one, one, 1, 1)
    assert view.get_key_cache(0).load(0, 0, 0, 0) == 0
    with pytest.raises(ValueError, match="read-only"):
        view.get_key_cache(0).store(0, 0, 0, 0, 1)
