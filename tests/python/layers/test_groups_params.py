# SPDX-License-Identifier: Apache-2.0
"""KVCacheParams with groups and shared layers, and without."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from kvcore import (
    ContinuousBatchingKVCacheManager,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State, bundles

ARRAYS = {"ssm": ((4,), "float32")}
FULL, WINDOW = FullAttention([0, 2]), SlidingWindow([1, 3], 8)


def make_params(*groups: Any, num_layers: int = 4, **rest: Any) -> KVCacheParams:
    given: dict[str, Any] = {"n_kv_heads": 4, "head_dim": 16, "page_size": 4} | rest
    return KVCacheParams("float32", num_layers=num_layers, groups=groups or None, **given)


# -- without groups ------------------------------------------------------------------------------
def test_params_without_groups_are_what_they_were() -> None:
    flat = make_params()
    assert flat.groups is None
    assert flat.shared is None
    assert flat == make_params(shared={})
    assert "groups" not in repr(flat)
    assert "shared" not in repr(flat)
    assert repr(flat).endswith("v_head_dim=None, cache_strategy='paged')")
    assert eval(repr(flat)) == flat
    assert (flat.bytes_per_token, flat.bytes_per_page) == (2 * 4 * 4 * 16 * 4, 8192)
    assert flat.attention_groups == (FullAttention(range(4)),)
    assert flat.state_groups == ()


def test_params_pickled_before_there_were_groups_are_read() -> None:
    flat = make_params()
    state = {k: v for k, v in vars(flat).items() if k not in ("groups", "shared")}
    old = object.__new__(KVCacheParams)
    old.__dict__.update(state)
    assert old == flat
    assert hash(old) == hash(flat)
    assert pickle.loads(pickle.dumps(old)) == flat


def test_huge_params_without_groups_cost_nothing() -> None:
    huge = KVCacheParams("float32", 1, 1, 2**31 - 1, page_size=1)
    assert (huge.bytes_per_page, huge.layers_per_page) == (8 * (2**31 - 1), 2**31 - 1)


# -- with groups ---------------------------------------------------------------------------------
def test_params_with_groups_are_values() -> None:
    made = make_params(FULL, WINDOW, shared={})
    same = KVCacheParams("float32", 4, 16, 4, page_size=4, groups=[FULL, WINDOW])
    assert made == same
    assert hash(made) == hash(same)
    assert made.groups == (FULL, WINDOW)
    assert made != make_params()
    assert made != make_params(WINDOW, FULL)
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    assert eval(repr(made)) == made
    assert dataclasses.replace(made, page_size=8).groups == made.groups
    assert dataclasses.replace(made, groups=None) == make_params()


def test_shared_layers_are_values() -> None:
    made = make_params(FullAttention([0]), SlidingWindow([1], 8), shared={3: 1, 2: 0})
    assert made.shared == {2: 0, 3: 1}
    assert list(made.shared or ()) == [2, 3]
    assert eval(repr(made)) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(dataclasses.replace(made, shared={2: 0, 3: 1}))
    assert made.bytes_per_token == 2 * 2 * 4 * 16 * 4


def test_shared_layers_without_groups_are_not_cached() -> None:
    made = make_params(shared={3: 1})
    assert made.attention_groups == (FullAttention([0, 1, 2]),)
    assert made.bytes_per_page == make_params(num_layers=3).bytes_per_page
    assert made.layers_per_page == 3


def test_layer_may_have_a_state_and_a_window() -> None:
    state = State(range(4), ARRAYS)
    made = make_params(FULL, WINDOW, state)
    assert made.attention_groups == (FULL, WINDOW)
    assert made.state_groups == (state,)


def test_layer_in_no_group_caches_nothing() -> None:
    assert (
        make_params(FullAttention([1])).bytes_per_page == make_params(num_layers=1).bytes_per_page
    )


# -- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([], "groups is empty"),
        ([State([0], ARRAYS)], "1 State group and no attention group: this model has no K and V"),
        ([State([0], ARRAYS), State([1], ARRAYS)], "2 State groups and no attention group"),
        (
            [FullAttention([0, 4])],
            r"layer 4 of FullAttention is beyond the model, must be 0 \.\. 3",
        ),
        ([FULL, State([7], ARRAYS)], "layer 7 of State"),
        ([FULL, SlidingWindow([2, 3], 8)], "layer 2 is in two groups, must be in an attention"),
        ([FULL, State([1], ARRAYS), State([1], ARRAYS)], "layer 1 is in two groups.* State group"),
        (
            [FULL, State([1], ARRAYS, 6)],
            "interval 6 of State must be a multiple of the page size 4",
        ),
        (
            [FullAttention([0], n_kv_heads=2), WINDOW, State([2], ARRAYS, 4)],
            "must be a multiple of the page size 8",
        ),
    ],
)
def test_groups_that_describe_no_model_are_refused(groups: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVCacheParams("float32", 4, 16, 4, page_size=4, groups=groups)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (FULL, "groups is a FullAttention, must be a sequence"),
        (7, "groups is a int"),
        ("full", "groups is a str"),
        ([FULL, None], "groups holds a NoneType"),
        ([(0, 1)], "groups holds a tuple"),
    ],
)
def test_groups_of_another_type_are_refused(groups: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        KVCacheParams("float32", 4, 16, 4, page_size=4, groups=groups)


@pytest.mark.parametrize(
    ("shared", "error", "words"),
    [
        ({1: 3}, ValueError, "layer 1 reads .* of layer 3, which is in no attention group"),
        ({4: 0}, ValueError, r"layer 4 .* must be 0 \.\. 3"),
        ({-1: 0}, ValueError, r"layer -1 .* must be 0 \.\. 3"),
        ({1: 3, 3: 0}, ValueError, "layer 1 .* of layer 3, which is itself shared"),
        ({1: 1}, ValueError, "layer 1 .* of layer 1, which is itself shared"),
        ({0: 2}, ValueError, "layer 0 .* but it is in an attention group"),
        ({1: "0"}, TypeError, "an owner of shared is a str"),
        ({1.0: 0}, TypeError, "a layer of shared is a float"),
        ([(1, 0)], TypeError, "shared is a list, must be a dict"),
    ],
)
def test_shared_layers_without_an_owner_are_refused(
    shared: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_params(FULL, shared=shared)


@pytest.mark.parametrize(
    ("group", "rest", "words"),
    [
        ({"n_kv_heads": 6}, {"n_devices": 4}, "n_kv_heads 6 .* 4 tensor parallel devices"),
        ({"head_dim": 32}, {"kv_scale_granularity": 48, "head_dim": 48}, "not divide the 32"),
        ({"n_kv_heads": 2}, {"is_mla": True}, "n_kv_heads 2 .* with is_mla"),
        ({"v_head_dim": 8}, {"is_mla": True}, "v_head_dim 8 with is_mla"),
    ],
)
def test_rows_of_a_group_keep_the_rules_of_the_params(
    group: dict[str, int], rest: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_params(FULL, SlidingWindow([1], 8, **group), **rest)


# -- managers ------------------------------------------------------------------------------------
MIXED = [
    make_params(FULL, WINDOW),
    make_params(SlidingWindow(range(4), 8)),
    make_params(ChunkedLocal(range(4), 8)),
    make_params(FullAttention([0, 1])),
    make_params(FullAttention(range(4)), State([0], ARRAYS)),
    make_params(FullAttention(range(4), n_kv_heads=2)),
    make_params(shared={3: 0}),
]


@pytest.mark.parametrize("params", MIXED, ids=lambda p: str(len(bundles(p))))
def test_slots_refuse_groups_and_say_so(params: KVCacheParams) -> None:
    kinds = ", ".join(
        f"{type(group).__name__} of {len(group.layers)} layers"
        for group in params.groups or params.attention_groups
    )
    words = rf"the params have groups \({kinds}\), .* all 4 layers, in rows of 4 heads of 16; use"
    with pytest.raises(ValueError, match=words):
        ContinuousBatchingKVCacheManager(params, 1, 64, 4, ["cpu"])


def test_manager_takes_the_one_group_that_it_has() -> None:
    params = make_params(FullAttention(range(4)))
    assert params.bytes_per_page == make_params().bytes_per_page
    manager = PagedKVCacheManager(params, 1, 64, num_pages=4)
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    assert manager.fetch([context])[0].blocks.shape == (4, 2, 4, 4, 4, 16)
