# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of states: their positions, the hits they allow, and their eviction."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow, State
from state_model import ARRAYS, prefill, prompt, state_manager, state_params, step_states


def served(
    manager: PagedKVCacheManager, name: str, tokens: list[int], **options: Any
) -> tuple[int, list[int]]:
    """Run and release a prompt; return its hit and the ends of its chunks."""
    manager.claim(name)
    context = TextGenerationContext(name, tokens, **options)
    hit = 0
    ends: list[int] = []
    while context.end_idx == len(tokens):
        before = context.start_idx
        step_states(manager, context)
        if not ends:
            hit = manager.metrics.cache_tokens
            manager.reset_metrics()
        ends.append(min(context.start_idx, len(tokens)))
        assert ends[-1] > before
    manager.release(name)
    return hit, ends


def pages_of_16(interval: int | None = None) -> PagedKVCacheManager:
    return state_manager(state_params(page_size=16, interval=interval), num_states=20)


def test_prompts_that_share_three_pages_hit_a_checkpoint_there() -> None:
    manager = pages_of_16()
    assert served(manager, "a", prompt((0, 52))) == (0, [48, 52])  # a prompt's boundary is at 48
    assert served(manager, "b", prompt((0, 48), (500, 30))) == (48, [64, 78])


def test_else_they_hit_the_deepest_checkpoint_below() -> None:
    manager = pages_of_16(interval=32)
    assert served(manager, "a", prompt((0, 90))) == (0, [32, 64, 80, 90])
    # They share three pages, a checkpoint is at two. The next prompt finds a checkpoint at three.
    assert served(manager, "b", prompt((0, 48), (500, 30))) == (32, [48, 64, 78])
    assert served(manager, "c", prompt((0, 48), (700, 30))) == (48, [64, 78])


def test_prompts_that_share_two_pages_make_a_checkpoint_for_the_next_one() -> None:
    manager = pages_of_16()
    assert served(manager, "a", prompt((0, 70))) == (0, [64, 70])
    asked = TextGenerationContext("b", prompt((0, 32), (500, 30)))
    manager.claim("b")
    assert (manager.plan(asked).hit_tokens, manager.plan(asked).active_idx) == (0, 32)
    manager.release("b")
    assert served(manager, "b", prompt((0, 32), (500, 30))) == (0, [32, 48, 62])
    assert served(manager, "c", prompt((0, 32), (700, 30))) == (32, [48, 62])


@pytest.mark.parametrize("fewest", [True, 1, 3])
def test_no_hit_ends_inside_a_page(fewest: Any) -> None:
    """A state belongs to one token: no state fits the middle of a page that is copied in part."""
    groups = (FullAttention([0]), SlidingWindow([1], 6), State([2], ARRAYS))
    manager = state_manager(state_params(*groups), partial_page_reuse=fewest)
    served(manager, "a", prompt((0, 14)))
    asked = TextGenerationContext("b", prompt((0, 14)))
    manager.claim("b")
    plan = manager.plan(asked)
    assert (plan.hit_tokens, plan.copied_tokens) == (12, 0)
    assert manager.reserve(asked)
    assert (asked.start_idx, len(manager.take_copies())) == (12, 0)


def test_a_split_leaves_a_checkpoint_with_the_tokens_behind() -> None:
    manager = state_manager(state_params(), num_states=12)
    long = prompt((0, 20))
    served(manager, "a", long)
    served(manager, "b", prompt((0, 8), (500, 6)))  # cuts the run of 20 tokens at 8
    assert manager.match_prefix(long) == 16
    assert manager.match_prefix(prompt((0, 8), (700, 6))) == 8
    assert served(manager, "c", long)[0] == 16


def test_without_a_free_slot_there_is_no_checkpoint_and_nothing_fails() -> None:
    manager = state_manager(state_params(interval=4), num_states=4)
    contexts = [prefill(manager, name, prompt((100 * n, 10))) for n, name in enumerate("abcd")]
    assert manager.state_metrics.used_slots == 4
    for _ in range(6):
        step_states(manager, *contexts)
    assert manager.state_metrics.checkpoints == 0
    assert [c.end_idx for c in contexts] == [17] * 4
    manager.release("a")
    for _ in range(4):
        step_states(manager, *contexts[1:])
    assert manager.state_metrics.checkpoints == 1


def test_slots_in_use_stay_and_checkpoints_go_by_their_last_use() -> None:
    manager = state_manager(state_params(), num_states=4, max_batch_size=2)
    prompts = [prompt((100 * n, 9)) for n in range(3)]
    for n, tokens in enumerate(prompts):
        served(manager, f"r{n}", tokens)

    def found() -> list[int]:
        return [manager.match_prefix(tokens) for tokens in prompts]

    assert found() == [8, 8, 8]
    served(manager, "again", prompts[0])
    running = prefill(manager, "x", prompt((900, 3)))  # takes the fourth slot
    assert found() == [8, 8, 8]
    other = prefill(manager, "y", prompt((800, 3)))
    assert found() == [8, 0, 8]
    for _ in range(20):
        step_states(manager, running, other)  # each request finds its own state in its slot


def test_checkpoints_on_the_way_of_a_request_are_not_held_by_it() -> None:
    manager = state_manager(state_params(interval=4), num_states=5)
    context = prefill(manager, "a", prompt((0, 18)))
    tokens = prompt((0, 18))
    assert manager.state_metrics.checkpoints == 4
    for n, name in enumerate("bcd"):
        manager.claim(name)
        assert manager.reserve(TextGenerationContext(name, [900 + n]))
    assert manager.state_metrics.checkpoints == 1
    assert [manager.match_prefix(tokens[:n]) for n in (4, 8, 12, 18)] == [0, 0, 0, 16]
    _, pages = manager.match_prefix(tokens[:16], return_pages=True)
    assert manager.get_req_blocks("a")[:4] == pages.tolist()
    step_states(manager, context)


@pytest.mark.parametrize("blocks", ["allocate", None])
def test_slots_per_request_unless_said_otherwise(blocks: Any) -> None:
    for num_states, slots in ((None, 5 + 16), (7, 7)):
        manager = state_manager(
            state_params(), max_batch_size=5, num_states=num_states, blocks=blocks
        )
        assert manager.state_metrics.total_slots == slots
        assert len(manager.states) == (blocks is not None)


def test_pages_do_not_grow_with_states() -> None:
    """Slots are outside of the pool: a page is as large as without the recurrent layers."""
    huge = {"ssm": ((1000, 1000), "float32")}
    params = state_params(FullAttention([0]), State([1], huge))
    flat = KVCacheParams("float32", 1, 2, 1, page_size=4)
    assert params.bytes_per_page == flat.bytes_per_page
    assert params.bytes_per_state_slot == 4_000_000


def test_a_default_that_keeps_prompts_that_come_again() -> None:
    """6 prompts run in turn, one at a time: with one checkpoint no prompt was ever hit."""
    params = state_params(page_size=4)
    hits = {}
    for num_states in (2, None):
        manager = state_manager(params, max_batch_size=1, num_pages=400, num_states=num_states)
        for turn in range(60):
            prefill(manager, "r", prompt((100 * (turn % 6), 9), (1000 + 7 * turn, 5)))
            manager.release("r")
        hits[num_states] = manager.state_metrics.checkpoint_hits
        assert manager.state_metrics.evicted_checkpoints > 0
    assert hits[2] == 0
    assert hits[None] >= 40


def test_the_default_leaves_room_for_the_batch() -> None:
    """The batch that sizing computes still fits next to its slots."""
    params = state_params(FullAttention([0]), State([1], {"ssm": ((64,), "float32")}))
    for memory in (20_000, 100_000, 1_000_000):
        batch = PagedKVCacheManager.infer_optimal_batch_size(params, 64, 2, memory, ["cpu"])
        for size in range(1, batch + 1):
            manager = PagedKVCacheManager(params, size, 64, available_cache_memory=memory)
            assert manager.total_num_pages >= size * 16, (memory, size)
            slots = manager.state_metrics.total_slots
            assert 2 * size <= slots <= size + max(size, 16)
    large = PagedKVCacheManager(params, 20, 64, num_pages=10_000)
    assert large.state_metrics.total_slots == 40
    assert state_manager(params, max_draft_tokens=1).state_metrics.total_slots >= 12


def test_evicted_checkpoints_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = state_manager(state_params(), num_states=2, max_batch_size=1)
    for turn in range(12):
        if turn == 7:
            assert manager.state_metrics.evicted_checkpoints == 6
            assert "checkpoints of states were evicted" not in caplog.text
        prefill(manager, "r", prompt((100 * turn, 9)))
        manager.release("r")
    for _ in range(3):
        assert manager.state_metrics.evicted_checkpoints == 11
    assert caplog.text.count("11 checkpoints of states were evicted for others, and 0") == 1
    manager.reset_metrics()
    assert manager.state_metrics.evicted_checkpoints == 0
