# SPDX-License-Identifier: Apache-2.0
"""Memory of the pages (the manager's, the caller's, or no memory), and copies within it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_manager, put_in_cache
from kvcore.support.dtypes import numpy_dtype

SHAPE = (8, 2, 2, 4, 1, 2)


class OnlyDLPack:
    """An array of another library that has only the exchange protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **rest: Any) -> Any:
        return self.array.__dlpack__(**rest)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def adopt(*arrays: Any, **rest: Any) -> kvcore.PagedKVCacheManager:
    return make_manager(4, 8, blocks=list(arrays), **rest)


@pytest.mark.parametrize("wrap", [lambda array: array, OnlyDLPack])
def test_pool_of_the_caller_is_used_as_it_is(wrap: Any) -> None:
    pools = [np.ones(SHAPE, np.float32) for _ in range(2)]
    manager = adopt(*map(wrap, pools), shards=2)
    for entry, pool in zip(manager.fetch([]), pools, strict=True):
        assert np.shares_memory(entry.blocks, pool)
        assert entry.blocks.shape == SHAPE
        assert (entry.blocks == 1).all()


def test_pool_of_the_caller_may_be_strided() -> None:
    memory = np.zeros((8, 2, 2, 1, 4, 2), np.float32)
    pool = memory.transpose(0, 1, 2, 4, 3, 5)
    manager = adopt(pool)
    put_in_cache(manager, range(4))
    memory[:] = 5
    context = claimed(manager, [0, 1, 99])
    assert manager.maybe_reserve(context)
    assert context.start_idx == 2
    assert np.shares_memory(manager.fetch([context])[0].blocks, memory)


@pytest.mark.parametrize(
    ("pool", "error", "words"),
    [
        (np.zeros((7, *SHAPE[1:]), np.float32), ValueError, ["7", "8"]),
        (np.zeros((*SHAPE[:-1], 3), np.float32), ValueError, ["3", "2"]),
        (np.zeros(SHAPE[1:], np.float32), ValueError, ["2, 2, 4"]),
        (np.zeros(SHAPE, np.float64), ValueError, ["float64", "float32"]),
        (np.zeros(SHAPE, np.int32), ValueError, ["int32", "float32"]),
        ([[1.0]], TypeError, ["list"]),
        (None, TypeError, ["None"]),
    ],
)
def test_pool_that_does_not_fit_is_refused(pool: Any, error: Any, words: list[str]) -> None:
    with pytest.raises(error) as caught:
        adopt(pool)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_read_only_pool_is_refused() -> None:
    pool = np.zeros(SHAPE, np.float32)
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        adopt(pool)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_pool_per_device(count: int) -> None:
    with pytest.raises(ValueError, match=r"blocks holds \d pools, must hold 2: one per device"):
        adopt(*(np.zeros(SHAPE, np.float32) for _ in range(count)), shards=2)


@pytest.mark.parametrize("blocks", ["shared", 7, object()])
def test_unknown_kind_of_pool_is_refused(blocks: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"blocks is .*, must be 'allocate', None or a list of arrays"
    ):
        make_manager(4, 8, blocks=blocks)


def test_without_a_pool_there_are_no_blocks() -> None:
    (entry,) = make_manager(4, 8, blocks=None).fetch([])
    assert entry.blocks is None
    assert entry.kv_scales is None


def arrays_of(part: Any) -> list[Any]:
    if part is None:
        return []
    return list(part) if isinstance(part, tuple) else [part]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "int8", "head_dim": 8, "kv_scale_granularity": 4},
        {"is_mla": True},
        {"head_dim": 6, "v_head_dim": 4},
        {"head_dim": 8, "v_head_dim": 4, "dtype": "int8", "kv_scale_granularity": 4},
    ],
)
@pytest.mark.parametrize("verb", ["maybe_reserve", "fetch", "maybe_reserve_batch"])
def test_partial_hit_copies_all_there_is_of_its_tokens(params: dict[str, Any], verb: str) -> None:
    """The copy has keys, values and scales of every layer and shard, up to the last hit token."""
    manager = make_manager(4, 8, blocks="allocate", shards=2, params=params | {"n_kv_heads": 2})
    put_in_cache(manager, range(8))
    entries = manager.fetch([])
    arrays = [a for e in entries for part in (e.blocks, e.kv_scales) for a in arrays_of(part)]
    draw = np.random.default_rng(0)
    for array in arrays:
        array[:] = draw.integers(1, 100, array.shape).astype(array.dtype)
    before = [array.copy() for array in arrays]
    source = int(manager.match_prefix(list(range(8)), return_pages=True)[1][1])
    context = claimed(manager, [*range(7), 99])
    call = getattr(manager, verb)
    call(context if verb == "maybe_reserve" else [context])
    assert context.start_idx == 7
    target = manager.get_req_blocks(context.request_id)[1]
    for array, old in zip(arrays, before, strict=True):
        expected = old.copy()
        expected[target, :, :, :3] = old[source, :, :, :3]
        np.testing.assert_array_equal(array, expected)
    assert len(manager.take_copies()) == 0


def test_scales_must_divide_the_rows_of_values_too() -> None:
    rest = {"head_dim": 8, "v_head_dim": 6, "dtype": "int8", "kv_scale_granularity": 4}
    with pytest.raises(ValueError, match="kv_scale_granularity 4 does not divide the 6 elements"):
        make_manager(4, 8, params=rest)


def test_take_copies_of_a_request_that_is_gone() -> None:
    """Its pending copies are dropped, because another request may have its page by now."""
    manager = make_manager(4, 8)
    put_in_cache(manager, range(8))
    context = claimed(manager, [*range(7), 99])
    assert manager.maybe_reserve(context)
    manager.release(context.request_id)
    assert len(manager.take_copies()) == 0


def test_copies_owed_come_in_the_order_to_be_done() -> None:
    """A later copy may write a page that was evicted after it became a copy's source."""
    manager = make_manager(2, 5)
    pages = np.full((5, 2), -1)

    def owe(tokens: list[int]) -> Any:
        context = claimed(manager, tokens)
        assert manager.maybe_reserve(context)
        return context

    for prompt in ([1, 2], [3, 4]):
        context = owe(prompt)
        pages[manager.get_req_blocks(context.request_id)[0]] = prompt
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
    first = owe([1, 9, 9, 9])
    second = owe([3, 9, 9, 9])
    for _, source, target, tokens in manager.take_copies().tolist():
        pages[target, :tokens] = pages[source, :tokens]
    for context in (first, second):
        own = pages[manager.get_req_blocks(context.request_id)[0]]
        hit = context.start_idx
        assert own[:hit].tolist() == context.tokens[:hit].tolist()


@pytest.mark.parametrize("blocks", ["allocate", None])
def test_batch_of_partial_hits_is_reserved_to_its_end(blocks: Any) -> None:
    manager = make_manager(4, 16, blocks=blocks)
    put_in_cache(manager, range(8))
    batch = [claimed(manager, [*range(n), 99]) for n in (7, 6, 5, 8, 3)]
    assert manager.maybe_reserve_batch(batch) == 5
    assert [context.start_idx for context in batch] == [7, 6, 5, 8, 3]
    assert len(manager.take_copies()) == (4 if blocks is None else 0)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_pool_of_bits_holds_elements_of_the_dtype(dtype: str, bits: Any) -> None:
    memory = np.zeros((8, 2, 2, 4, 1, 2), bits)
    manager = adopt(memory, params={"dtype": dtype})
    (inputs,) = manager.fetch([claimed(manager, [5])])
    assert inputs.blocks.dtype == numpy_dtype(dtype)
    ones = np.ones((1, 1, 2), numpy_dtype(dtype))
    kvcore.ops.append(inputs, 1, ones, ones, np.array([0, 1], np.uint32))
    page = inputs.lookup_table[0, 0]
    assert (memory[page, :, 1, 0] == ones.view(bits)[0, 0, 0]).all()
    assert np.count_nonzero(memory) == 4
