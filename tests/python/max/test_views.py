# SPDX-License-Identifier: Apache-2.0
"""Views of a batch: the place of each layer in the pool, and refused views."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_manager, make_params
from kvcore import (
    ContinuousBatchingKVCacheCollection,
    FetchContinuousBatchingKVCacheCollection,
    PagedKVCacheCollection,
    RaggedKVCacheInputs,
)
from kvcore.support.dtypes import NARROW, WIDE
from slot_managers import ROOM, slot_manager
from tables import table

SHAPE = (5, 2, 3, 4, 2, 6)  # blocks, K and V, layers, tokens, heads, elements


def u32(*values: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def numbered(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def slots(pool: Any, lengths: Any = (2, 0), table: Any = (3, 1), **rest: Any) -> Any:
    return ContinuousBatchingKVCacheCollection(pool, u32(*lengths), u32(*table), 4, 6, **rest)


def pages(pool: Any, table: Any = ((4, 0), (2, 5)), scales: Any = None, **rest: Any) -> Any:
    inputs = RaggedKVCacheInputs(pool, u32(5, 1), u32(*table), u32((3, 7), (1, 8)), scales)
    return PagedKVCacheCollection(inputs, **rest)


# -- contents of a collection --------------------------------------------------------------------
def test_fields_of_slots() -> None:
    pool = numbered()
    view = slots(pool)
    assert view.blocks is pool or np.shares_memory(view.blocks, pool)
    assert (view.cache_lengths.tolist(), view.lookup_table.tolist()) == ([2, 0], [3, 1])
    assert (view.max_seq_length, view.max_cache_length) == (4, 6)
    assert (view.name_str, view.CacheType) == (
        "continuous_batching",
        kvcore.ContinuousBatchingKVCache,
    )
    assert (view.dtype, view.scales, view.scale_dtype) == (np.float32, None, None)
    assert view.kv_cache_dynamic_shape == (5, 4, 2, 6)
    assert view.kv_cache_dynamic_strides == (2 * 3 * 4 * 2 * 6, 2 * 6, 6, 1)
    assert [view.cache_length(row) for row in range(2)] == [2, 0]
    params = view.kv_params
    assert (params.dtype, params.n_kv_heads, params.head_dim) == ("float32", 2, 6)
    assert (params.num_layers, params.page_size, params.is_mla) == (3, 4, False)


def test_fields_of_pages() -> None:
    view = pages(numbered())
    assert (view.name_str, view.CacheType) == ("paged", kvcore.PagedKVCacheLayer)
    assert (view.max_seq_length, view.max_cache_length) == (3, 7)
    assert view.lookup_table.tolist() == [[4, 0], [2, 5]]
    assert [view.cache_length(row) for row in range(2)] == [5, 1]
    layer = view.get_key_cache(0)
    assert (layer.max_prompt_length(), layer.max_context_length()) == (3, 7)
    assert "rows=2" in repr(view)
    assert "(5, 4, 2, 6)" in repr(layer)


@pytest.mark.parametrize("make", [slots, pages])
@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_cache_length_is_bounds_checked(make: Any, row: int) -> None:
    view = make(numbered())
    for of in (view, view.get_value_cache(0)):
        with pytest.raises(IndexError, match="batch_idx"):
            of.cache_length(row)


@pytest.mark.parametrize(("lengths", "empty"), [((0, 0), True), ((0, 1), False), ((3, 0), False)])
def test_cache_is_empty_when_all_lengths_are_0(lengths: tuple[int, int], empty: bool) -> None:
    assert slots(numbered(), lengths).get_key_cache(0).empty_cache() is empty


# -- place of a layer in the pool ----------------------------------------------------------------
@pytest.mark.parametrize("make", [slots, pages])
@pytest.mark.parametrize("dtype", [*WIDE, *NARROW])
def test_layer_is_at_the_documented_offset_and_strides(make: Any, dtype: str) -> None:
    manager = make_manager(4, 5, blocks="allocate", params={"dtype": dtype, **HEADS})
    (pool,) = (entry.blocks for entry in manager.fetch([]))
    view = make(pool)
    _, kv_dim, layers, size, heads, width = pool.shape
    for layer, kv in itertools.product(range(layers), range(kv_dim)):
        cache = view.get_value_cache(layer) if kv else view.get_key_cache(layer)
        assert cache.blocks.shape == (5, size, heads, width)
        assert np.shares_memory(cache.blocks, pool)
        start = cache.blocks.ctypes.data - pool.ctypes.data
        assert start == (kv * layers + layer) * size * heads * width * pool.itemsize
        strides = (kv_dim * layers * size * heads * width, heads * width, width, 1)
        assert tuple(s // pool.itemsize for s in cache.blocks.strides) == strides
        assert view.kv_cache_dynamic_strides == strides


HEADS: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 6, "num_layers": 3}


@pytest.mark.parametrize("make", [slots, pages])
@pytest.mark.parametrize("layer", [-1, 3, 2**40])
def test_layer_out_of_range(make: Any, layer: int) -> None:
    view = make(numbered())
    for get in (view.get_key_cache, view.get_value_cache):
        with pytest.raises(IndexError, match="layer_idx"):
            get(layer)


@pytest.mark.parametrize("make", [slots, pages])
def test_latent_pool_has_no_value_cache(make: Any) -> None:
    view = make(numbered((5, 1, 3, 4, 1, 6)))
    assert view.kv_params.is_mla
    assert (
        view.get_key_cache(1).load(0, 0, 0, 2)
        == view.blocks[view.lookup_table.flat[0], 0, 1][0, 0, 2]
    )
    with pytest.raises(ValueError, match="no value cache"):
        view.get_value_cache(0)


@pytest.mark.parametrize("make", [slots, pages])
def test_values_of_their_own_width(make: Any) -> None:
    keys, values = numbered((5, 1, 3, 4, 2, 6)), -numbered((5, 1, 3, 4, 2, 3))
    view = make((keys, values))
    assert (view.kv_params.head_dim, view.kv_params.v_head_dim) == (6, 3)
    assert all(map(np.shares_memory, view.blocks, (keys, values)))
    assert view.get_key_cache(2).blocks.shape == (5, 4, 2, 6)
    assert view.get_value_cache(2).blocks.shape == (5, 4, 2, 3)
    block = int(view.lookup_table.flat[0])
    assert view.get_value_cache(2).load(0, 1, 3, 2) == values[block, 0, 2, 3, 1, 2]
    with pytest.raises(IndexError, match="dim is 3, must be at least 0 and below 3"):
        view.get_value_cache(2).load(0, 1, 3, 3)


def test_strided_pool() -> None:
    memory = numbered((5, 2, 3, 2, 4, 6))
    view = slots(memory.transpose(0, 1, 2, 4, 3, 5))
    assert view.kv_cache_dynamic_strides == (2 * 3 * 4 * 2 * 6, 6, 4 * 6, 1)
    view.get_value_cache(1).store(0, 1, 2, 5, -7)
    assert memory[3, 1, 1, 1, 2, 5] == -7


def test_pool_that_holds_the_bits_alone() -> None:
    params = make_params(dtype="bfloat16", **HEADS)
    bits = np.zeros(SHAPE, np.uint16)
    view = slots(bits, kv_params=params)
    view.get_key_cache(0).store(0, 0, 0, 0, 1.0)
    assert bits[3, 0, 0, 0, 0, 0] == 0x3F80
    assert view.get_key_cache(0).load(0, 0, 0, 0) == 1.0
    assert view.dtype.name == "bfloat16"


# -- refusals ------------------------------------------------------------------------------------
LENGTHS, TABLE = u32(0, 0), u32(1, 2)


@table(
    ("arguments", "error", "words"),
    [
        ((numbered()[0], LENGTHS, TABLE), ValueError, "6 dimensions"),
        ((None, LENGTHS, TABLE), ValueError, "blocks is None"),
        (([[1.0]], LENGTHS, TABLE), TypeError, "blocks is a list"),
        ((numbered(dtype=np.float64), LENGTHS, TABLE), ValueError, "float64"),
        ((numbered((5, 3, 3, 4, 2, 6)), LENGTHS, TABLE), ValueError, "kv_dim"),
        (((numbered(),) * 3, LENGTHS, TABLE), ValueError, "3 arrays"),
        ((numbered(), LENGTHS.astype(np.int32), TABLE), ValueError, "cache_lengths .* int32"),
        ((numbered(), LENGTHS[None], TABLE), ValueError, "cache_lengths has 2 dim"),
        ((numbered(), LENGTHS, TABLE.astype(np.int64)), ValueError, "lookup_table .* int64"),
        ((numbered(), LENGTHS, TABLE[:, None]), ValueError, "lookup_table has 2 dim"),
        ((numbered(), LENGTHS, TABLE[:1]), ValueError, "2 rows, lookup_table has 1"),
        ((numbered(), LENGTHS, [1, 2]), TypeError, "lookup_table is a list"),
    ],
)
@table("through_fetch", [False, True])
def test_arrays_of_another_rank_or_dtype_are_refused(
    arguments: Any, error: type[Exception], words: str, through_fetch: bool
) -> None:
    make: Any = ContinuousBatchingKVCacheCollection
    rest: tuple[Any, ...] = (1, 1)
    if through_fetch:
        make = FetchContinuousBatchingKVCacheCollection(make_params(**HEADS))
        rest = (np.array([True]),)
    with pytest.raises(error, match=words):
        make(*arguments, *rest)


@pytest.mark.parametrize(
    "scales",
    [
        np.ones((*SHAPE[:5], 2)),
        np.ones(SHAPE[:5], np.float32),
        np.ones((*SHAPE[:4], 1, 2), np.float32),
        np.ones((*SHAPE[:5], 4), np.float32),
        np.ones((*SHAPE[:5], 0), np.float32),
        (np.ones((*SHAPE[:5], 2), np.float32),) * 2,
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: Any) -> None:
    with pytest.raises(ValueError, match=r"scales|granularity"):
        slots(numbered(dtype=np.int8), scales=scales)


def test_table_of_pages_has_a_row_per_sequence_and_two_dimensions() -> None:
    with pytest.raises(ValueError, match="lookup_table has 1 dim"):
        pages(numbered(), table=(1, 2))
    with pytest.raises(ValueError, match="max_lengths"):
        PagedKVCacheCollection(
            RaggedKVCacheInputs(numbered(), LENGTHS, u32((1,), (2,)), u32((1, 2))[:0])
        )


@pytest.mark.parametrize(
    "other", [{"n_kv_heads": 1}, {"head_dim": 3}, {"is_mla": True}, {"dtype": "float16"}]
)
def test_pool_other_than_the_params_is_refused(other: dict[str, Any]) -> None:
    params = make_params(**(HEADS | other))
    with pytest.raises(ValueError, match="blocks has"):
        slots(numbered(), kv_params=params)


# -- from a fetched tuple ------------------------------------------------------------------------
def test_view_from_a_fetched_tuple_is_that_of_fetch_collection() -> None:
    manager = slot_manager()
    ids = manager.claim(3)
    manager.step({ids[1]: 5})
    (fetched,) = manager.fetch(ids)
    rebuilt = FetchContinuousBatchingKVCacheCollection(make_params())(
        *fetched, new_tokens=[4, 2, 1]
    )
    (view,) = manager.fetch_collection(ids, new_tokens=[4, 2, 1])
    for each in (rebuilt, view):
        assert (each.max_seq_length, each.max_cache_length) == (4, 7)
        assert each.blocks is fetched.blocks or np.shares_memory(each.blocks, fetched.blocks)
        assert each.kv_params.page_size == ROOM
    assert FetchContinuousBatchingKVCacheCollection(make_params())(*fetched).max_cache_length == 6


@pytest.mark.parametrize("flag", [np.array([0]), np.array(True), np.array([True, False])])
def test_flag_of_another_form_is_refused(flag: Any) -> None:
    fetch = FetchContinuousBatchingKVCacheCollection(make_params())
    with pytest.raises(ValueError, match="is_cache_empty"):
        fetch(*slot_manager().fetch([])[0][:3], flag)


def test_new_tokens_count_for_the_longest() -> None:
    manager = slot_manager()
    ids = manager.claim(2)
    manager.step({ids[0]: ROOM})
    (view,) = manager.fetch_collection(ids, new_tokens=[0, 3])
    assert (view.max_seq_length, view.max_cache_length) == (3, ROOM)
    (view,) = manager.fetch_collection([], new_tokens=5)
    assert (view.max_seq_length, view.max_cache_length) == (0, 0)
    with pytest.raises(kvcore.CapacityError, match="new_tokens=0"):
        manager.fetch_collection(ids)


# -- from a paged manager ------------------------------------------------------------------------
def test_one_view_per_device_replica_major() -> None:
    manager = make_manager(4, 16, replicas=2, shards=2, blocks="allocate")
    rows = [claimed(manager, range(n), replica_idx=r) for r, n in ((0, 5), (1, 9), (0, 2))]
    views = manager.fetch_collection(iter(rows), num_steps=2)
    inputs = manager.fetch(rows, num_steps=2)
    assert len(views) == 4
    for view, entry in zip(views, inputs, strict=True):
        assert np.shares_memory(view.blocks, entry.blocks)
        assert view.lookup_table.tolist() == entry.lookup_table.tolist()
        assert view.kv_params == manager.params
        assert [view.max_seq_length, view.max_cache_length] == entry.max_lengths[0].tolist()
    views[2].get_key_cache(1).store(0, 0, 8, 1, 3.0)
    page = manager.get_req_blocks(rows[1].request_id)[2]
    assert inputs[2].blocks[page, 0, 1, 0, 0, 1] == 3.0
    assert not inputs[3].blocks.any()


def test_collection_of_an_empty_batch() -> None:
    for view in make_manager(4, 16, replicas=2, blocks="allocate").fetch_collection([]):
        assert (view.max_seq_length, view.max_cache_length) == (0, 0)
        assert view.get_key_cache(0).empty_cache()
        with pytest.raises(IndexError, match="bs is 0, must be at least 0 and below 0"):
            view.get_key_cache(0).load(0, 0, 0, 0)


def test_manager_without_a_pool_has_no_views_and_reserves_nothing() -> None:
    manager = make_manager(blocks=None)
    context = claimed(manager, range(5))
    with pytest.raises(ValueError, match="blocks is None"):
        manager.fetch_collection([context])
    assert manager.num_free_blocks == 16
