# SPDX-License-Identifier: Apache-2.0
"""Rules of groups that show after a few calls: the eviction order, and due checkpoints."""

from __future__ import annotations

import pytest

from grouped_traffic import manager_of, params_of
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.policies import BY_NAME
from state_model import prefill, prompt, state_manager, state_params, step_states

BY_USE = sorted(BY_NAME.keys() - {"fifo"})  # fifo evicts by age, and no use changes its order


def step(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    manager.fetch([context])
    context.update(7)
    manager.step([context])


def test_a_checkpoint_that_was_hit_is_no_branch() -> None:
    manager = state_manager(state_params())
    prefill(manager, "a", prompt((0, 14)))
    manager.release("a")
    context = prefill(manager, "b", prompt((0, 12), (500, 9)))
    assert manager.metrics.cache_tokens == 12
    manager.truncate("b", 0)
    context.rewind(1)
    context.extend(prompt((700, 15)))
    assert manager.reserve(context)
    assert (context.start_idx, context.active_idx) == (0, 16)


def test_a_touch_is_a_use_of_the_checkpoint() -> None:
    manager = state_manager(state_params(), num_states=4, max_batch_size=2)
    for first in (0, 100, 200):
        prefill(manager, "a", prompt((first, 9)))
        manager.release("a")
    assert manager.match_prefix(prompt((0, 9)), touch=True) == 8
    for name in "bc":  # takes two slots: the free slot and a checkpoint's slot
        manager.claim(name)
        assert manager.reserve(TextGenerationContext(name, [7]))
    assert [manager.match_prefix(prompt((first, 9))) for first in (0, 100, 200)] == [8, 0, 8]


def test_a_touch_is_a_use_of_the_windows() -> None:
    manager = manager_of(params_of(FullAttention([0]), SlidingWindow([1], 4)), num_pages=20)
    for name, first in (("a", 0), ("b", 100)):
        context = TextGenerationContext(name, prompt((first, 8)))
        manager.claim(name)
        step(manager, context)
        manager.release(name)
    assert manager.match_prefix(prompt((0, 8)), touch=True) == 8
    manager.claim("c")
    assert manager.reserve(TextGenerationContext("c", [7] * 15, active_idx=1))
    assert [manager.match_prefix(prompt((first, 8))) for first in (0, 100)] == [8, 0]


@pytest.mark.parametrize("is_fork", [False, True])
def test_windows_at_the_end_of_a_prompt_stay(is_fork: bool) -> None:
    """Window pages of a prompt's middle are evicted first, also if a fork has its own prompt."""
    manager = manager_of(params_of(FullAttention([0]), SlidingWindow([1], 4)), num_pages=40)
    parent = TextGenerationContext("a", prompt((0, 5)))
    manager.claim("a")
    step(manager, parent)
    child = TextGenerationContext("b", prompt((0, 20)))
    if is_fork:
        manager.fork("a", child)
    else:
        manager.claim("b")
    while child.end_idx < 40:
        step(manager, child)
    manager.release("a")
    manager.release("b")
    before = manager.group_metrics[1].holes
    manager.claim("c")
    assert manager.reserve(TextGenerationContext("c", [7] * 16))  # 8 full pages, 8 window pages
    assert manager.group_metrics[1].holes > before
    assert manager.match_prefix(prompt((0, 20))) == 20
    # The parent's prompt of 5 tokens ends before that position.
    assert manager.match_prefix(prompt((0, 12))) == (4 if is_fork else 0)


def test_a_reset_forgets_windows_that_nobody_reads() -> None:
    manager = manager_of(params_of(FullAttention([0]), SlidingWindow([1], 4)))
    context = TextGenerationContext("a", prompt((0, 20)))
    manager.claim("a")
    step(manager, context)
    assert manager.match_prefix(prompt((0, 12))) == 12
    free = manager.num_free_blocks
    assert not manager.reset_prefix_cache()
    assert manager.num_free_blocks == free
    full, window = manager.group_metrics
    assert (full.cached_pages, window.cached_pages, window.holes) == (0, 0, 0)
    assert (full.held_pages, window.held_pages) == (10, 2)
    assert manager.match_prefix(prompt((0, 20))) == 0


@pytest.mark.parametrize("eviction", BY_USE)
def test_prompts_go_in_their_order_once_their_answers_are_gone(eviction: str) -> None:
    """Pages after the last hit are evicted first, of any request; prompts keep their order."""
    params = params_of(FullAttention([0]), SlidingWindow([1], 8))
    manager = manager_of(params, num_pages=64, eviction=eviction)
    firsts = (0, 100, 200)
    for first in firsts:
        context = TextGenerationContext(first, prompt((first, 24)))
        manager.claim(first)
        for _ in range(20):
            step(manager, context)
        manager.release(first)
    large = TextGenerationContext("large", [7])
    manager.claim("large")
    gone: list[int] = []
    while len(gone) < len(firsts):
        assert manager.reserve(large)
        large.extend([7])
        lost = {first for first in firsts if manager.match_prefix(prompt((first, 23))) == 0}
        gone += sorted(lost - {*gone}, reverse=True)
    assert gone == [*firsts]


@pytest.mark.parametrize("eviction", BY_USE)
def test_what_no_checkpoint_follows_goes_first(eviction: str) -> None:
    """A hit ends at a checkpoint: tokens generated after a checkpoint serve no hit, however new."""
    manager = state_manager(state_params(), num_states=10, num_pages=24, eviction=eviction)
    prefill(manager, "old", prompt((0, 21)))
    manager.release("old")
    for name in "ab":
        context = prefill(manager, name, prompt((100, 21)))
        for _ in range(12):
            step_states(manager, context)
        manager.release(name)
    manager.claim("large")  # takes all free pages and evicts three
    assert manager.reserve(TextGenerationContext("large", prompt((500, 4 * 14))))
    assert [manager.match_prefix(prompt((first, 21))) for first in (0, 100)] == [20, 20]


def test_the_way_to_a_lost_checkpoint_goes_next() -> None:
    manager = state_manager(state_params(interval=8), num_states=12, num_pages=24)
    for name, first in (("a", 0), ("b", 100)):
        prefill(manager, name, prompt((first, 33)))  # checkpoints at 8, 16, 24 and 32
        manager.release(name)
    hits = []
    for pages in range(8, 17):  # each turn evicts one page more
        manager.claim("large")
        assert manager.reserve(TextGenerationContext("large", prompt((500, 4 * pages))))
        manager.release("large")
        hits.append([manager.match_prefix(prompt((first, 33))) for first in (0, 100)])
    assert hits == [[n, 32] for n in (32, 24, 24, 16, 16, 8, 8, 0, 0)]
