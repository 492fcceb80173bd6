# SPDX-License-Identifier: Apache-2.0
"""Managers with layers that keep a state: slots, checkpoints, hits, and copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow, State
from state_model import (
    ARRAYS,
    prefill,
    prompt,
    run_states,
    state_manager,
    state_params,
    step_states,
)


def test_states_have_a_slot_for_each_request_and_more_for_checkpoints() -> None:
    manager = state_manager(state_params())
    (group,) = manager.states
    assert {name: [a.shape for a in arrays] for name, arrays in group.items()} == {
        "conv": [(20, 2, 3)],
        "ssm": [(20, 2, 2, 2)],
    }
    assert group["ssm"][0].dtype == np.int8
    assert state_manager(state_params(), num_states=5).states[0]["conv"][0].shape == (5, 2, 3)
    assert state_manager(state_params(), blocks=None).states == ()
    flat = KVCacheParams("float32", 1, 2, 1, page_size=4)
    assert PagedKVCacheManager(flat, 2, 64, num_pages=4).states == ()


def test_inputs_name_the_slots_of_a_batch() -> None:
    other = State([1], {"x": ((1,), "float32")}, 8)
    manager = state_manager(state_params(FullAttention([0]), State([2], ARRAYS), other))
    contexts = [TextGenerationContext(name, [1, 2, 3]) for name in "abc"]
    for context in contexts:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(contexts)
    assert [slots.tolist() for slots in inputs.states] == [[0, 1, 2]] * 2
    assert all(slots.dtype == np.int32 for slots in inputs.states)
    (later,) = manager.fetch(contexts[::-1])
    assert later.states[0].tolist() == [2, 1, 0]
    assert inputs.states[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("tokens", [[], [900]])
def test_a_repeated_prompt_hits_its_last_page_boundary(tokens: list[int]) -> None:
    manager = state_manager(state_params())
    first = prefill(manager, "a", prompt((0, 14)))
    assert manager.match_prefix(prompt((0, 14))) == 12
    assert manager.match_prefix(prompt((0, 11))) == 0
    assert manager.metrics.cache_tokens == 0
    manager.release("a")
    second = prefill(manager, "b", prompt((0, 14)) + tokens)
    assert manager.metrics.cache_tokens == 12
    for _ in range(9):
        step_states(manager, second)
    assert first.end_idx == 15
    metrics = manager.state_metrics
    assert (metrics.checkpoint_hits, metrics.used_slots) == (1, 1)
    assert metrics.checkpoints == 1
    manager.reset_metrics()
    assert manager.state_metrics.checkpoint_hits == 0


def test_a_prompt_is_cut_where_its_checkpoint_is_due() -> None:
    manager = state_manager(state_params())
    context = TextGenerationContext("a", prompt((0, 14)))
    manager.claim("a")
    plan = manager.plan(context)
    assert (plan.active_idx, plan.fits, plan.new_pages) == (12, True, 4)
    assert context.active_idx == 14
    assert manager.reserve(context)
    assert (context.start_idx, context.active_idx, context.end_idx) == (0, 12, 14)
    (inputs,) = manager.fetch([context])
    assert inputs.max_lengths.tolist() == [[12, 12]]
    assert manager.metrics.input_tokens == 12


def test_a_checkpoint_is_made_where_prompts_branch() -> None:
    manager = state_manager(state_params())
    prefill(manager, "a", prompt((0, 20)))
    manager.release("a")
    second = TextGenerationContext("b", prompt((0, 8), (500, 6)))
    manager.claim("b")
    assert manager.plan(second).hit_tokens == 0
    assert manager.plan(second).active_idx == 8
    manager.release("b")
    prefill(manager, "c", prompt((0, 8), (500, 6)))
    third = prefill(manager, "d", prompt((0, 8), (700, 6)))
    assert manager.metrics.cache_tokens == 8
    assert third.end_idx == 15


def test_intervals_make_checkpoints_while_decoding_too() -> None:
    manager = state_manager(state_params(interval=8), num_states=12)
    context = prefill(manager, "a", prompt((0, 20)))
    for _ in range(15):
        step_states(manager, context)
    tokens = context.tokens.tolist()
    assert [n for n in range(1, 36) if manager.match_prefix(tokens[:n]) == n] == [8, 16, 24, 32]
    manager.release("a")
    again = prefill(manager, "b", tokens[:35])
    assert manager.metrics.cache_tokens == 32
    step_states(manager, again)


def test_a_boundary_due_for_one_group_is_due_for_all() -> None:
    groups = (FullAttention([0]), State([1], ARRAYS, 8), State([2], ARRAYS, 12))
    manager = state_manager(state_params(*groups), num_states=12)
    context = TextGenerationContext("a", prompt((0, 27)))
    manager.claim("a")
    ends = []
    while context.end_idx == 27:
        step_states(manager, context)
        ends.append(context.start_idx)
    assert ends == [8, 12, 16, 24, 27]


def test_states_beside_windows() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 6), State([2, 3], ARRAYS, 8))
    manager = state_manager(state_params(*groups), num_states=10)
    context = prefill(manager, "a", prompt((0, 30)))
    assert manager.match_prefix(prompt((0, 30))) == 28
    assert manager.match_prefix(prompt((0, 26))) == 24
    manager.release("a")
    prefill(manager, "b", prompt((0, 30)))
    assert manager.metrics.cache_tokens == 28
    assert context.end_idx == 31


def test_a_cut_chunk_runs_alone() -> None:
    manager = state_manager(state_params())
    context = TextGenerationContext("a", prompt((0, 14)))
    manager.claim("a")
    alone: tuple[Any, ...] = (manager.plan, manager.reserve)
    for verb in alone:
        with pytest.raises(ValueError, match=r"'a'.*num_steps is 3, must be 1.* 12.*active_idx 14"):
            verb(context, 3)
    together: tuple[Any, ...] = (manager.fetch, manager.maybe_reserve_batch)
    for verb in together:
        with pytest.raises(ValueError, match="num_steps is 2, must be 1"):
            verb([context], 2)
    assert (context.active_idx, manager.num_free_blocks) == (14, 64)
    assert manager.state_metrics.used_slots == 0
    short = TextGenerationContext("b", [1, 2])
    manager.claim("b")
    assert manager.reserve(short, 4)


def test_forks_begin_with_the_parents_state() -> None:
    manager = state_manager(state_params(), num_states=5)
    parent = prefill(manager, "a", prompt((0, 14)))
    children = [TextGenerationContext(f"c{i}", [*parent.tokens[:14], 50 + i]) for i in range(3)]
    manager.fork("a", *children)
    for _ in range(6):
        step_states(manager, parent, *children)
    late = TextGenerationContext("d", [*parent.tokens[: parent.start_idx], 60])
    manager.release("c0")
    manager.fetch([parent])
    with pytest.raises(ValueError, match=r"'a'.*fork it between step and fetch"):
        manager.fork("a", late)
    assert not manager.contains("d")
    parent.update(3)
    manager.step([parent])


def test_a_fork_without_a_slot_is_refused() -> None:
    manager = state_manager(state_params(), num_states=4)
    parent = prefill(manager, "a", prompt((0, 14)))
    children = [TextGenerationContext(f"c{i}", [*parent.tokens[:14], 50 + i]) for i in range(3)]
    with manager.pin(prompt((0, 14))) as pinned:
        assert pinned.num_tokens == 12
        with pytest.raises(CapacityError, match="2 of 4 state slots left, 3 forks do not fit"):
            manager.fork("a", *children)
        assert not any(manager.contains(child.request_id) for child in children)
        assert manager.state_metrics.used_slots == 1
    manager.fork("a", *children)
    step_states(manager, *children)


def test_truncation_goes_to_a_checkpoint() -> None:
    manager = state_manager(state_params(interval=8))
    context = prefill(manager, "a", prompt((0, 22)))
    for n in (1, 7, 19, 21):
        with pytest.raises(ValueError, match=f"'a' cannot be truncated to {n} tokens"):
            manager.truncate("a", n)
    manager.truncate("a", 22)
    manager.truncate("a", 16)
    context.rewind(17)
    step_states(manager, context)
    assert context.start_idx == 17
    manager.truncate("a", 0)
    context.rewind(1)
    while context.start_idx < 1:
        step_states(manager, context)


def test_a_pinned_checkpoint_stays() -> None:
    manager = state_manager(state_params(), num_states=4)
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    with manager.pin(prompt((0, 14))):
        names = "bcd"
        for i, name in enumerate(names):
            prefill(manager, name, prompt((100 * (i + 1), 9)))
        last = TextGenerationContext("e", prompt((0, 14)))
        manager.claim("e")
        assert not manager.plan(last).fits
        assert not manager.reserve(last)
        with pytest.raises(InsufficientBlocksError, match=r"'e' needs a slot .* all 4"):
            manager.fetch([last])
        assert manager.match_prefix(prompt((0, 14))) == 12
    step_states(manager, last)  # takes over the checkpoint's slot
    assert manager.metrics.cache_tokens == 12


def test_preempted_requests_go_on_from_a_checkpoint() -> None:
    manager = state_manager(state_params(interval=4))
    context = prefill(manager, "a", prompt((0, 10)))
    for _ in range(7):
        step_states(manager, context)
    tokens = context.tokens.tolist()
    manager.release("a")
    again = prefill(manager, "a", tokens)
    assert (manager.metrics.resumed_tokens, manager.metrics.cache_tokens) == (16, 0)
    assert again.tokens.tolist()[:-1] == tokens


def test_namespaces_share_no_state() -> None:
    manager = state_manager(state_params())
    prefill(manager, "a", prompt((0, 14)), extra_key="x")
    manager.release("a")
    assert manager.match_prefix(prompt((0, 14))) == 0
    assert manager.match_prefix(prompt((0, 14)), extra_key="x") == 12
    prefill(manager, "b", prompt((0, 14)), extra_key="x")
    assert manager.metrics.cache_tokens == 12


def test_one_checkpoint_of_a_prefix_is_enough() -> None:
    manager = state_manager(state_params())
    contexts = [TextGenerationContext(name, prompt((0, 14))) for name in "ab"]
    for context in contexts:
        manager.claim(context.request_id)
    for _ in range(2):
        step_states(manager, *contexts)
    assert manager.state_metrics.checkpoints == 1
    assert manager.get_req_blocks("a")[:3] == manager.get_req_blocks("b")[:3]


def test_a_reset_forgets_states() -> None:
    manager = state_manager(state_params())
    prefill(manager, "a", prompt((0, 14)))
    manager.reset_prefix_cache()
    assert manager.match_prefix(prompt((0, 14))) == 0
    assert manager.state_metrics.checkpoints == 0


def test_replicas_and_shards_have_states_of_their_own() -> None:
    params = state_params(n_devices=4, data_parallel_degree=2, n_kv_heads=2)
    manager = state_manager(params, devices=["cpu"] * 4)
    assert [a.shape for a in manager.states[0]["ssm"]] == [(18, 2, 2, 2)] * 4
    for replica in (0, 1):
        for name in ("x", "y"):
            context = TextGenerationContext(name, prompt((0, 14)))
            manager.claim(name, replica)
            while context.end_idx == 14:
                inputs = manager.fetch([context])
                for device in (2 * replica, 2 * replica + 1):
                    slots = inputs[device].states
                    run_states(manager.states, slots, [context], device)
                context.update(1)
                manager.step([context])
            manager.release(name)
    assert manager.state_metrics.checkpoint_hits == 2
    assert manager.match_prefix(prompt((0, 14)), replica_idx=1) == 12


def test_pages_without_a_checkpoint_recommend_no_replica() -> None:
    params = state_params(n_devices=2, data_parallel_degree=2)
    manager = state_manager(params, devices=["cpu"] * 2, num_states=2, max_batch_size=4)
    for name in ("x", "y", "z"):
        context = TextGenerationContext(name, prompt((0, 14)) if name == "x" else [99])
        manager.claim(name, 1)
        first = context.end_idx
        while context.end_idx == first:  # runs its prompt in the manager's chunks
            manager.fetch([context])
            context.update(9)
            manager.step([context])
        if name == "x":
            manager.release(name)
        elif name == "y":
            asked = TextGenerationContext("asked", prompt((0, 14)))
            assert manager.get_or_recommend_replica(asked) == 1
    assert manager.match_prefix(prompt((0, 14)), replica_idx=1) == 0
    for name in ("y", "z"):
        manager.release(name)
    asked = TextGenerationContext("asked", prompt((0, 14)))
    assert manager.get_or_recommend_replica(asked) == 0


def test_copies_of_a_manager_without_arrays() -> None:
    groups = (FullAttention([0]), State([1], ARRAYS), State([2], ARRAYS, 8))
    manager = state_manager(state_params(*groups), blocks=None)
    assert manager.take_state_copies().shape == (0, 4)
    context = TextGenerationContext("a", prompt((0, 14)))
    manager.claim("a")
    copies = []
    while context.end_idx == 14:
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        copies += manager.take_state_copies().tolist()
    assert copies == [[0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 2], [0, 1, 0, 2]]
    again = TextGenerationContext("b", prompt((0, 14)))
    manager.claim("b")
    (inputs,) = manager.fetch([again])
    assert inputs.states[0].tolist() == [3]
    assert manager.take_state_copies().tolist() == [[0, 0, 2, 3], [0, 1, 2, 3]]
    assert manager.take_state_copies().dtype == np.int32


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_states": 3}, "num_states is 3, must be at least 4"),
    ({}, {"num_states": 0}, "num_states is 0, must be at least 4"),
    ({"groups": (FullAttention([0]),)}, {"num_states": 4}, "num_states is 4, must be left out"),
]


@pytest.mark.parametrize(("of_params", "of_manager", "text"), REFUSALS)
def test_refused_managers(of_params: dict[str, Any], of_manager: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        state_manager(state_params(**of_params), **of_manager)


def test_memory_holds_slots_beside_pages() -> None:
    params = state_params()
    room = 8 * params.bytes_per_state_slot + 5 * params.bytes_per_page
    given = {"num_pages": None, "available_cache_memory": room}
    assert state_manager(params, **given).total_num_pages == 5
    assert state_manager(params, **given, num_states=4).total_num_pages > 5
    with pytest.raises(CapacityError, match="8 slots for states"):
        state_manager(params, **(given | {"available_cache_memory": 300}))
