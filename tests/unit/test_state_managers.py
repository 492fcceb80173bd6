# SPDX-License-Identifier: Apache-2.0
"""Managers with layers that keep a state: slots, checkpoints, hits, what is copied when."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvcore import (
    CacheManager,
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.scheduler import Request, Scheduler
from kvcore.states import StateArrays
from state_model import (
    ARRAYS,
    digest,
    fields_of,
    prefill,
    run_states,
    state_manager,
    state_params,
    step_states,
)


def prompt(*parts: tuple[int, int]) -> list[int]:
    return [first + i for first, n in parts for i in range(n)]


def test_states_have_a_slot_for_each_request_and_one_more() -> None:
    manager = state_manager(state_params())
    (group,) = manager.states
    assert {name: [a.shape for a in arrays] for name, arrays in group.items()} == {
        "conv": [(8, 2, 3)],
        "ssm": [(8, 2, 2, 2)],
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
    step_states(manager, last)  # takes the checkpoint's slot over
    assert manager.metrics.cache_tokens == 12


def test_preempted_requests_go_on_from_a_checkpoint() -> None:
    manager = state_manager(state_params(interval=4))
    context = prefill(manager, "a", prompt((0, 10)))
    for _ in range(7):
        step_states(manager, context)
    tokens = context.tokens.tolist()
    manager.release("a")
    again = prefill(manager, "a", tokens)
    assert manager.metrics.cache_tokens == 16
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
    assert [a.shape for a in manager.states[0]["ssm"]] == [(4, 2, 2, 2)] * 4
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
    (
        {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.001},
        {},
        "must be 0 with states",
    ),
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


class CopyError(Exception):
    pass


def fail(*_: Any) -> None:
    raise CopyError


def test_a_hit_whose_copy_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = state_manager(state_params())
    prefill(manager, "a", prompt((0, 14)))
    context = TextGenerationContext("b", prompt((0, 14)))
    manager.claim("b")
    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "run", fail)
        with pytest.raises(CopyError):
            manager.reserve(context)
    assert (context.start_idx, context.active_idx) == (0, 14)
    assert manager.state_metrics.used_slots == 1
    step_states(manager, context)
    assert manager.metrics.cache_tokens == 12


def test_a_checkpoint_whose_copy_fails_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = state_manager(state_params(interval=4))
    manager.claim("a")
    context = TextGenerationContext("a", prompt((0, 10)))
    monkeypatch.setattr(StateArrays, "run", fail)
    step_states(manager, context)
    assert "1 checkpoints of states were not made" in caplog.text
    assert manager.state_metrics.checkpoints == 0
    monkeypatch.undo()
    step_states(manager, context)
    assert manager.match_prefix(prompt((0, 10))) == 8


def test_a_fork_whose_copy_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = state_manager(state_params())
    parent = prefill(manager, "a", prompt((0, 14)))
    child = TextGenerationContext("c", [*parent.tokens[:14], 5])
    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "run", fail)
        with pytest.raises(CopyError):
            manager.fork("a", child)
    assert not manager.contains("c")
    assert (child.start_idx, manager.state_metrics.used_slots) == (0, 1)
    manager.fork("a", child)
    step_states(manager, child, parent)


def test_a_truncation_whose_copy_fails_is_copied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = state_manager(state_params())
    context = prefill(manager, "a", prompt((0, 14)))
    with monkeypatch.context() as patch:
        patch.setattr(StateArrays, "run", fail)
        with pytest.raises(CopyError):
            manager.truncate("a", 12)
    context.rewind(13)
    step_states(manager, context)


def test_the_core_by_itself() -> None:
    core = CacheManager(
        num_blocks=16, page_size=4, max_sequences=2, max_seq_len=64, states=[0, 8], num_states=4
    )
    first = core.claim()
    assert core.state_of(first) == -1
    tokens = prompt((0, 10))
    assert core.reserve(first, tokens) == (True, 0, 8)
    assert core.plan(first, tokens).active == 8
    assert core.state_of(first) == 0
    core.commit(first, tokens, 8)
    assert core.take_state_copies().tolist() == [[0, 0, 1]]
    stats = core.state_stats()
    assert (stats.total_slots, stats.used_slots, stats.checkpoints) == (4, 1, 1)
    assert (stats.available_slots, stats.checkpoints_made) == (3, 1)
    core.check_integrity()
    with pytest.raises(ValueError, match="num_states is 1, must be at least 2"):
        CacheManager(
            num_blocks=8, page_size=4, max_sequences=2, max_seq_len=64, states=[0], num_states=1
        )


def test_the_scheduler_runs_what_was_cut() -> None:
    manager = state_manager(state_params(interval=8), num_pages=40, max_batch_size=4)
    scheduler = Scheduler(manager, max_batch_tokens=12, num_steps=2)
    common = prompt((0, 9))
    requests = [
        Request(TextGenerationContext(f"r{i}", common + prompt((100 * i, 3 + 2 * i))), 9)
        for i in range(6)
    ]
    heirs = [Request(TextGenerationContext(f"s{i}", requests[0].context.tokens), 5) for i in (0, 1)]
    requests[0].siblings.extend(heirs)
    for request in requests:
        scheduler.add(request)
    while batch := scheduler.next_batch():
        (inputs,) = batch.inputs
        run_states(manager.states, inputs.states, list(batch.contexts))
        for field in fields_of(manager.states, 0):
            for row, context in enumerate(batch.contexts):
                tokens = [*context.tokens[: context.active_idx], *[3] * (batch.num_steps - 1)]
                field[inputs.states[0][row]] = digest(tokens)
        scheduler.update(batch, np.full((batch.num_steps, len(batch.requests)), 3))
    assert all(request.finish_reason == "length" for request in requests + heirs)
    assert manager.state_metrics.checkpoint_hits > 0
    assert manager.state_metrics.used_slots == 0


class Traffic:
    """Random requests of a thread over a few prompts, each state checked when it is used."""

    def __init__(self, manager: PagedKVCacheManager, name: str, seed: int) -> None:
        self.manager, self.name, self.random = manager, name, random.Random(seed)
        self.live: list[TextGenerationContext] = []
        self.count = 0

    def act(self) -> None:
        dice = self.random.random()
        if not self.live or (dice < 0.15 and len(self.live) < 2):
            return self.claim()
        context = self.random.choice(self.live)
        if dice < 0.7:
            return self.step(context)
        if dice < 0.8:
            return self.fork(context)
        if dice < 0.9:
            return self.truncate(context)
        return self.drop(context)

    def claim(self) -> None:
        self.count += 1
        rest = [self.random.randrange(3) for _ in range(self.random.randrange(1, 9))]
        tokens = prompt((10 * self.random.randrange(2), self.random.randrange(1, 20))) + rest
        context = TextGenerationContext(f"{self.name}{self.count}", tokens)
        self.manager.claim(context.request_id)
        self.live.append(context)

    def step(self, context: TextGenerationContext) -> None:
        try:
            step_states(self.manager, context, token=self.random.randrange(3))
        except InsufficientBlocksError:
            self.drop(context)
        else:
            if context.end_idx > 60:
                self.drop(context)

    def fork(self, context: TextGenerationContext) -> None:
        if len(self.live) > 1 or context.start_idx == 0:
            return
        self.count += 1
        tokens = [*context.tokens[: context.start_idx], self.random.randrange(3)]
        child = TextGenerationContext(f"{self.name}{self.count}", tokens)
        try:
            self.manager.fork(context.request_id, child)
        except (CapacityError, ValueError):
            return
        self.live.append(child)

    def truncate(self, context: TextGenerationContext) -> None:
        n = self.random.randrange(context.start_idx + 1) // 4 * 4
        try:
            self.manager.truncate(context.request_id, n)
        except ValueError:
            return
        if n < context.start_idx:
            context.rewind(n + 1)

    def drop(self, context: TextGenerationContext) -> None:
        self.live.remove(context)
        self.manager.release(context.request_id)

    def run(self, n: int) -> None:
        for _ in range(n):
            self.act()
        for context in list(self.live):
            self.drop(context)


@pytest.mark.parametrize("options", [{"num_states": 4}, {}, {"num_pages": 24}, {"dedup": False}])
@pytest.mark.parametrize("interval", [None, 8])
def test_random_traffic(options: dict[str, Any], interval: int | None) -> None:
    manager = state_manager(state_params(interval=interval), **options)
    Traffic(manager, "a", 7).run(400)
    assert manager.state_metrics.used_slots == 0
    assert manager.state_metrics.checkpoint_hits > 0 or options == {"num_states": 4}


def test_threads_share_checkpoints() -> None:
    params = state_params(interval=8)
    manager = state_manager(
        params, max_batch_size=16, num_pages=160, num_states=24, enable_runtime_checks=False
    )
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            Traffic(manager, f"t{seed}-", seed).run(150)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    manager.check_integrity()
    assert manager.state_metrics.used_slots == 0
    assert manager.state_metrics.checkpoint_hits > 0


def test_slots_keep_what_the_model_left_there() -> None:
    manager = state_manager(state_params())
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    for field in fields_of(manager.states, 0):
        field[...] = 77
    (inputs,) = manager.fetch([context])
    assert inputs.cache_lengths.tolist() == [0]
    for field in fields_of(manager.states, 0):
        assert np.all(field[inputs.states[0][0]] == 77)
    assert digest([]) == 0
