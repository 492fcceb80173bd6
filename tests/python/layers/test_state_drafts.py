# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of models with states: states of rejected drafts are never read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from foreign_context import Context
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow, State
from state_model import ARRAYS, prefill, prompt, run_states, state_manager, state_params

CHECKS = pytest.mark.parametrize("checks", [True, False])


def draft_manager(drafts: int, **options: Any) -> PagedKVCacheManager:
    return state_manager(state_params(), max_draft_tokens=drafts, num_states=12, **options)


def run(manager: PagedKVCacheManager, *batch: Any) -> None:
    """Fetch and run a batch; a state that does not match the preceding tokens is an error."""
    (inputs,) = manager.fetch(list(batch))
    if manager.states:
        run_states(manager.states, inputs.states, list(batch))


def stands(context: Any) -> tuple[int, int, int, list[int]]:
    return context.start_idx, context.active_idx, context.end_idx, np.array(context.tokens).tolist()


def drafted(manager: PagedKVCacheManager, name: str, drafts: int) -> TextGenerationContext:
    """Run a prompt of 14 tokens, sample a token, and run drafts after it."""
    context = prefill(manager, name, prompt((0, 14)))
    context.extend(list(range(70, 70 + drafts)))
    run(manager, context)
    return context


# -- refused ---------------------------------------------------------------------------------------
@CHECKS
def test_without_max_draft_tokens_a_rejection_is_refused(checks: bool) -> None:
    manager = state_manager(state_params(), enable_runtime_checks=checks)
    context = drafted(manager, "a", 3)
    context.rewind(16)
    context.update(5)
    manager.step([context])
    before = stands(context), manager.num_free_blocks, manager.state_metrics, manager.metrics
    for verb in (manager.plan, manager.reserve, lambda c: manager.fetch([c])):
        with pytest.raises(ValueError, match=r"start_idx is 16, .* that of token 18.*max_draft"):
            verb(context)
    assert before == (
        stands(context),
        manager.num_free_blocks,
        manager.state_metrics,
        manager.metrics,
    )
    manager.truncate("a", 12)  # the checkpoint of the request's prompt
    context.rewind(13)
    run(manager, context)


@CHECKS
def test_the_same_tokens_do_not_run_twice_from_one_state(checks: bool) -> None:
    """The drafts are rejected before `update` moves the request: start_idx is unchanged."""
    manager = state_manager(state_params(), enable_runtime_checks=checks)
    context = drafted(manager, "a", 3)
    context.rewind(15)
    before = stands(context), manager.state_metrics
    with pytest.raises(ValueError, match=r"start_idx is 14, as when .* up to 18 may be in its"):
        manager.fetch([context])
    assert before == (stands(context), manager.state_metrics)
    other = prefill(manager, "b", prompt((200, 6)))
    free = manager.num_free_blocks
    with pytest.raises(ValueError, match="start_idx is 14"):
        manager.fetch([other, context])  # does nothing for the other request
    assert manager.num_free_blocks == free
    run(manager, other)


def test_fewer_steps_than_fetched_are_refused() -> None:
    """The engine takes two tokens of a run of four steps: the state belongs to the fourth."""
    manager = state_manager(state_params())
    context = prefill(manager, "a", prompt((0, 14)))
    manager.fetch([context], 4)
    for token in (5, 6):
        context.update(token)
    manager.step([context])
    with pytest.raises(ValueError, match=r"start_idx is 16, .* that of token 18"):
        manager.fetch([context])


def test_more_drafts_than_are_kept_for_are_refused() -> None:
    manager = draft_manager(2)
    context = drafted(manager, "a", 7)  # 8 tokens; 2 * 2 accepted tokens, the next and 2 drafts fit
    context.rewind(16)
    context.update(5)
    manager.step([context])
    with pytest.raises(ValueError, match="that of token 22"):
        manager.fetch([context])


def test_no_checkpoint_is_made_of_rejected_tokens() -> None:
    manager = state_manager(state_params(interval=4), num_states=12)
    context = prefill(manager, "a", prompt((0, 10)))
    context.extend([70])
    run(manager, context)  # 10 and 11, where a checkpoint is due
    context.rewind(11)
    context.update(9)
    manager.step([context])
    assert manager.match_prefix(context.tokens) == 8


# -- restored --------------------------------------------------------------------------------------
@CHECKS
@pytest.mark.parametrize("blocks", ["allocate", None])
@pytest.mark.parametrize("accepts", [True, False])
def test_a_request_goes_on_from_the_kept_state(checks: bool, blocks: Any, accepts: bool) -> None:
    manager = draft_manager(3, enable_runtime_checks=checks, blocks=blocks)
    context = drafted(manager, "a", 3)
    assert (context.start_idx, context.active_idx) == (14, 18)
    if accepts:
        manager.accept(context, 16)
    else:
        context.rewind(16)
    context.update(5)
    manager.step([context])
    assert stands(context)[:3] == (16, 17, 17)
    context.extend([80, 81, 82])
    run(manager, context)
    assert stands(context)[:3] == (14, 20, 20)  # 14 and 15 run again with the next tokens
    context.update(6)
    manager.step([context])
    run(manager, context)
    assert stands(context)[:3] == (20, 21, 21)


def test_what_was_accepted_runs_alone_once_it_is_long() -> None:
    manager = draft_manager(2)
    context = prefill(manager, "a", prompt((0, 14)))
    seen = []
    for token in range(40, 46):
        context.extend([70, 71])
        run(manager, context)
        seen.append(stands(context)[:3])
        if context.active_idx == context.end_idx:
            context.rewind(context.end_idx - 1)  # accepts 1 of 2 drafts
        context.update(token)
        manager.step([context])
        context.rewind(context.start_idx + 1)  # also removes drafts that did not run
    # 14 .. 16 ran, 14 and 15 are accepted. 4 accepted tokens run again with the drafts, 6 without.
    assert seen[:5] == [(14, 17, 17), (14, 19, 19), (14, 21, 21), (14, 20, 23), (20, 23, 23)]


def test_a_run_that_failed_is_fetched_again() -> None:
    manager = draft_manager(3)
    context = drafted(manager, "a", 3)
    run(manager, context)
    assert stands(context)[:3] == (14, 18, 18)
    context.update(9)
    manager.step([context])
    run(manager, context)


def test_reserving_ahead_leaves_a_run_alone() -> None:
    """Between fetch and step the run may be in flight, so its slot is not written."""
    manager = draft_manager(3)
    context = drafted(manager, "a", 3)
    assert manager.reserve(context, 3)
    assert manager.plan(context).fits
    context.update(9)
    manager.step([context])
    run(manager, context)


def test_prompts_in_short_chunks_go_back_to_token_0() -> None:
    manager = draft_manager(3)
    context = TextGenerationContext("a", [1, 2, 3, 4])
    manager.claim("a")
    run(manager, context)
    context.rewind(2)
    context.update(7)
    manager.step([context])
    run(manager, context)
    assert stands(context)[:3] == (0, 3, 3)


def test_pages_are_cached_as_far_as_the_state_stands() -> None:
    """Tokens that run again are written again, so no other request has their pages yet."""
    manager = draft_manager(3, num_pages=9)
    context = drafted(manager, "a", 3)
    context.rewind(17)
    context.update(5)
    manager.step([context])  # 17 tokens are written, in four whole pages
    assert manager.num_cached_blocks == 3
    used = 9 - manager.num_free_blocks
    run(manager, context)
    assert 9 - manager.num_free_blocks == used
    assert len(manager.take_copies()) == 0
    context.update(6)
    manager.step([context])
    assert manager.num_cached_blocks == 4


def test_forks_begin_with_the_kept_state() -> None:
    manager = draft_manager(3)
    context = drafted(manager, "a", 3)
    context.rewind(16)
    context.update(5)
    manager.step([context])
    child = TextGenerationContext("b", [*context.tokens[:14], 60])
    manager.fork("a", child)
    run(manager, child, context)
    assert (child.start_idx, context.start_idx) == (14, 14)


def test_truncation_to_what_ran_behind_the_kept_state() -> None:
    manager = draft_manager(3)
    context = drafted(manager, "a", 3)
    with pytest.raises(ValueError, match="'a' cannot be truncated to 13 tokens"):
        manager.truncate("a", 13)
    for n in (18, 17, 15, 14):
        manager.truncate("a", n)
    context.rewind(15)
    run(manager, context)
    manager.truncate("a", 12)  # to a checkpoint: the kept state belongs to other tokens now
    context.rewind(13)
    context.extend([90, 91, 92])
    run(manager, context)
    assert stands(context)[:2] == (12, 16)


def test_slots_of_kept_states() -> None:
    manager = state_manager(state_params(), max_draft_tokens=3)
    contexts = [drafted(manager, name, 2) for name in "abcd"]
    assert manager.state_metrics.used_slots == 8
    for context in contexts:
        manager.release(context.request_id)
    assert manager.state_metrics.used_slots == 0
    few = state_manager(state_params(), max_draft_tokens=3, num_states=7)
    context = drafted(few, "a", 3)  # keeps no state if not every request could have one
    assert few.state_metrics.used_slots == 1
    context.rewind(16)
    context.update(5)
    few.step([context])
    with pytest.raises(ValueError, match="with two num_states for each request, keeps the state"):
        few.fetch([context])


def test_without_a_slot_drafts_wait() -> None:
    manager = state_manager(state_params(), max_draft_tokens=2, num_states=2, max_batch_size=1)
    context = prefill(manager, "a", prompt((0, 13)))
    context.extend([70])
    with manager.pin(prompt((0, 13))):  # the prompt's checkpoint has the second slot
        assert not manager.plan(context).fits
        assert not manager.reserve(context)
    run(manager, context)
    assert manager.state_metrics.evicted_checkpoints == 1


def test_states_beside_windows() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 6), State([2, 3], ARRAYS))
    manager = state_manager(state_params(*groups), max_draft_tokens=3, num_states=12)
    context = drafted(manager, "a", 3)
    for token in range(40, 60):
        manager.accept(context, context.start_idx + 1)
        context.update(token)
        manager.step([context])
        context.extend([70, 71, 72])
        run(manager, context)


def test_windows_that_were_left_behind_the_kept_state_are_refused() -> None:
    """The engine declared the run's tokens unread, so no token of the run can run again."""
    groups = (FullAttention([0]), SlidingWindow([1], 2), State([2, 3], ARRAYS))
    manager = state_manager(
        state_params(*groups, page_size=1), max_draft_tokens=3, num_states=12, keep_windows=True
    )
    context = drafted(manager, "a", 3)
    for n in (17, 20):
        context.rewind(n)
        context.update(5)
        manager.step([context])
        if n == 17:
            context.extend([70, 71, 72])
            run(manager, context)
    manager.leave_windows("a", 20)
    before = stands(context)
    with pytest.raises(ValueError, match="start_idx 14 lies where windows have given their pages"):
        manager.fetch([context])
    assert before == stands(context)


# -- accept ----------------------------------------------------------------------------------------
class Foreign(Context):
    """A context in plain Python."""


@pytest.mark.parametrize("foreign", [False, True])
def test_accept_truncates_and_rewinds(foreign: bool) -> None:
    params = state_params(groups=None, num_layers=1)
    manager = state_manager(params)
    kind: Any = Foreign if foreign else TextGenerationContext
    context = kind("a", prompt((0, 10)))
    manager.claim("a")
    manager.fetch([context])
    context.update(9)
    manager.step([context])
    context.extend([70, 71, 72])
    manager.fetch([context])
    before = stands(context), manager.get_req_blocks("a")
    for n in (0, -1, 15, 2**40):
        with pytest.raises(ValueError, match=f"'a' cannot accept {n} tokens, must be 1 .. 14"):
            manager.accept(context, n)
    wrongs: list[Any] = ["3", 1.5, None]
    for wrong in wrongs:
        with pytest.raises(TypeError):
            manager.accept(context, wrong)
    assert before == (stands(context), manager.get_req_blocks("a"))
    manager.accept(context, 12)
    assert stands(context) == (10, 12, 12, [*prompt((0, 10)), 9, 70])
    assert len(manager.get_req_blocks("a")) == 3
    stranger = kind("b", [1, 2, 3])
    with pytest.raises(ValueError, match="'b'"):
        manager.accept(stranger, 2)
    assert stranger.end_idx == 3


def test_what_truncate_refuses_accept_refuses() -> None:
    manager = state_manager(state_params())
    context = drafted(manager, "a", 3)
    before = stands(context)
    with pytest.raises(ValueError, match="'a' cannot be truncated to 16 tokens"):
        manager.accept(context, 16)
    assert before == stands(context)
    manager.accept(context, 18)
    context.update(3)
    manager.step([context])
    run(manager, context)


# -- traffic ---------------------------------------------------------------------------------------
class Traffic:
    """Random requests that decode with drafts and accept any number of them."""

    def __init__(self, manager: PagedKVCacheManager, drafts: int, rng: random.Random) -> None:
        self.manager, self.drafts, self.rng = manager, drafts, rng
        self.live: list[TextGenerationContext] = []

    def turn(self, name: str) -> None:
        rng = self.rng
        if len(self.live) < 3 and rng.random() < 0.5:
            tokens = prompt((0, rng.randint(1, 20)), (50 * rng.randint(1, 3), 3))
            self.manager.claim(name)
            self.live.append(TextGenerationContext(name, tokens))
        batch = [context for context in self.live if rng.random() < 0.8]
        for context in batch:
            if context.active_idx == context.end_idx == context.start_idx + 1:
                context.extend([rng.randrange(9) for _ in range(rng.randint(0, self.drafts))])
        run(self.manager, *batch)
        for context in batch:
            self.sample(context)
        self.manager.step(batch)
        for context in batch:
            self.leave_or_fork(context, name)

    def sample(self, context: TextGenerationContext) -> None:
        if context.active_idx == context.end_idx and context.start_idx > 0:
            least = max(context.start_idx + 1, context.end_idx - self.drafts)
            n = self.rng.randint(least, context.end_idx)
            if self.rng.random() < 0.5:
                self.manager.accept(context, n)
            else:
                context.rewind(n)
        context.update(self.rng.randrange(9))

    def leave_or_fork(self, context: TextGenerationContext, name: str) -> None:
        if self.rng.random() < 0.1 or context.end_idx > 90:
            self.manager.release(context.request_id)
            self.live.remove(context)
        elif self.rng.random() < 0.1 and len(self.live) < 4:
            child = TextGenerationContext(
                f"{name}/{context.request_id}", [*context.tokens[: context.start_idx], 3]
            )
            self.manager.fork(context.request_id, child)
            self.live.append(child)


@pytest.mark.parametrize("seed", range(12))
def test_random_rounds_of_drafts(seed: int) -> None:
    """Each state is checked at its use, also for prefix hits, forks, and after truncations."""
    rng = random.Random(seed)
    drafts = rng.randint(1, 4)
    groups: list[Any] = [FullAttention([0]), State([1, 2], ARRAYS, rng.choice([None, 4, 8]))]
    if rng.random() < 0.3:
        groups.append(SlidingWindow([3], rng.randint(2, 9)))
    slots = rng.choice([8, 14])
    params = state_params(*groups)
    manager = state_manager(params, num_pages=120, max_draft_tokens=drafts, num_states=slots)
    traffic = Traffic(manager, drafts, rng)
    for turn in range(120):
        traffic.turn(f"r{turn}")
    for context in traffic.live:
        manager.release(context.request_id)
    assert manager.state_metrics.used_slots == 0
