# SPDX-License-Identifier: Apache-2.0
"""Managers with state layers and a host tier: checkpoints move to the tier and back."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.pools import StateArrays
from state_model import (
    ARRAYS,
    prefill,
    prompt,
    run_states,
    state_manager,
    state_params,
    step_states,
)

TIER: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-4}


def tiered(*groups: Any, interval: int | None = None, **options: Any) -> PagedKVCacheManager:
    """Return a manager with few pages and slots on the device, and enough in the tier."""
    fields = {"num_pages": 20, "num_states": 5, "max_seq_len": 80}
    return state_manager(state_params(*groups, interval=interval, **TIER), **(fields | options))


def crowd_out(manager: PagedKVCacheManager) -> None:
    """Serve other prompts until the device holds only their pages."""
    for i in range(6):
        prefill(manager, f"crowd {i}", prompt((1000 * (i + 1), 30)))
        manager.release(f"crowd {i}")


def test_a_state_comes_back_with_its_pages() -> None:
    manager = tiered()
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    assert manager.state_metrics.host_checkpoints == 1
    crowd_out(manager)
    assert manager.match_prefix(prompt((0, 14))) == 0
    manager.reset_metrics()
    again = prefill(manager, "b", prompt((0, 14), (90, 3)))  # checks the state in its slot
    assert manager.metrics.cache_tokens == 12
    assert manager.metrics.h2d_blocks_copied == 3
    assert manager.state_metrics.loaded_checkpoints == manager.state_metrics.checkpoint_hits == 1
    step_states(manager, again)


def test_a_checkpoint_comes_back_alone() -> None:
    manager = tiered(num_pages=64)
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    for i in range(4):  # each request has a slot, but no checkpoint
        manager.claim(f"crowd {i}")
        assert manager.reserve(TextGenerationContext(f"crowd {i}", prompt((1000 * i, 3))))
    assert manager.state_metrics.checkpoints == 1
    manager.release("crowd 3")
    for i in range(4, 8):
        prefill(manager, f"crowd {i}", prompt((1000 * i, 6)))
        manager.release(f"crowd {i}")
    manager.reset_metrics()
    prefill(manager, "b", prompt((0, 14)))
    assert manager.metrics.cache_tokens == 12
    assert manager.metrics.h2d_blocks_copied == 0
    assert manager.state_metrics.loaded_checkpoints == 1


def test_every_device_of_every_replica_gets_its_part() -> None:
    params = state_params(
        FullAttention([0]), State([1], ARRAYS), n_kv_heads=2, n_devices=4, data_parallel_degree=2,
        **TIER,
    )  # fmt: skip
    manager = state_manager(
        params, devices=["cpu"] * 4, max_batch_size=8, num_pages=20, num_states=5, max_seq_len=80
    )

    def serve(name: str, tokens: list[int], replica: int) -> int:
        manager.claim(name, replica_idx=replica)
        context = TextGenerationContext(name, tokens)
        start = None
        while context.end_idx == len(tokens):
            inputs = manager.fetch([context])
            start = context.start_idx if start is None else start
            for shard in (0, 1):
                device = 2 * replica + shard
                slots = inputs[device].states
                for row, chunk in enumerate((context,)):
                    for name_of, arrays in manager.states[0].items():
                        state = arrays[device][slots[0][row]]
                        if chunk.start_idx > 0:
                            wanted = sum(tokens[: chunk.start_idx]) % 50 + device
                            assert set(np.unique(state)) == {wanted}, name_of
                        state[...] = sum(tokens[: chunk.active_idx]) % 50 + device
            context.update(9)
            manager.step([context])
        manager.release(name)
        assert start is not None
        return start

    for replica in (1, 0):
        assert serve("a", prompt((0, 14)), replica) == 0
        for i in range(6):
            serve("crowd", prompt((1000 * (i + 1), 30)), replica)
        assert manager.match_prefix(prompt((0, 14)), replica_idx=replica) == 0
        assert serve("b", prompt((0, 14)), replica) == 12
    assert manager.state_metrics.loaded_checkpoints == 2


def test_half_of_the_space_is_for_states() -> None:
    params = state_params(**TIER)
    space = int(1e-4 * 2**30)
    slot, page = params.bytes_per_state_slot, params.bytes_per_page
    manager = state_manager(params)
    assert manager.state_metrics.host_slots == space // 2 // slot
    assert manager.total_num_host_pages == (space - space // 2 // slot * slot) // page
    for asked in (0, 7):
        chosen = state_manager(params, num_host_states=asked)
        assert chosen.state_metrics.host_slots == asked
        assert chosen.total_num_host_pages == (space - asked * slot) // page


REFUSALS = [
    (TIER, 10**6, "num_host_states is 1000000, must be 0 .. .*swap_space_gb of 0.0001 holds"),
    (TIER, -1, "num_host_states is -1, must be 0"),
    ({}, 3, "num_host_states is 3, must be left out: enable_kvcache_swapping_to_host is off"),
    (TIER | {"groups": (FullAttention([0]),)}, 3, "must be left out: no group is a State"),
]


@pytest.mark.parametrize(("of_params", "num_host_states", "text"), REFUSALS)
def test_refused_slots(of_params: dict[str, Any], num_host_states: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        state_manager(state_params(**of_params), num_host_states=num_host_states)


def test_without_slots_in_the_tier_its_pages_serve_the_devices_checkpoints() -> None:
    manager = tiered(num_host_states=0)
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    assert manager.metrics.d2h_blocks_copied == 3
    assert manager.state_metrics.host_slots == 0
    crowd_out(manager)
    prefill(manager, "b", prompt((0, 14)))
    assert manager.metrics.cache_tokens == 0


def test_what_no_checkpoint_of_the_tier_follows_goes_first_there() -> None:
    params = state_params(**TIER | {"host_kvcache_swap_space_gb": (12 * 64 + 6 * 32) / 2**30})
    assert (params.bytes_per_page, params.bytes_per_state_slot) == (64, 32)
    manager = state_manager(params, num_pages=20, num_host_states=6)
    assert manager.total_num_host_pages == 12
    prefill(manager, "old", prompt((0, 21)))
    manager.release("old")
    context = prefill(manager, "long", prompt((100, 13)))
    for _ in range(16):
        step_states(manager, context)
    manager.release("long")  # seven pages, of which the checkpoint needs three
    assert manager.host_committed_block_pct == 1
    prefill(manager, "new", prompt((200, 17)))
    manager.release("new")
    manager.claim("large")  # takes the whole device
    assert manager.reserve(TextGenerationContext("large", prompt((500, 80))))
    manager.release("large")
    hits = []
    for first, n in ((0, 21), (100, 13), (200, 17)):
        manager.claim("asked")
        hits.append(manager.plan(TextGenerationContext("asked", prompt((first, n)))).hit_tokens)
        manager.release("asked")
    assert hits == [20, 12, 16]


def test_pages_whose_checkpoint_is_in_the_tier_alone_go_as_the_policy_says() -> None:
    manager = tiered(num_states=3, max_batch_size=2, num_pages=16, eviction="priority")
    prefill(manager, "a", prompt((0, 21)), priority=90)
    manager.release("a")
    prefill(manager, "b", prompt((100, 21)), priority=10)
    manager.release("b")
    for name in "cd":  # both take a slot, the second takes the first checkpoint's
        manager.claim(name)
        assert manager.reserve(TextGenerationContext(name, [7]))
    assert [manager.match_prefix(prompt((first, 21))) for first in (0, 100)] == [0, 20]
    manager.release("c")
    manager.claim("e")
    assert manager.reserve(TextGenerationContext("e", prompt((500, 32))))  # evicts three pages
    manager.release("e")
    manager.release("d")
    manager.reset_metrics()
    prefill(manager, "f", prompt((0, 21)))
    assert (manager.metrics.cache_tokens, manager.metrics.h2d_blocks_copied) == (20, 0)


def test_a_manager_without_arrays_has_no_tier() -> None:
    manager = state_manager(state_params(**TIER), blocks=None)
    assert manager.state_metrics.host_slots == 0
    assert manager.total_num_host_pages > 0  # the pages that the space would hold
    context = TextGenerationContext("a", prompt((0, 14)))
    manager.claim("a")
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    assert manager.take_state_copies().tolist() == [[0, 0, 0, 1]]


def test_what_fails_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = tiered()
    fails = True
    do_move = StateArrays.move

    def move(self: StateArrays, orders: Any) -> None:
        if fails:
            raise OSError("the bus is gone")
        do_move(self, orders)

    monkeypatch.setattr(StateArrays, "move", move)
    with caplog.at_level(logging.WARNING):
        prefill(manager, "a", prompt((0, 14)))
    assert "1 checkpoints of states were not stored in the host tier" in caplog.text
    manager.release("a")
    assert manager.state_metrics.host_checkpoints == 0
    fails = False
    prefill(manager, "b", prompt((0, 14)))
    manager.release("b")
    crowd_out(manager)
    fails = True
    context = TextGenerationContext("c", prompt((0, 14)))
    manager.claim("c")
    with pytest.raises(OSError, match="the bus is gone"):
        manager.fetch([context])
    assert (context.start_idx, context.active_idx) == (0, 14)
    fails = False
    step_states(manager, context)
    assert manager.metrics.cache_tokens == 12


def test_groups_count_what_went_to_the_tier_and_back() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 6), State([2], ARRAYS))
    manager = tiered(*groups, num_pages=40)
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    full, window = manager.group_metrics
    assert full.stored_pages == 3
    assert full.stored_pages + window.stored_pages == manager.metrics.d2h_blocks_copied
    crowd_out(manager)
    prefill(manager, "b", prompt((0, 14)))
    full, window = manager.group_metrics
    assert full.loaded_pages == 3
    assert window.loaded_pages == 2
    assert manager.metrics.h2d_blocks_copied == 5
    manager.reset_metrics()
    assert manager.group_metrics[0].loaded_pages == manager.group_metrics[1].stored_pages == 0


@pytest.mark.parametrize("seed", range(4))
def test_states_are_those_of_their_tokens_whatever_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    windows = (FullAttention([0]), SlidingWindow([1], 6), State([2], ARRAYS, 8))
    groups = windows if seed % 2 else ()
    manager = tiered(
        *groups, interval=[None, 8][seed // 2], num_pages=30, num_host_states=[None, 3][seed // 2]
    )
    prompts = [[rng.randrange(2) for _ in range(40)] for _ in range(3)]
    live: dict[int, TextGenerationContext] = {}

    def release() -> None:
        if live:
            name = rng.choice(list(live))
            live.pop(name)
            manager.release(name)

    for name in range(3000):
        verb = rng.random()
        try:
            if verb < 0.4 and len(live) < 4:
                tokens = [*rng.choice(prompts)[: rng.randrange(2, 40)], rng.randrange(3)]
                manager.claim(name)
                live[name] = TextGenerationContext(name, tokens)
                manager.reserve(live[name])
            elif verb < 0.8 and live:
                batch = rng.sample(list(live.values()), rng.randrange(1, len(live) + 1))
                (inputs,) = manager.fetch(batch)
                run_states(manager.states, inputs.states, batch)
                for context in batch:
                    context.update(rng.randrange(2))
                manager.step(batch)
            elif verb < 0.85 and 0 < len(live) < 4:
                parent = rng.choice(list(live.values()))
                written = parent.tokens[: parent.start_idx].tolist()
                child = TextGenerationContext(name, [*written, 1, 0])
                manager.fork(parent.request_id, child)
                live[name] = child
            elif verb < 0.9 and live:
                context = rng.choice(list(live.values()))
                n = max(1, context.start_idx // 4 * 4)
                manager.truncate(context.request_id, n)
                context.rewind(n)
            elif verb < 0.91:
                manager.reset_prefix_cache()
            else:
                release()
        except (InsufficientBlocksError, CapacityError, ValueError):
            release()
    while live:
        release()
    assert manager.state_metrics.loaded_checkpoints > 0
    assert manager.state_metrics.used_slots == 0
