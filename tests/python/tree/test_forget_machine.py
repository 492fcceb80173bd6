# SPDX-License-Identifier: Apache-2.0
"""Random requests while bad pages are forgotten, and other callers hold pages by their ids."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvcore
from builders import claimed, make_context, make_manager

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

PAGE, PAGES, FIRST = 2, 14, 1
BAD = "bad"


class ForgetMachine(RuleBasedStateMachine):
    """The test records for each slot of each page the tokens up to it, or that it is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(PAGE, PAGES, first_page=FIRST)
        self.pool: dict[tuple[int, int], Any] = {}
        self.live: list[kvcore.TextGenerationContext] = []
        self.right: dict[Any, int] = {}  # the number of tokens before the first bad token
        self.holds: list[kvcore.HeldPages] = []

    def pick(self, data: st.DataObject) -> kvcore.TextGenerationContext:
        return data.draw(st.sampled_from(self.live))

    def row(self, context: kvcore.TextGenerationContext) -> list[int]:
        pages = self.manager.get_req_blocks(context.request_id)
        assert all(FIRST <= page < PAGES + FIRST for page in pages)
        return pages

    def copy(self) -> None:
        for _, source, target, tokens in self.manager.take_copies().tolist():
            for slot in range(tokens):
                self.pool[target, slot] = self.pool.get((source, slot))

    def end(self, context: kvcore.TextGenerationContext) -> None:
        self.live.remove(context)
        self.manager.release(context.request_id)

    @precondition(lambda self: len(self.live) < 5)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> None:
        context = claimed(self.manager, tokens)
        self.right[context.request_id] = 1 << 30
        self.live.append(context)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def run(self, data: st.DataObject, token: int) -> None:
        context = self.pick(data)
        if context.end_idx > 20 or not self.manager.maybe_reserve(context):
            return self.end(context)
        self.copy()
        self.manager.fetch([context])
        tokens, row = context.tokens.tolist(), self.row(context)
        right = self.right[context.request_id]
        for i in range(min(context.start_idx, right)):
            assert self.pool[row[i // PAGE], i % PAGE] == tokens[: i + 1]
        for i in range(context.start_idx, context.active_idx):
            # Values computed from bad values are bad.
            self.pool[row[i // PAGE], i % PAGE] = tokens[: i + 1] if right > i else BAD
        context.update(token)
        self.manager.step([context])
        return None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(self.pick(data))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if len(self.live) >= 5 or parent.start_idx == 0:
            return
        child = make_context([*parent.tokens[: parent.start_idx].tolist(), data.draw(BITS)])
        self.manager.fork(parent.request_id, child)
        self.right[child.request_id] = self.right[parent.request_id]
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(0, 8))
    def truncate(self, data: st.DataObject, n: int) -> None:
        context = self.pick(data)
        right = self.right[context.request_id]
        n = min(right, n, context.start_idx)
        try:
            self.manager.truncate(context.request_id, n)
        except ValueError:  # the request was not fetched yet
            return
        context.rewind(max(n, 1))
        context.start_idx = min(n, context.start_idx)
        self.right[context.request_id] = 1 << 30

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        pages = self.row(self.pick(data))
        if not pages:
            return
        page = data.draw(st.sampled_from(pages))
        if self.manager.forget([page]) == 0:
            return
        self.pool.update({(page, slot): BAD for slot in range(PAGE)})
        for context in self.live:
            row = self.row(context)
            if page in row:
                begin = row.index(page) * PAGE
                if begin < context.start_idx:
                    self.right[context.request_id] = min(begin, self.right[context.request_id])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        pages = self.row(self.pick(data))
        chosen = data.draw(st.lists(st.sampled_from(pages), max_size=3)) if pages else []
        self.holds.append(self.manager.hold(chosen))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))).let_go()

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        assert self.manager.num_cached_blocks == 0

    @invariant()
    def held_pages_are_not_free(self) -> None:
        held = {int(page) for hold in self.holds for page in hold.pages}
        assert self.manager.num_free_blocks <= PAGES - len(held)

    def teardown(self) -> None:
        for context in list(self.live):
            self.end(context)
        for hold in self.holds:
            hold.let_go()
        assert self.manager.num_free_blocks == PAGES
        self.manager.reset_prefix_cache()
        assert self.manager.num_cached_blocks == 0


BITS = st.integers(0, 1)
TestForget = ForgetMachine.TestCase
