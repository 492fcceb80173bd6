# SPDX-License-Identifier: Apache-2.0
"""Priorities of requests, their duration, and their owners."""

from __future__ import annotations

import math
from typing import Any

import pytest

from builders import make_manager
from kvcore import TextGenerationContext, policies
from kvcore.policies import BY_NAME
from retained_prompts import Clock, lost, serve
from tables import table


def manager(clock: Any = None, **rest: Any) -> Any:
    settings: dict[str, Any] = {"page_size": 1, "num_pages": 12, "eviction": "priority"}
    settings |= {} if clock is None else {"clock": clock}
    return make_manager(**settings | rest)


A, B, C, D = [1, 11], [2, 12], [3, 13], [4, 14]


def test_the_lowest_priority_goes_first_then_the_oldest() -> None:
    mgr = manager()
    for prompt, priority in ((A, 2), (B, 0), (C, 1), (D, 1)):
        serve(mgr, prompt, priority=priority)
    assert lost(mgr, [A, B, C, D], 4) == [1, 2, 3, 0]


def test_a_run_has_the_highest_priority_of_its_users() -> None:
    mgr = manager()
    serve(mgr, A, priority=10)
    serve(mgr, B, priority=20)
    serve(mgr, [*A, 99], priority=90)
    serve(mgr, B, priority=0)
    assert lost(mgr, [A, B], 2) == [1, 0]


def test_other_policies_ignore_priorities() -> None:
    for eviction in sorted(BY_NAME.keys() - {"priority"}):
        clock = Clock()
        mgr = manager(clock, eviction=eviction)
        serve(mgr, A, priority=100, retention=[(0, 1, 100, None)])
        serve(mgr, B, priority=0, ttl=1)
        assert lost(mgr, [A, B], 2) == [0, 1]
        assert clock.calls == 0 or eviction == "hinted"  # it ends hints


def test_a_priority_ends_with_its_time() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, priority=90, ttl=10)
    serve(mgr, B, priority=20)
    serve(mgr, C, priority=30)
    clock.now = 9.5
    assert lost(mgr, [A, B, C], 1) == [1]
    clock.now = 10
    assert lost(mgr, [A, C], 2) == [0, 1]


def test_what_falls_to_zero_is_not_forgotten_before_its_turn() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, priority=90, ttl=10)
    clock.now = 100
    serve(mgr, B, priority=0)
    assert mgr.match_prefix(A) == 2
    assert lost(mgr, [A, B], 2) == [0, 1]


def test_the_time_begins_with_the_last_use() -> None:
    clock = Clock()
    mgr = manager(clock)
    held = TextGenerationContext("held", A, ttl=10)
    mgr.claim("held")
    assert mgr.reserve(held)
    held.update(7)
    mgr.step([held])
    clock.now = 8
    mgr.release("held")  # its time ends at 18
    serve(mgr, B, priority=10)
    clock.now = 17
    assert lost(mgr, [A, B], 1) == [1]
    serve(mgr, [*A, 99], ttl=10)  # the pages it found are kept until 27
    serve(mgr, C, priority=10)
    clock.now = 26
    assert lost(mgr, [A, C], 1) == [1]


def test_a_user_for_ever_keeps_its_priority_when_the_time_of_others_ends() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, A, priority=90, ttl=10)
    serve(mgr, A, priority=40)
    serve(mgr, B, priority=30)
    serve(mgr, C, priority=60)
    clock.now = 50
    assert lost(mgr, [A, B, C], 3) == [1, 0, 2]


def test_ranges_of_a_prompt_have_priorities_of_their_own() -> None:
    mgr = manager(num_pages=24)
    system, question, other = [1, 2, 3, 4], [5, 6, 7, 8], [21, 22, 23, 24]
    serve(mgr, [*system, *question], priority=10, retention=[(0, 4, 90, None)])
    serve(mgr, other, priority=50)
    before = mgr.match_prefix([*system, *question])
    assert before == 8
    assert lost(mgr, [[*system, *question], other], 2) == [0, 1]
    assert mgr.match_prefix([*system, *question]) == 4


def test_a_range_ends_like_a_priority() -> None:
    clock = Clock()
    mgr = manager(clock)
    serve(mgr, [1, 2], retention=[(0, None, 90, 5)])
    serve(mgr, B)
    clock.now = 5
    assert lost(mgr, [[1, 2], B], 2) == [0, 1]


def test_a_page_is_in_the_range_of_its_first_token() -> None:
    mgr = manager(page_size=4, num_pages=8)
    serve(mgr, list(range(12)), priority=50, retention=[(1, 8, 90, None), (8, 9, 10, None)])
    serve(mgr, list(range(20, 24)), priority=30)
    first, second = list(range(12)), list(range(20, 24))
    assert lost(mgr, [first, second], 2) == [0, 1]
    assert mgr.match_prefix(first) == 8  # evicts the third page (priority 10), not the first (50)


def test_the_time_of_a_request_that_grows_goes_on() -> None:
    clock = Clock()
    mgr = manager(clock, num_pages=108)
    context = TextGenerationContext("r", [1, 2, 3], ttl=10)
    mgr.claim("r")
    for _ in range(100):
        assert mgr.reserve(context)
        context.update(7)
        mgr.step([context])
        clock.now += 1
    mgr.release("r")
    serve(mgr, [50, 51], priority=1)
    clock.now += 9
    assert lost(mgr, [[1, 2, 3] + [7] * 99, [50, 51]], 1) == [1]


def test_forks_ask_for_themselves() -> None:
    mgr = manager()
    parent = TextGenerationContext("parent", A, priority=10)
    mgr.claim("parent")
    assert mgr.reserve(parent)
    parent.update(7)
    mgr.step([parent])
    child = TextGenerationContext("child", [*A, 8], priority=80)
    mgr.fork("parent", child)
    assert mgr.reserve(child)
    child.update(9)
    mgr.step([child])
    serve(mgr, B, priority=50)
    mgr.release("parent")
    mgr.release("child")
    # The child's page has the child's priority, the others the parent's until the parent is gone.
    assert lost(mgr, [[*A, 8], B], 1) == [1]


def test_a_context_says_what_it_asks_for() -> None:
    plain = TextGenerationContext("r", [1])
    assert (plain.priority, plain.ttl, plain.retention) == (50, None, ())
    ranges = [(0, 4, 90, 1.5), (4, None, 10, None)]
    context = TextGenerationContext("r", [1], priority=7, ttl=0.5, retention=ranges)
    assert (context.priority, context.ttl, context.retention) == (7, 0.5, tuple(ranges))
    with pytest.raises(AttributeError):
        context.priority = 8  # type: ignore[misc]


@table(
    ("rest", "error", "text"),
    [
        ({"priority": 101}, ValueError, "priority is 101, must be 0 .. 100"),
        ({"priority": -1}, ValueError, "priority is -1, must be 0 .. 100"),
        ({"priority": 1.5}, TypeError, "priority"),
        ({"priority": None}, TypeError, "priority"),
        ({"ttl": 0}, ValueError, "ttl is 0, must be more than 0 seconds"),
        ({"ttl": -1.0}, ValueError, "ttl is -1.0, must be more than 0"),
        ({"ttl": math.nan}, ValueError, "ttl is nan"),
        ({"ttl": math.inf}, ValueError, "ttl is inf"),
        ({"ttl": "9"}, TypeError, "ttl is '9', must be a number"),
        ({"retention": 5}, TypeError, "iter"),
        ({"retention": [5]}, ValueError, r"retention\[0\] is 5, must be \(start, end"),
        ({"retention": [(0, 1, 2)]}, ValueError, r"retention\[0\] is \(0, 1, 2\)"),
        ({"retention": [(0, 0, 9, None)]}, ValueError, r"retention\[0\] has the tokens 0 .. 0"),
        ({"retention": [(-1, 2, 9, None)]}, ValueError, r"retention\[0\] has the tokens -1"),
        (
            {"retention": [(0, 5, 9, None), (4, 8, 9, None)]},
            ValueError,
            r"retention\[1\] has the tokens 4 .. 8, must not be empty and must start at 5",
        ),
        ({"retention": [(0, None, 9, None), (4, 8, 9, None)]}, ValueError, r"retention\[1\]"),
        ({"retention": [(0, 5, 101, None)]}, ValueError, r"the priority of retention\[0\] is 101"),
        ({"retention": [(0, 5, 9, 0)]}, ValueError, r"the time of retention\[0\] is 0"),
        ({"retention": [("a", 5, 9, 1)]}, TypeError, r"the start of retention\[0\]"),
    ],
)
def test_what_makes_no_sense_is_refused(
    rest: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        TextGenerationContext("r", [1, 2], **rest)


def test_a_clock_is_asked_once_per_call_outside_of_any_lock() -> None:
    clock = Clock()
    mgr = manager(clock)

    class Meddling(Clock):
        def __call__(self) -> float:
            assert mgr.contains("r")  # a lock would make this call wait for ever
            return super().__call__()

    meddling = Meddling()
    mgr = manager(meddling, enable_runtime_checks=False)
    context = TextGenerationContext("r", A)
    mgr.claim("r")
    calls: list[tuple[Any, Any]] = [
        (mgr.reserve, context),
        (mgr.maybe_reserve_batch, [context]),
        (mgr.fetch, [context]),
        (mgr.step, [context]),
        (mgr.release, "r"),
    ]
    for call, given in calls:
        before = meddling.calls
        call(given)
        assert meddling.calls == before + 1


def test_a_clock_that_fails_changes_nothing() -> None:
    for bad, error in ((None, TypeError), ("x", TypeError), (math.nan, ValueError)):
        mgr = manager(clock=lambda bad=bad: bad)
        context = TextGenerationContext("r", A)
        mgr.claim("r")
        for call, given in ((mgr.reserve, context), (mgr.fetch, [context]), (mgr.step, [context])):
            with pytest.raises(error, match="the clock is"):
                call(given)
        with pytest.raises(error, match="the clock is"):
            mgr.release("r")
        assert mgr.contains("r")
        assert mgr.num_free_blocks == 12


def test_a_clock_that_goes_back_is_no_news() -> None:
    clock = Clock()
    mgr = manager(clock, eviction=policies.Priority())
    clock.now = 100
    serve(mgr, A, priority=90, ttl=10)
    clock.now = 50
    serve(mgr, B, priority=20)
    clock.now = 109
    assert lost(mgr, [A, B], 1) == [1]
