# SPDX-License-Identifier: Apache-2.0
"""Hints of requests when their sessions return, and the policy "hinted"."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

from builders import make_manager
from foreign_context import Context
from kvcore import RequestNotFoundError, TextGenerationContext
from kvcore.policies import BY_NAME
from retained_prompts import Clock, lost, serve

A, B, C, D = [1, 11], [2, 12], [3, 13], [4, 14]

_names = itertools.count()


def manager(clock: Any = None, **rest: Any) -> Any:
    settings: dict[str, Any] = {"page_size": 1, "num_pages": 12, "eviction": "hinted"}
    settings |= {} if clock is None else {"clock": clock}
    return make_manager(**settings | rest)


def run(mgr: Any, prompt: list[int], **rest: Any) -> TextGenerationContext:
    """Claim a request and compute its prompt and one token; the caller releases it."""
    context = TextGenerationContext(f"hint {next(_names)}", prompt, **rest)
    mgr.claim(context.request_id)
    assert mgr.reserve(context)
    context.update(7)
    mgr.step([context])
    return context


def test_closed_sessions_go_first_and_the_nearest_return_last() -> None:
    mgr = manager()
    for prompt, hint in ((A, "soon"), (B, "never"), (C, None), (D, "later")):
        serve(mgr, prompt, returns_in=hint)
    assert lost(mgr, [A, B, C, D], 4) == [1, 2, 3, 0]


def test_words_are_seconds() -> None:
    mgr = manager(Clock())
    for prompt, hint in ((A, 599.9), (B, "later"), (C, 60.1), (D, "soon")):
        serve(mgr, prompt, returns_in=hint)
    assert lost(mgr, [A, B, C, D], 4) == [1, 0, 2, 3]


def test_other_policies_ignore_hints() -> None:
    for eviction in sorted(BY_NAME.keys() - {"hinted"}):
        mgr = manager(Clock(), eviction=eviction)
        serve(mgr, A, returns_in="soon")
        serve(mgr, B, returns_in="never")
        assert lost(mgr, [A, B], 2) == [0, 1]


def test_without_hints_it_is_lru() -> None:
    mgr = manager()
    for prompt in (A, B, C, A):
        serve(mgr, prompt, priority=90)
    assert lost(mgr, [A, B, C], 3) == [1, 2, 0]


def test_a_hint_may_change_until_the_release() -> None:
    mgr = manager()
    serve(mgr, A)
    context = run(mgr, B, returns_in="soon")
    context.returns_in = "never"
    assert context.returns_in == "never"
    mgr.release(context.request_id)
    context = run(mgr, C, returns_in="never", priority=20, tenant="one")
    context.returns_in = None
    assert (context.returns_in, context.priority, context.tenant) == (None, 20, "one")
    mgr.release(context.request_id)
    context = run(mgr, D, returns_in="soon")
    with pytest.raises(ValueError, match="returns_in is 'now'"):
        context.returns_in = "now"  # type: ignore[assignment]
    assert context.returns_in == "soon"
    mgr.release(context.request_id)
    assert lost(mgr, [A, B, C, D], 4) == [1, 0, 2, 3]


def test_release_closes_a_session() -> None:
    mgr = manager()
    serve(mgr, A)
    context = run(mgr, B, returns_in="soon")
    mgr.release(context.request_id, returns_in="never")
    context = run(mgr, C)
    mgr.release(context.request_id, returns_in=30)
    assert lost(mgr, [A, B, C], 3) == [1, 0, 2]


def test_a_release_without_a_hint_uses_up_the_hint() -> None:
    mgr = manager(Clock())
    for prompt, hint in ((A, "later"), (B, None), (A, None), (C, None)):
        serve(mgr, prompt, returns_in=hint)
    assert lost(mgr, [A, B, C], 3) == [1, 0, 2]


def test_a_context_gives_its_hint_at_each_release() -> None:
    mgr = manager(Clock())
    context = run(mgr, A, returns_in="later")
    mgr.release(context.request_id)
    serve(mgr, B)
    context.start_idx = 0
    mgr.claim(context.request_id)
    assert mgr.reserve(context)
    mgr.release(context.request_id)
    assert lost(mgr, [A, B], 2) == [1, 0]


def test_a_session_that_returns_early_can_be_closed() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, returns_in=50)
    serve(mgr, B, returns_in=500)
    clock.now = 10
    serve(mgr, A, returns_in="never")
    assert lost(mgr, [A, B], 2) == [0, 1]


def test_a_shared_prefix_keeps_the_earliest_return() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, [5, 6, 1], returns_in=20)
    serve(mgr, [5, 6, 2], returns_in="never")
    serve(mgr, [5, 6, 3], returns_in=60)
    serve(mgr, A, returns_in=40)
    # Page 5 and page 6 return after 20 seconds.
    assert lost(mgr, [[5, 6, 1], [5, 6, 2], [5, 6, 3], A], 4) == [1, 2, 3, 0]


def test_a_return_that_is_over_counts_no_more() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, returns_in=10)
    serve(mgr, B)
    serve(mgr, C, returns_in=20)
    clock.now = 15.0  # the return of A and the grace of 5 seconds
    assert lost(mgr, [A, B, C], 1) == [1]
    clock.now = 15.1
    assert lost(mgr, [A, C], 2) == [0, 1]


def test_a_clock_that_goes_back_changes_nothing() -> None:
    clock = Clock()
    mgr = manager(clock)
    clock.now = 100.0
    serve(mgr, A, returns_in=10)
    clock.now = 0.0
    serve(mgr, B, returns_in=5)  # at 105, since the time stays 100
    serve(mgr, C)
    assert lost(mgr, [A, B, C], 3) == [2, 0, 1]


def test_branches_of_a_fork_have_their_own_hints() -> None:
    mgr = manager(num_pages=16)
    parent = run(mgr, [1, 2, 3], returns_in="never")
    child = TextGenerationContext("child", parent.tokens, returns_in="soon")
    mgr.fork(parent.request_id, child)
    for context, token in ((parent, 50), (child, 60)):
        for _ in range(2):
            assert mgr.reserve(context)
            context.update(token)
            mgr.step([context])
    serve(mgr, A)
    mgr.release("child")
    mgr.release(parent.request_id)
    full = [[*context.tokens.tolist()[:-1]] for context in (parent, child)]
    assert lost(mgr, [*full, A], 3) == [0, 2, 1]


def test_a_cut_request_gives_its_hint_to_the_rest() -> None:
    mgr = manager()
    context = run(mgr, [1, 2, 3, 4], returns_in="never")
    mgr.truncate(context.request_id, 2)
    mgr.release(context.request_id)
    serve(mgr, A, returns_in="soon")
    assert lost(mgr, [[1, 2], A], 2) == [0, 1]


def test_a_reset_forgets_hints() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, returns_in="soon")
    context = run(mgr, B, returns_in="soon")
    mgr.reset_prefix_cache()
    mgr.release(context.request_id)
    mgr.check_integrity()
    serve(mgr, A)
    serve(mgr, B)
    serve(mgr, C, returns_in="never")
    assert lost(mgr, [A, B, C], 3) == [2, 0, 1]


def test_a_context_of_another_class_has_a_hint() -> None:
    mgr = manager()
    serve(mgr, A)
    context: Any = Context("other", B)
    context.returns_in = "never"
    mgr.claim("other")
    assert mgr.reserve(context)
    context.update(7)
    mgr.step([context])
    context.returns_in = "tomorrow"
    with pytest.raises(ValueError, match="returns_in is 'tomorrow'"):
        mgr.release("other")
    assert mgr.contains("other")
    context.returns_in = "never"
    mgr.release("other")
    assert lost(mgr, [A, B], 2) == [1, 0]


def test_a_hint_that_releases_its_request() -> None:
    mgr = manager()

    class Meddling(Context):
        """A context whose hint releases its request."""

        reads = 0

        @property
        def returns_in(self) -> str:
            self.reads += 1
            if self.reads == 1:
                mgr.release("other")
            return "never"

    mgr.claim("other")
    assert mgr.reserve(Meddling("other", B))
    with pytest.raises(RequestNotFoundError):
        mgr.release("other")
    mgr.check_integrity()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (-1, ValueError, "returns_in is -1, must be 0 .. 8.5e"),
        (-1e-9, ValueError, "must be 0 .. 8.5e"),
        (math.nan, ValueError, 'returns_in is nan, must be 0 .. 8.5e.* pass "never"'),
        (math.inf, ValueError, 'returns_in is inf, must be 0 .. 8.5e.* pass "never"'),
        (1e10, ValueError, "must be 0 .. 8.5e"),
        ("Soon", ValueError, "returns_in is 'Soon', must be \"soon\" .within a minute"),
        ("", ValueError, "returns_in is ''"),
        ([1], TypeError, 'must be a number of seconds, "soon", "later", "never" or None'),
        (b"soon", TypeError, "must be a number of seconds"),
    ],
)
def test_wrong_hints(wrong: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        TextGenerationContext("a", [1], returns_in=wrong)
    mgr = manager()
    context = run(mgr, A)
    with pytest.raises(error, match=text):
        mgr.release(context.request_id, returns_in=wrong)
    assert mgr.contains(context.request_id)
    with pytest.raises(error, match=text):
        context.returns_in = wrong


@pytest.mark.parametrize("hint", [0, 0.5, np.float32(2), 8.5e9, "soon", "later", "never", None])
def test_a_copied_context_keeps_its_hint(hint: Any) -> None:
    context = TextGenerationContext("a", [1], returns_in=hint)
    assert pickle.loads(pickle.dumps(context)).returns_in == context.returns_in == hint


def test_a_subclass_must_not_override_the_hint() -> None:
    class Own(TextGenerationContext):
        returns_in = "soon"

    with pytest.raises(TypeError, match="overrides returns_in"):
        Own("a", [1])
