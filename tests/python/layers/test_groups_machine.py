# SPDX-License-Identifier: Apache-2.0
"""A state machine over groups of layers and states; rules give every expected answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conftest import slow_but
from ruled_scene import EVERYTHING, MOST, SHAPES
from ruled_traffic import GroupsTraffic
from searches import machine_settings

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

WHICH = st.integers(0, MOST)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
OF, KEEP = st.integers(0, 20), st.integers(0, 40)
OPTIONS: dict[str, list[Any]] = {
    "page_size": [1, 2, 3, 4],
    "pages": [EVERYTHING, EVERYTHING, 50, 30],
    "dedup": [True, False],
    "parts": [True, False],
    "drafts": [0, 0, 3],
    "chunks": [False, True],
    "slots": [5, 7, 12],
    "keep": [False, True],
}


def has_requests(machine: GroupsMachine) -> bool:
    return bool(machine.traffic.live)


def has_room(machine: GroupsMachine) -> bool:
    return len(machine.traffic.live) < MOST


class GroupsMachine(RuleBasedStateMachine):
    """Each rule makes one or two calls of the manager."""

    traffic: GroupsTraffic

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        options=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}),
    )
    def build(self, shape: str, options: dict[str, Any]) -> None:
        self.traffic = GroupsTraffic(shape, **options)

    @precondition(has_room)
    @rule(tail=TOKENS, chunk=st.integers(0, 30), of=OF, keep=KEEP)
    def begin(self, of: int, keep: int, tail: list[int], chunk: int) -> None:
        self.traffic.begin(of, keep, tail, chunk)

    @precondition(has_requests)
    @rule(which=WHICH, steps=st.sampled_from([1, 1, 1, 2, 3]))
    def reserve(self, which: int, steps: int) -> None:
        self.traffic.reserve_one(which, steps)

    @precondition(has_requests)
    @rule(
        rows=st.sets(st.integers(0, MOST - 1), min_size=1),
        chunk=st.integers(0, 20),
        new=st.lists(st.integers(0, 1), min_size=MOST, max_size=MOST),
    )
    def step(self, rows: set[int], chunk: int, new: list[int]) -> None:
        self.traffic.step(rows, chunk, new)

    @precondition(has_requests)
    @rule(which=WHICH, new=TOKENS)
    def decode_several(self, which: int, new: list[int]) -> None:
        self.traffic.decode_several(which, new)

    @precondition(has_requests)
    @precondition(has_room)
    @rule(which=WHICH, tail=TOKENS)
    def fork(self, which: int, tail: list[int]) -> None:
        self.traffic.fork(which, tail)

    @precondition(has_requests)
    @rule(which=WHICH, back=st.integers(0, 9))
    def truncate(self, which: int, back: int) -> None:
        self.traffic.truncate(which, back)

    @precondition(has_requests)
    @rule(which=WHICH, back=st.sampled_from([0, 0, 1, 4, 9]))
    def leave(self, which: int, back: int) -> None:
        self.traffic.leave(which, back)

    @precondition(has_requests)
    @rule(which=WHICH, drafts=TOKENS, wrong=st.integers(0, 3))
    def draft(self, which: int, drafts: list[int], wrong: int) -> None:
        self.traffic.draft(which, drafts, wrong)

    @precondition(has_requests)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        self.traffic.release(which)

    @rule(of=OF, keep=KEEP)
    def pin(self, of: int, keep: int) -> None:
        self.traffic.pin(of, keep)

    @precondition(lambda self: bool(self.traffic.pins))
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        self.traffic.unpin(which)

    @rule(touch=st.booleans(), of=OF, keep=KEEP)
    def match(self, of: int, keep: int, touch: bool) -> None:
        self.traffic.match(of, keep, touch=touch)

    @rule()
    def reset(self) -> None:
        self.traffic.reset()

    @invariant()
    def answers_are_those_of_the_rules(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.end()


class Walk:
    """Makes far more calls than Hypothesis, which finds short sequences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        options = {name: self.random.choice(each) for name, each in OPTIONS.items()}
        self.traffic = GroupsTraffic(sorted(SHAPES)[seed % len(SHAPES)], **options)

    def bits(self, n: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(n)]

    def of_requests(self) -> list[Callable[[], object]]:
        traffic, draw = self.traffic, self.random
        which, tail = draw.randrange(MOST), self.bits(draw.randint(1, 6))
        rows = {row for row in range(MOST) if draw.random() < 0.5}
        verbs: list[Callable[[], object]] = [
            lambda: traffic.reserve_one(which, draw.choice([1, 1, 2, 3])),
            lambda: traffic.release(which),
            lambda: traffic.truncate(which, draw.randrange(10)),
            *[lambda: traffic.leave(which, draw.choice([0, 0, 1, 4]))] * 2,
            lambda: traffic.draft(which, tail, draw.randrange(4)),
            lambda: traffic.decode_several(which, tail),
            *[lambda: traffic.step(rows, draw.randrange(21), self.bits(MOST))] * 6,
        ]
        if len(traffic.live) < MOST:
            verbs.append(lambda: traffic.fork(which, tail))
        return verbs

    def of_the_cache(self) -> list[Callable[[], object]]:
        traffic, draw = self.traffic, self.random
        of, keep = draw.randrange(21), draw.randrange(41)
        verbs: list[Callable[[], object]] = [
            traffic.reset,
            lambda: traffic.match(of, keep, touch=draw.random() < 0.5),
        ]
        if len(traffic.pins) < 3:
            verbs.append(lambda: traffic.pin(of, keep))
        if traffic.pins:
            verbs += [lambda: traffic.unpin(draw.randrange(MOST))] * 2
        return verbs

    def begin(self) -> None:
        draw = self.random
        chunk = draw.choice([0, draw.randrange(30)])
        tail = self.bits(draw.randint(1, 6))
        self.traffic.begin(draw.randrange(21), draw.randrange(41), tail, chunk)

    def run(self, calls: int) -> None:
        for _ in range(calls):
            if len(self.traffic.live) < MOST and self.random.random() < 0.25:
                self.begin()
            elif self.traffic.live and self.random.random() < 0.9:
                self.random.choice(self.of_requests())()
            else:
                self.random.choice(self.of_the_cache())()
            self.traffic.check()
        self.traffic.end()


@pytest.mark.search
def test_answers_are_those_of_the_rules() -> None:
    run_state_machine_as_test(GroupsMachine, settings=machine_settings(examples=50, steps=40))


@pytest.mark.parametrize("seed", slow_but(range(len(SHAPES)), range(3 * len(SHAPES))))
def test_long_walks(seed: int) -> None:
    Walk(seed).run(250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 240))
def test_longer_walks(seed: int) -> None:
    Walk(seed).run(400)


@pytest.mark.slow
def test_answers_are_those_of_the_rules_for_long() -> None:
    run_state_machine_as_test(GroupsMachine, settings=machine_settings(examples=600, steps=40))
