# SPDX-License-Identifier: Apache-2.0
"""Contexts and inputs without a pool are pickled and copied; changed pickles are refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from kvcore import PagedKVCacheManager, RaggedKVCacheInputs, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.snapshots import pickling as saved
from moved_requests import moving_manager, moving_params
from state_model import prefill, prompt, state_manager, state_params

FIELDS: list[dict[str, Any]] = [
    {},
    {"active_idx": 2},
    {"extra_key": "", "cache_salt": "tenant"},
    {"priority": 7, "ttl": 2.5, "retention": [(0, 2, 90, None)], "tenant": "t"},
    {"extra_keys": [(1, 3, b"cat"), (0, 1, b"")]},
]


def same(found: TextGenerationContext, wanted: TextGenerationContext) -> None:
    names = ("request_id", "extra_key", "cache_salt", "priority", "ttl", "retention", "tenant")
    for name in (*names, "extra_keys", "start_idx", "active_idx", "end_idx"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.tokens.tolist() == wanted.tokens.tolist()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("options", FIELDS)
def test_contexts_are_pickled(options: dict[str, Any], protocol: int) -> None:
    context = TextGenerationContext(("r", 1), [5, 6, 7, 8], **options)
    for _ in range(3):
        again = pickle.loads(pickle.dumps(context, protocol))
        same(again, context)
        context.update(9)
        again.update(9)
        same(again, context)
        context.extend([1, 2])
    context.rewind(3)
    same(pickle.loads(pickle.dumps(context, protocol)), context)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("options", FIELDS)
def test_copies_are_requests_of_their_own_with_the_same_id(make: Any, options: Any) -> None:
    name = object()
    context = TextGenerationContext(name, [5, 6, 7, 8], **options)
    again = make(context)
    same(again, context)
    assert again.request_id is name
    again.update(3)
    again.extend([3])
    assert (context.start_idx, context.end_idx) == (0, 4)


def test_a_pickle_has_no_claim() -> None:
    manager = moving_manager()
    context = TextGenerationContext("r", list(range(10)))
    manager.claim("r")
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    again = pickle.loads(pickle.dumps(context))
    assert (again.start_idx, again.end_idx) == (10, 11)
    other = moving_manager()
    with pytest.raises(ValueError, match="is not claimed"):
        other.fetch([again])
    other.claim("r")
    (inputs,) = other.fetch([again])  # this manager has no written tokens of the request
    assert (again.start_idx, inputs.cache_lengths.tolist()) == (0, [0])
    manager.fetch([context])
    assert context.start_idx == 10
    here = copy.copy(context)  # the same request, for a manager that has its claim
    manager.fetch([here])
    assert (here.start_idx, here.active_idx) == (10, 11)


def state() -> dict[str, Any]:
    return saved.context_state(TextGenerationContext("r", [1, 2, 3]))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"version": 0},
            ValueError,
            "0, must be of version 2; save and load with the same version",
        ),
        ({"version": 1}, ValueError, "of version 1, must be of version 2"),
        ({"version": None}, ValueError, "version None"),
        ({"more": 1}, ValueError, "with extra or missing fields: more"),
        ({"start_idx": 3}, ValueError, "0 <= start_idx < active_idx <= tokens"),
        ({"start_idx": -1}, ValueError, "0 <= start_idx < active_idx <= tokens"),
        ({"active_idx": 4}, ValueError, "0 <= start_idx < active_idx <= tokens"),
        ({"active_idx": 0}, ValueError, "0 <= start_idx < active_idx <= tokens"),
        ({"active_idx": "3"}, TypeError, "active_idx"),
        ({"tokens": np.zeros(0, np.int32)}, ValueError, "0 tokens"),
        ({"tokens": [1, 2, 3]}, TypeError, "bad tokens, must be int32"),
        ({"tokens": np.zeros((1, 3), np.int32)}, TypeError, "bad tokens, must be int32"),
        ({"tokens": np.zeros(3, np.int64)}, TypeError, "bad tokens, must be int32"),
        ({"tokens": np.array([None] * 3)}, TypeError, "bad tokens, must be int32"),
        ({"extra_keys": 7}, TypeError, "extra_keys"),
        ({"extra_keys": ((0, 2**40, b"x"),)}, ValueError, "an extra key up to token"),
        ({"extra_keys": ((2, 2**20 + 2, b"x"),)}, ValueError, "at most 1048576 past them"),
        ({"extra_keys": ((9, 1, b"x"),)}, ValueError, "starts at 9"),
        ({"extra_keys": ((0, 1, "x"),)}, TypeError, "must be bytes"),
        ({"extra_key": 7}, TypeError, "extra_key"),
        ({"priority": 101}, ValueError, "priority"),
        ({"retention": ((3, 1, 5, None),)}, ValueError, "retention"),
        ({"request_id": []}, TypeError, "unhashable"),
    ],
)
def test_changed_states_of_contexts(change: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        saved.make_context(state() | change)


@pytest.mark.parametrize("wrong", [None, 7, "state", [], {}, ()])
def test_no_states_at_all(wrong: Any) -> None:
    for make in (saved.make_context, saved.make_inputs):
        with pytest.raises(ValueError, match="of version None, must be of version 2"):
            make(wrong)


def test_states_that_lack_a_field() -> None:
    for name in state():
        rest = {key: value for key, value in state().items() if key != name}
        with pytest.raises(ValueError, match="version" if name == "version" else name):
            saved.make_context(rest)


# ---- inputs --------------------------------------------------------------------------------------


def fetched(manager: PagedKVCacheManager) -> RaggedKVCacheInputs:
    contexts = [TextGenerationContext(i, list(range(5 + 3 * i))) for i in range(3)]
    for context in contexts:
        manager.claim(context.request_id)
    return manager.fetch(contexts)[0]


def equal(found: RaggedKVCacheInputs, wanted: RaggedKVCacheInputs) -> None:
    for name in ("cache_lengths", "lookup_table", "max_lengths", "row_offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
    for name in ("tables", "states"):
        pairs = zip(getattr(found, name), getattr(wanted, name), strict=True)
        for left, right in pairs:
            np.testing.assert_array_equal(left, right)


def test_inputs_without_a_pool_are_pickled() -> None:
    inputs = fetched(moving_manager(blocks=None))
    again = pickle.loads(pickle.dumps(inputs))
    equal(again, inputs)
    assert again.blocks is None
    assert again.kv_scales is None
    pool = np.zeros((32, 2, 2, 4, 2, 4), np.float32)
    over = again.with_pool(pool)
    assert over.blocks is pool
    assert again.blocks is None
    equal(over, inputs)


def test_inputs_of_groups_and_states_are_pickled() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 5))
    inputs = fetched(moving_manager(moving_params(groups=groups), blocks=None))
    again = pickle.loads(pickle.dumps(inputs))
    equal(again, inputs)
    assert again.tables[0] is again.lookup_table
    manager = state_manager(state_params(), blocks=None)
    manager.claim("r")
    inputs = manager.fetch([TextGenerationContext("r", prompt((0, 7)))])[0]
    assert len(inputs.states) == 1
    equal(pickle.loads(pickle.dumps(inputs)), inputs)


def test_inputs_with_a_pool_are_not_pickled() -> None:
    inputs = fetched(moving_manager())
    with pytest.raises(TypeError, match="make the manager with blocks=None"):
        pickle.dumps(inputs)


def test_copies_of_inputs_share_the_pool() -> None:
    manager = state_manager(state_params())
    prefill(manager, "r", prompt((0, 7)))
    inputs = fetched(moving_manager())
    same_arrays = copy.copy(inputs)
    equal(same_arrays, inputs)
    assert same_arrays.lookup_table is inputs.lookup_table
    own_arrays = copy.deepcopy(inputs)
    equal(own_arrays, inputs)
    assert own_arrays.blocks is inputs.blocks
    assert not np.shares_memory(own_arrays.lookup_table, inputs.lookup_table)
    own_arrays.lookup_table[...] = 0
    assert inputs.lookup_table.any()


def inputs_state() -> dict[str, Any]:
    groups = (FullAttention([0]), SlidingWindow([1], 5))
    return saved.inputs_state(fetched(moving_manager(moving_params(groups=groups), blocks=None)))


@pytest.mark.parametrize(
    "change",
    [
        {"cache_lengths": [1, 2, 3]},
        {"cache_lengths": np.zeros((3, 1), np.uint32)},
        {"cache_lengths": np.zeros(3, np.int64)},
        {"lookup_table": np.zeros((2, 4), np.uint32)},
        {"lookup_table": np.zeros(3, np.uint32)},
        {"max_lengths": np.zeros((1, 3), np.uint32)},
        {"row_offsets": np.zeros(3, np.uint32)},
        {"tables": [np.zeros((3, 4), np.uint32)]},
        {"tables": (np.zeros((2, 4), np.uint32),)},
        {"tables": (None,)},
        {"states": (np.zeros(3, np.uint32),)},
        {"states": 7},
        {"layers": {}},
    ],
    ids=str,
)
def test_changed_states_of_inputs(change: Any) -> None:
    equal(saved.make_inputs(inputs_state()), saved.make_inputs(inputs_state()))
    with pytest.raises(TypeError, match="the saved inputs have"):
        saved.make_inputs(inputs_state() | change)


def test_other_versions_of_inputs() -> None:
    with pytest.raises(ValueError, match="the saved inputs are of version 1, must be of version 2"):
        saved.make_inputs(inputs_state() | {"version": 1})
