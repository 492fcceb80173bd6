# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state: failed copies, the core by itself, the scheduler, random traffic."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore._core import CacheConfig
from kvcore.native.engine import CacheCore
from kvcore.pools import StateArrays
from kvcore.scheduler import Request, Scheduler
from kvcore.stores import MemoryStore
from state_model import (
    digest,
    fields_of,
    prefill,
    prompt,
    run_states,
    state_manager,
    state_params,
    step_states,
)


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


def test_a_manager_without_arrays_owes_its_copies() -> None:
    manager = state_manager(
        state_params(interval=8), num_pages=16, max_batch_size=2, num_states=4, blocks=None
    )
    context = TextGenerationContext("a", prompt((0, 10)))
    manager.claim("a")
    assert manager.reserve(context)
    assert (context.start_idx, context.active_idx) == (0, 8)
    (inputs,) = manager.fetch([context])
    assert inputs.states[0].tolist() == [0]
    context.update(1)
    manager.step([context])
    assert manager.take_state_copies().tolist() == [[0, 0, 0, 1]]
    found = manager.state_metrics
    assert (found.total_slots, found.used_slots, found.checkpoints) == (4, 1, 1)
    assert (found.available_slots, found.checkpoints_made) == (3, 1)


def test_the_cache_refuses_fewer_slots_than_requests() -> None:
    sizes = {"num_pages": 8, "page_size": 4, "max_sequences": 2, "max_seq_len": 64}
    config = CacheConfig(**sizes, states=[0], num_state_slots=1)
    with pytest.raises(ValueError, match="num_states is 1, must be at least 2"):
        CacheCore(config)


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
    """Random requests over a few prompts on one thread; each state is checked at its use."""

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


@pytest.mark.parametrize("interval", [None, 8])
def test_random_traffic_with_stores(interval: int | None) -> None:
    stores = [MemoryStore(2000), MemoryStore(1 << 22)]
    for _ in range(2):  # the second manager loads the first manager's pages
        manager = state_manager(state_params(interval=interval), num_pages=24, tiers=stores)
        Traffic(manager, "a", 7).run(300)
        manager.flush(timeout=60)
        found = manager.tier_metrics["memorystore-2"]
        assert found.corrupt == found.errors == 0
        loaded = manager.state_metrics.loaded_checkpoints
        manager.close()
    assert found.hits > 0
    assert loaded > 0


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
