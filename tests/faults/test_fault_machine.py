# SPDX-License-Identifier: Apache-2.0
"""After any failure in a call, requests are as before or as after, and a retry succeeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faulty_worlds import NO_FAULT, WEIGHTS, Act, Fault, World
from searches import machine_settings

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

TOKEN = st.integers(0, 1)
ERRORS = st.sampled_from([OSError, MemoryError, KeyboardInterrupt])


def has_requests(machine: FaultMachine) -> bool:
    return bool(machine.plain.contexts)


class FaultMachine(RuleBasedStateMachine):
    """Two worlds with the same calls; in the faulty world a failed call is repeated."""

    plain: World
    faulty: World
    page_size: int

    @initialize(
        page_size=st.sampled_from([4, 3, 2, 8, 1]),
        num_pages=st.integers(6, 16),
        host_pages=st.sampled_from([24, 0]),
        replicas=st.sampled_from([1, 1, 2]),
    )
    def build(self, page_size: int, **rest: Any) -> None:
        self.page_size = page_size
        self.plain, self.faulty = World(page_size, **rest), World(page_size, **rest)
        self.prompts: dict[tuple[int, ...], None] = {}
        self.run_once: set[int] = set()

    # -- a call in both worlds -------------------------------------------------------------------
    def do(self, data: st.DataObject, act: Act) -> Any:
        """Make a call in both worlds, in the faulty world perhaps twice; return its answer."""
        # A failed store is not repeated, in both worlds.
        told = NO_FAULT
        if data.draw(st.integers(0, 7), "stores") == 7:
            told = Fault("store", data.draw(st.integers(1, 3), "at"), data.draw(ERRORS, "error"))
        try:
            expected = self.plain.attempt(act, told)
        except KeyboardInterrupt:
            expected = self.plain.attempt(act)
        fault = told if told.at else self.chosen(data)
        faulty, prompts, between = self.faulty, list(self.prompts), None
        before = faulty.requests(), faulty.matches(prompts)
        try:
            answer = faulty.attempt(act, fault)
        except (OSError, MemoryError, KeyboardInterrupt) as raised:
            assert "injected" in str(raised), raised
            faulty.manager.check_integrity()
            between = faulty.requests(), faulty.matches(prompts)
            answer = faulty.attempt(act)
        self.compare(answer, expected)
        if between is not None:
            self.check_between(before, between)
        return answer

    def chosen(self, data: st.DataObject) -> Fault:
        """Draw a call of foreign code that has run in the plain world."""
        counts = self.plain.points.counts
        kinds = [kind for kind in WEIGHTS for _ in range(WEIGHTS[kind]) if counts[kind]]
        if not kinds or data.draw(st.integers(0, 2), "fails") == 0:
            return NO_FAULT
        kind: str = data.draw(st.sampled_from(kinds), "kind")
        at = data.draw(st.integers(1, counts[kind]), "at")
        return Fault(kind, at, data.draw(ERRORS, "error"))

    def compare(self, answer: Any, expected: Any) -> None:
        if isinstance(expected, np.ndarray):  # the swaps of a step
            assert answer[:, :2].tolist() == expected[:, :2].tolist()
        elif not isinstance(expected, list):
            assert answer == expected
        prompts = list(self.prompts)
        assert self.faulty.requests() == self.plain.requests()
        assert self.faulty.matches(prompts) == self.plain.matches(prompts)
        assert self.faulty.counts() == self.plain.counts()

    def check_between(self, before: Any, between: Any) -> None:
        """Check requests and prompts after the failed call: they are as before or as after."""
        after = self.plain.requests(), self.plain.matches(list(self.prompts)[: len(before[1])])
        for number, state in between[0].items():
            claimed = (0, *before[0][number][1:])
            assert state in (before[0][number], after[0][number], claimed), number
        for old, seen in zip(before[1], between[1], strict=True):
            assert seen <= old or seen in after[1]

    def each(self, act: Act) -> None:
        """Run an action in both worlds that involves no manager."""
        for world in (self.plain, self.faulty):
            act(world)

    # -- drawing ---------------------------------------------------------------------------------
    def is_claimed(self, number: int) -> bool:
        return bool(self.plain.manager.contains(self.plain.contexts[number].request_id))

    def request(self, data: st.DataObject) -> int:
        numbers = range(len(self.plain.contexts))
        known = [n for n in numbers if self.is_claimed(n)] or list(numbers)
        number: int = data.draw(st.sampled_from(known[-6:]), "request")
        return number

    def batch(self, data: st.DataObject) -> list[int]:
        size = data.draw(st.integers(1, 4), "batch size")
        drawn = [self.request(data) for _ in range(size)]
        numbers = list(dict.fromkeys(drawn))
        return [n for n in numbers if self.is_claimed(n)] or numbers[:1]

    def prompt(self, data: st.DataObject) -> list[int]:
        run = st.tuples(TOKEN, st.integers(1, self.page_size + 1))
        tokens = [t for t, n in data.draw(st.lists(run, min_size=1, max_size=3)) for _ in range(n)]
        goes_on: int = data.draw(st.integers(0, 3), "continue another")
        if self.prompts and goes_on:
            other = data.draw(st.sampled_from(list(self.prompts)[-6:]), "prompt")
            cut = data.draw(st.integers(0, len(other)), "cut")
            return [*other[: len(other) - cut], *tokens]
        return tokens

    def make_room(self) -> None:
        """Release the oldest request if there are many requests."""
        claimed = [n for n in range(len(self.plain.contexts)) if self.is_claimed(n)]
        if len(claimed) > 4:
            self.let_go(claimed[0])

    def new(self, data: st.DataObject, tokens: Sequence[int]) -> int:
        foreign = data.draw(st.booleans(), "foreign")
        active = data.draw(st.one_of(st.none(), st.integers(1, len(tokens))), "active_idx")
        self.each(lambda world: world.new(tokens, foreign=foreign, active_idx=active))
        self.prompts[tuple(tokens)] = None
        return len(self.plain.contexts) - 1

    # -- rules -----------------------------------------------------------------------------------
    @rule(data=st.data(), token=st.integers(2, 4))
    def crowd_out(self, data: st.DataObject, token: int) -> None:
        """Run a prompt that takes all pages, so cached pages are evicted; run it again later."""
        pages = self.plain.manager._core.stats(0).available_pages
        length = pages * self.page_size - 1
        if length > 0:
            self.each(lambda w: w.new([token] * length, foreign=False, active_idx=None))
            number = len(self.plain.contexts) - 1
            self.each(lambda w: claim(w, number, 0))
            self.run(data, [number])
            self.let_go(number)
        self.share(data, data.draw(st.booleans(), "let go"))

    @rule(data=st.data(), runs=st.booleans())
    def arrive(self, data: st.DataObject, runs: bool) -> None:
        tokens = self.prompt(data)
        number = self.new(data, tokens)
        self.make_room()
        replica = data.draw(st.integers(0, self.plain.manager.num_replicas - 1), "replica")
        self.do(data, lambda w: w.manager.external_claim(name_of(w, number), replica_idx=replica))
        if runs:
            self.run(data, [number])

    @rule(data=st.data(), leaves=st.booleans())
    def share(self, data: st.DataObject, leaves: bool) -> None:
        """Run an earlier prompt again, with another end."""
        known = st.sampled_from(list(self.prompts)[-8:] or [(0,) * 6])
        tokens = data.draw(known, "prompt")
        cut = data.draw(st.integers(0, min(len(tokens), self.page_size)), "cut")
        number = self.new(data, [*tokens[: len(tokens) - cut], 1, 1])
        self.make_room()
        self.each(lambda w: claim(w, number, 0))
        if data.draw(st.booleans(), "reserve"):
            self.do(data, lambda w: w.manager.maybe_reserve(w.contexts[number]))
        self.run(data, [number])
        if leaves:
            self.let_go(number)

    def run(self, data: st.DataObject, numbers: list[int]) -> None:
        """Run one step of an honest engine."""
        if isinstance(self.do(data, lambda w: w.manager.fetch(w.rows(numbers))), list):
            self.each(lambda world: write(world, numbers))
            self.do(data, lambda w: w.manager.step(w.rows(numbers)))
            self.run_once.update(numbers)
            for number in numbers:
                self.prompts[tuple(self.plain.contexts[number].tokens.tolist())] = None

    @precondition(has_requests)
    @rule(data=st.data())
    def run_batch(self, data: st.DataObject) -> None:
        self.run(data, self.batch(data))

    @precondition(has_requests)
    @rule(data=st.data(), num_steps=st.sampled_from([1, 1, 3]))
    def reserve(self, data: st.DataObject, num_steps: int) -> None:
        """Reserve several steps only for requests that have run.

        Before its first run, a failed copy of a longer hit sets a request back to its claim, and a
        retry for fewer steps takes fewer pages.
        """
        number = self.request(data)
        num_steps = num_steps if number in self.run_once else 1
        self.do(data, lambda w: w.manager.plan(w.contexts[number], num_steps))
        self.do(data, lambda w: w.manager.maybe_reserve(w.contexts[number], num_steps))

    @precondition(has_requests)
    @rule(data=st.data())
    def reserve_batch(self, data: st.DataObject) -> None:
        numbers = self.batch(data)
        self.do(data, lambda w: w.manager.maybe_reserve_batch(w.rows(numbers)))

    @precondition(has_requests)
    @rule(data=st.data(), count=st.integers(1, 3), runs=st.booleans())
    def fork(self, data: st.DataObject, count: int, runs: bool) -> None:
        parent = self.request(data)
        context = self.plain.contexts[parent]
        children = []
        for _ in range(count):
            tail = data.draw(st.lists(TOKEN, min_size=1, max_size=3), "tail")
            tokens = [*context.tokens.tolist()[: context.start_idx], *tail]
            children.append(self.new(data, tokens))
        self.do(data, lambda w: w.manager.fork(w.contexts[parent].request_id, *w.rows(children)))
        claimed = [n for n in (parent, *children) if self.is_claimed(n)]
        if runs and claimed:
            self.run(data, claimed)

    @precondition(has_requests)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        number = self.request(data)
        n = data.draw(st.integers(0, self.plain.contexts[number].end_idx), "n")
        answer = self.do(data, lambda w: w.manager.truncate(w.contexts[number].request_id, n))
        # If the request was not cut, later positions would not count as input a second time.
        if answer is None:
            self.each(lambda world: world.contexts[number].rewind(max(1, n)))

    @precondition(has_requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = self.request(data)
        self.do(data, lambda w: w.manager.release(name_of(w, number)))

    def let_go(self, number: int) -> None:
        if self.is_claimed(number):
            self.each(lambda w: w.manager.release(w.contexts[number].request_id))

    @rule(data=st.data())
    def match_and_pin(self, data: st.DataObject) -> None:
        tokens = self.prompt(data)
        self.do(data, lambda w: w.manager.match_prefix(w.tokens(tokens)))
        pins = {}

        def pin(world: World) -> int:
            pins[world] = world.manager.pin(world.tokens(tokens))
            return int(pins[world].num_tokens)

        self.do(data, pin)
        self.each(lambda world: world.pins.append(pins[world]))

    @precondition(lambda self: bool(self.plain.pins))
    @rule()
    def unpin(self) -> None:
        self.each(lambda world: world.pins.pop().release())

    @rule(now=st.integers(0, 2))
    def ask_for_reset(self, now: int) -> None:
        if now == 0:
            self.each(lambda world: setattr(world.listener, "asked", True))

    def teardown(self) -> None:
        if not hasattr(self, "plain"):
            return
        for world in (self.plain, self.faulty):
            while world.pins:
                world.pins.pop().release()
            for context in world.contexts:
                if world.manager.contains(context.request_id):
                    world.manager.release(context.request_id)
            world.manager.check_integrity()
            total = world.manager.num_replicas * world.manager.total_num_pages
            assert world.manager.num_free_blocks == total
            world.manager.reset_prefix_cache()
            assert not any(world.matches(list(self.prompts)))
            assert world.manager.host_committed_block_pct == 0


def name_of(world: World, number: int) -> Any:
    return world.contexts[number].request_id


def claim(world: World, number: int, replica: int) -> None:
    name = name_of(world, number)
    world.attempt(lambda w: w.manager.external_claim(name, replica_idx=replica))


def write(world: World, numbers: list[int]) -> None:
    rows = world.rows(numbers)
    for context in rows:
        world.pages.check(context)
    for context in rows:
        world.pages.write(context)
    for context in rows:
        world.pages.check(context, context.active_idx)
        context.update(0)


@pytest.mark.search
def test_calls_that_fail_leave_requests_as_before_or_after() -> None:
    run_state_machine_as_test(FaultMachine, settings=machine_settings(steps=30))


@pytest.mark.slow
def test_calls_that_fail_in_long_runs() -> None:
    run_state_machine_as_test(FaultMachine, settings=machine_settings(examples=400, steps=60))
