# SPDX-License-Identifier: Apache-2.0
"""ContinuousBatchingKVCacheManager: each documented rule of the calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from builders import make_params
from kvcore import ContinuousBatchingKVCacheManager
from kvcore.support.dtypes import NARROW, WIDE
from slot_managers import LAYERS, ROOM, SLOTS, seen, slot_manager


# -- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_block_shape(shards: int, n: int) -> None:
    manager = slot_manager(shards=shards, n_kv_heads=6, head_dim=4)
    assert manager.block_shape(n) == [n, 2, LAYERS, ROOM, 6 // shards, 4]


def test_properties() -> None:
    manager = slot_manager(shards=2)
    assert (manager.num_blocks, manager.max_batch_size) == (SLOTS, SLOTS)
    assert (manager.max_seq_len, manager.num_layers) == (ROOM, LAYERS)
    assert manager.cache_lengths == {}
    assert [pool.shape for pool in manager.blocks] == [(SLOTS, 2, LAYERS, ROOM, 1, 2)] * 2
    assert not any(pool.any() for pool in manager.blocks)
    assert "4 free, 0 used" in repr(manager)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW])
def test_pool_of_every_dtype(dtype: str) -> None:
    (pool,) = slot_manager(dtype=dtype).blocks
    assert pool.dtype.name == dtype
    assert not pool.view(np.uint8).any()


def test_arguments_rederive_the_params() -> None:
    made = make_params(page_size=4, num_layers=9)
    manager = ContinuousBatchingKVCacheManager(made, 3, 10, 5, ("cpu",), session=object())
    assert (manager.params.page_size, manager.params.num_layers) == (10, 5)
    assert manager.blocks[0].shape == (3, 2, 5, 10, 1, 2)
    assert (made.page_size, made.num_layers) == (4, 9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shards", [1, 3])
def test_estimated_memory_size(dtype: str, shards: int) -> None:
    made = make_params(shards=shards, n_kv_heads=6, head_dim=5, dtype=dtype)
    n, room, layers = 7, 11, 3
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(
        made, n, room, layers, ["cpu"] * shards
    )
    manager = ContinuousBatchingKVCacheManager(made, n, room, layers, ["cpu"] * shards)
    assert size == sum(pool.nbytes for pool in manager.blocks) + 8 * n * shards
    width = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assert size == (n * 2 * layers * room * (6 // shards) * 5 * width + 8 * n) * shards


def test_estimate_counts_scales() -> None:
    made = make_params(dtype="int8", head_dim=8, kv_scale_granularity=4)
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(made, 3, 5, 2, ["cpu"])
    assert size == 3 * 2 * 2 * 5 * (8 + 2 * 4) + 8 * 3


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"max_cache_batch_size": 0}, "max_cache_batch_size is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"devices": ["cpu", "cpu"]}, "2 devices .*n_devices is 1"),
        ({"params": make_params(replicas=2), "devices": ["cpu"] * 2}, "data_parallel_degree is 2"),
        ({"params": make_params(v_head_dim=4)}, "v_head_dim is 4"),
    ],
)
def test_sizes_that_make_no_manager_are_refused(rest: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {
        "params": make_params(),
        "max_cache_batch_size": 2,
        "max_seq_len": 8,
        "num_layers": 2,
        "devices": ["cpu"],
    }
    with pytest.raises(ValueError, match=words):
        ContinuousBatchingKVCacheManager(**(settings | rest))


# -- claim, release ------------------------------------------------------------------------------
def test_slots_are_claimed_round_robin() -> None:
    manager = slot_manager()
    assert manager.claim(3) == [0, 1, 2]
    manager.release(1)
    manager.release(0)
    assert manager.claim(1) == [3]
    assert manager.claim(2) == [0, 1]
    manager.release(2)
    assert manager.claim(0) == []
    assert manager.claim(1) == [2]
    assert manager.slots_remaining == 0


def test_a_slot_just_freed_is_not_claimed_while_others_are_free() -> None:
    manager = slot_manager()
    claimed = []
    for _ in range(2 * SLOTS):
        (slot,) = manager.claim(1)
        manager.release(slot)
        claimed.append(slot)
    assert claimed == [*range(SLOTS)] * 2


def test_slots_the_caller_chose() -> None:
    manager = slot_manager()
    manager.external_claim([2, 0])
    assert seen(manager) == ([0, 2], {2: 0, 0: 0}, 2)
    assert manager.claim(2) == [1, 3]
    manager.external_claim([])
    assert manager.slots_remaining == 0


def test_contains_only_claimed_ids() -> None:
    """Fixed: an id without a slot was "contained", because it was not a free id."""
    manager = slot_manager()
    manager.claim(2)
    assert [n for n in range(-10, 20) if manager.contains(n)] == [0, 1]
    assert not manager.contains("0")
    manager.release(0)
    assert not manager.contains(0)


def test_slot_claimed_again_starts_empty() -> None:
    manager = slot_manager(1)
    (slot,) = manager.claim(1)
    manager.step({slot: 5})
    manager.release(slot)
    assert manager.claim(1) == [slot]
    assert manager.cache_lengths == {slot: 0}


@pytest.mark.parametrize("n", [3, 5, 1000, 2**70])
def test_claim_of_too_many_claims_none(n: int) -> None:
    """Fixed: slots claimed before the missing slot stayed claimed."""
    manager = slot_manager()
    manager.claim(2)
    manager.step({0: 3})
    before = seen(manager)
    with pytest.raises(kvcore.CapacityError, match=rf"batch_size is {n}, 2 of 4 slots are free"):
        manager.claim(n)
    assert seen(manager) == before
    assert manager.claim(2) == [2, 3]


# -- fetch ---------------------------------------------------------------------------------------
def test_fetch_hands_out_pool_lengths_and_slots() -> None:
    manager = slot_manager(shards=2)
    manager.claim(3)
    manager.step({0: 3, 2: 5})
    inputs = manager.fetch([2, 1, 0])
    assert len(inputs) == 2
    for (blocks, lengths, table, is_empty), pool in zip(inputs, manager.blocks, strict=True):
        assert blocks is pool
        assert (lengths.tolist(), lengths.dtype) == ([5, 0, 3], np.uint32)
        assert (table.tolist(), table.dtype) == ([2, 1, 0], np.uint32)
        assert (is_empty.tolist(), is_empty.dtype) == ([False], np.bool_)
    assert inputs[0].lookup_table is inputs[0][2]


def test_fetched_arrays_do_not_change() -> None:
    manager = slot_manager()
    ids = manager.claim(2)
    (before,) = manager.fetch(ids)
    manager.step([3, 4], ids)
    assert before.cache_lengths.tolist() == [0, 0]
    assert manager.fetch(ids)[0].cache_lengths.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("lengths", "empty"), [((0, 0, 0), True), ((0, 0, 1), False), ((2, 0, 0), False)]
)
def test_cache_is_empty_when_all_lengths_are_0(lengths: tuple[int, ...], empty: bool) -> None:
    """Fixed: the cache was reported empty whenever sequence id 0 was in the batch."""
    manager = slot_manager()
    ids = manager.claim(3)
    manager.step(dict(zip(ids, lengths, strict=True)))
    assert manager.fetch(ids)[0].is_cache_empty.tolist() == [empty]
    assert manager.fetch([])[0].is_cache_empty.tolist() == [True]


def test_lengths_are_a_copy() -> None:
    manager = slot_manager()
    manager.claim(1)
    manager.cache_lengths[0] = 7
    assert manager.cache_lengths == {0: 0}


# -- step ----------------------------------------------------------------------------------------
def test_step_by_dict_list_or_collection() -> None:
    manager = slot_manager(shards=2)
    ids = manager.claim(3)
    manager.step({ids[1]: 2})
    manager.step([1, 2, 3], ids)
    collections = manager.fetch_collection([2, 0], new_tokens=[1, 2])
    manager.step([1, 1], collections[0])
    manager.step(np.array([1, 1]), collections)
    rebuild = kvcore.FetchContinuousBatchingKVCacheCollection(manager.params)
    manager.step([0, 1], rebuild(*manager.fetch([2, 0])[0]))
    assert manager.cache_lengths == {0: 4, 1: 4, 2: 5}
    manager.step({})
    manager.step([], [])
    assert manager.cache_lengths == {0: 4, 1: 4, 2: 5}


def test_step_up_to_the_end_of_a_slot() -> None:
    manager = slot_manager()
    manager.claim(1)
    manager.step({0: ROOM})
    assert manager.cache_lengths == {0: ROOM}
    manager.step({0: 0})


# -- multi-step ----------------------------------------------------------------------------------
def test_increment_cache_lengths_answers_new_inputs() -> None:
    manager = slot_manager(shards=2)
    ids = manager.claim(2)
    manager.step([2, 3], ids)
    inputs = manager.fetch(ids)
    offsets = np.array([0, 4, 5], np.uint32)
    for form in (offsets, ("tokens", offsets), SimpleNamespace(input_row_offsets=offsets)):
        later = manager.increment_cache_lengths(inputs, form)
        assert [each.cache_lengths.tolist() for each in later] == [[6, 4]] * 2
        for old, new in zip(inputs, later, strict=True):
            assert new.cache_lengths.dtype == np.uint32
            assert new.blocks is old.blocks
            assert new.lookup_table is old.lookup_table
            assert new.is_cache_empty.tolist() == [False]
    last = manager.increment_cache_lengths(later, np.array([0, 1, 2]))
    assert last[1].cache_lengths.tolist() == [7, 5]
    assert inputs[0].cache_lengths.tolist() == [2, 3]
    assert manager.cache_lengths == {0: 2, 1: 3}


def test_increment_makes_an_empty_cache_non_empty() -> None:
    manager = slot_manager()
    inputs = manager.fetch(manager.claim(1))
    assert inputs[0].is_cache_empty.tolist() == [True]
    later = manager.increment_cache_lengths(inputs, np.array([0, 1], np.uint32))
    assert later[0].is_cache_empty.tolist() == [False]
    assert inputs[0].is_cache_empty.tolist() == [True]


def test_increment_past_the_slot_or_of_other_rows_is_refused() -> None:
    manager = slot_manager()
    inputs = manager.fetch(manager.claim(2))
    with pytest.raises(kvcore.CapacityError, match="9 tokens, max_seq_len is 8"):
        manager.increment_cache_lengths(inputs, np.array([0, 1, 10], np.uint32))
    with pytest.raises(ValueError, match="2 entries for a batch of 2"):
        manager.increment_cache_lengths(inputs, np.array([0, 1], np.uint32))
    with pytest.raises(ValueError, match="0 inputs for 1 devices"):
        manager.increment_cache_lengths([], np.array([0], np.uint32))


def test_input_symbols_describe_what_fetch_hands_out() -> None:
    manager = slot_manager(shards=2, dtype="bfloat16")
    ids = manager.claim(3)
    for symbols, inputs in zip(manager.input_symbols(), manager.fetch(ids), strict=True):
        assert [symbol.name for symbol in symbols] == list(inputs._fields)
        for symbol, array in zip(symbols, inputs, strict=True):
            known: dict[Any, Any] = {"num_blocks": SLOTS, "batch_size": 3}
            assert array.shape == tuple(known.get(n, n) for n in symbol.shape)
            assert array.dtype.name == symbol.dtype
    (other,) = manager.input_symbols(["cuda:1"], num_layers=7)
    assert other.blocks.shape == ("num_blocks", 2, 7, ROOM, 1, 2)
    assert other.blocks.device == kvcore.Device("cuda", 1)


# -- random calls --------------------------------------------------------------------------------
class Model:
    """The rules in a few lines: lengths by slot, and the start of the search for a free slot."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.cursor = 0

    def claim(self, n: int) -> list[int]:
        order = [(self.cursor + i) % SLOTS for i in range(SLOTS)]
        free = [slot for slot in order if slot not in self.lengths]
        if n > len(free):
            raise kvcore.CapacityError
        for slot in free[:n]:
            self.lengths[slot] = 0
            self.cursor = (slot + 1) % SLOTS
        return free[:n]

    def external_claim(self, ids: list[int]) -> None:
        if len(set(ids)) < len(ids):
            raise ValueError
        for slot in ids:
            if not 0 <= slot < SLOTS:
                raise ValueError
            if slot in self.lengths:
                raise kvcore.AlreadyClaimedError
        self.lengths |= dict.fromkeys(ids, 0)

    def release(self, slot: int) -> None:
        if slot not in self.lengths:
            raise kvcore.RequestNotFoundError
        del self.lengths[slot]

    def step(self, added: dict[int, int]) -> None:
        if any(slot not in self.lengths for slot in added):
            raise kvcore.RequestNotFoundError
        if any(self.lengths[slot] + more > ROOM for slot, more in added.items()):
            raise kvcore.CapacityError
        for slot, more in added.items():
            self.lengths[slot] += more


SLOT = st.integers(-1, SLOTS)
CALLS = st.one_of(
    st.tuples(st.just("claim"), st.integers(0, SLOTS)),
    st.tuples(st.just("external_claim"), st.lists(SLOT, max_size=3)),
    st.tuples(st.just("release"), SLOT),
    st.tuples(st.just("step"), st.dictionaries(SLOT, st.integers(0, 5), max_size=3)),
)


@given(st.lists(CALLS, max_size=40))
def test_any_calls_agree_with_the_model(calls: list[tuple[str, Any]]) -> None:
    manager, model = slot_manager(), Model()
    for verb, argument in calls:
        answers: list[Any] = []
        for side in (manager, model):
            try:
                answers.append(getattr(side, verb)(argument))
            except ValueError as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (verb, argument)
        expected = sorted(model.lengths), model.lengths, SLOTS - len(model.lengths)
        assert seen(manager) == expected
