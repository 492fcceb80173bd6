# SPDX-License-Identifier: Apache-2.0
"""Hypothesis drives requests with extra keys; requests share exactly the pages that agree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcore
from builders import make_manager, with_host
from keyed_cache import KeyedCache, KeyedContext, Keys, Mark, common, marks
from written_pool import WrittenPool

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

TOKENS = st.lists(st.sampled_from([0, 0, 1, -1]), min_size=1, max_size=9)
CONTENT = st.sampled_from([b"", b"a", b"b"])


def keys_for(n: int) -> st.SearchStrategy[Keys]:
    starts = st.integers(0, n - 1)
    key = starts.flatmap(
        lambda start: st.tuples(st.just(start), st.integers(1, min(3, n - start)), CONTENT)
    )
    return st.lists(key, max_size=3)


def marks_of(context: Any) -> list[Mark]:
    return marks(context.tokens, context.extra_keys)


class KeyedMachine(RuleBasedStateMachine):
    """A pool that evicts no page, so the test can compute each hit exactly."""

    num_pages = 600
    host_pages = 0

    @initialize(page_size=st.integers(1, 4), dedup=st.booleans())
    def build(self, page_size: int, dedup: bool) -> None:
        params = with_host(page_size, self.host_pages)
        self.manager = make_manager(
            page_size, self.num_pages, params=params, blocks="allocate", dedup=dedup
        )
        self.pool = WrittenPool(self.manager)
        self.cache = KeyedCache(page_size)
        self.live: dict[int, Any] = {}
        self.names = itertools.count()

    # -- drawing ---------------------------------------------------------------------------------
    def prompt(self, data: st.DataObject) -> tuple[list[int], Keys]:
        """Draw a new prompt, or extend a cut of another request's prompt with some of its keys."""
        tokens: list[int] = data.draw(TOKENS, "tokens")
        keys: Keys = data.draw(keys_for(len(tokens)), "keys")
        if not self.live or data.draw(st.booleans(), "fresh"):
            return tokens, keys
        other = self.request(data)
        cut: int = data.draw(st.integers(0, other.end_idx), "cut")
        kept = [k for k in other.extra_keys or () if k[0] + k[1] <= cut]
        if kept and data.draw(st.integers(0, 3), "leave a key out") == 0:
            kept.pop(data.draw(st.integers(0, len(kept) - 1), "which"))
        moved = [(start + cut, length, key) for start, length, key in keys]
        return [int(t) for t in other.tokens[:cut]] + tokens, kept + moved

    def request(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(list(self.live.values())), "request")

    def context(self, data: st.DataObject, tokens: list[int], keys: Keys | None) -> Any:
        name = next(self.names)
        if data.draw(st.integers(0, 3), "foreign") == 0:
            made = KeyedContext(name, tokens)
            made.extra_keys = keys
            return made
        return kvcore.TextGenerationContext(name, tokens, extra_keys=keys)

    # -- checks ----------------------------------------------------------------------------------
    def check_hit(self, context: Any, planned: int) -> None:
        expected = self.cache.hit(marks_of(context))
        assert planned == context.start_idx == expected

    def matched(self, asked: list[Mark], found: int) -> None:
        assert found == self.cache.match(asked)

    def committed(self, context: Any) -> None:
        self.cache.commit(marks_of(context)[: context.start_idx])

    def fits(self, context: Any) -> bool:
        assert self.manager.maybe_reserve(context)
        return True

    # -- rules -----------------------------------------------------------------------------------
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        context = self.context(data, *self.prompt(data))
        self.manager.claim(context.request_id)
        planned = self.manager.plan(context).hit_tokens
        if not self.fits(context):
            self.manager.release(context.request_id)
            return
        self.check_hit(context, planned)
        self.live[context.request_id] = context
        self.run([context], 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.sampled_from([0, 1]))
    def decode(self, data: st.DataObject, token: int) -> None:
        batch = list({id(c): c for c in (self.request(data), self.request(data))}.values())
        if all(self.fits(context) for context in batch):
            self.run(batch, token)

    def run(self, batch: list[Any], token: int) -> None:
        self.pool.run(batch, token)
        for context in batch:
            self.committed(context)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), inherits=st.booleans())
    def fork(self, data: st.DataObject, inherits: bool) -> None:
        parent = self.request(data)
        tokens, keys = self.prompt(data)
        child = self.context(data, [*map(int, parent.tokens[: parent.start_idx]), *tokens], None)
        own = type(child) is type(parent) is kvcore.TextGenerationContext
        if not (inherits and own):
            moved = [(s + parent.start_idx, n, k) for s, n, k in keys]
            front = [k for k in parent.extra_keys or () if k[0] + k[1] <= child.end_idx]
            child = self.with_keys(child, front + moved)
        agrees = common(marks_of(parent), marks_of(child)) >= parent.start_idx
        if agrees or (child.extra_keys is None and own):
            self.manager.fork(parent.request_id, child)
            assert common(marks_of(parent), marks_of(child)) >= parent.start_idx
            self.live[child.request_id] = child
        else:
            before = child.extra_keys
            with pytest.raises(ValueError, match="fork"):
                self.manager.fork(parent.request_id, child)
            assert (child.extra_keys, child.start_idx) == (before, 0)

    def with_keys(self, context: Any, keys: Keys) -> Any:
        if isinstance(context, KeyedContext):
            context.extra_keys = keys
            return context
        return kvcore.TextGenerationContext(context.request_id, context.tokens, extra_keys=keys)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        context = self.request(data)
        n = data.draw(st.integers(1, context.end_idx), "to")
        self.manager.truncate(context.request_id, min(n, context.start_idx))
        context.rewind(n)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        tokens, keys = self.prompt(data)
        n = data.draw(st.integers(1, len(tokens)), "asked")
        keys = [key for key in keys if key[0] < n]
        asked = marks(tokens[:n], keys)
        found, pages = self.manager.match_prefix(tokens[:n], extra_keys=keys, return_pages=True)
        assert found == len(pages) * self.cache.page_size
        self.matched(asked, found)
        with self.manager.pin(tokens[:n], extra_keys=keys) as pinned:
            assert pinned.num_tokens == found

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        context = self.live.pop(self.request(data).request_id)
        self.manager.release(context.request_id)

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.cache.prefixes.clear()

    # -- laws ------------------------------------------------------------------------------------
    @invariant()
    def pages_hold_what_was_written_for_all_in_front_of_them(self) -> None:
        for context in self.live.values() if hasattr(self, "live") else ():
            self.pool.check(context)

    @invariant()
    def pages_are_shared_only_where_all_agrees(self) -> None:
        contexts = list(self.live.values()) if hasattr(self, "live") else []
        rows = [self.manager.get_req_blocks(c.request_id) for c in contexts]
        seen = [marks_of(c)[: c.start_idx] for c in contexts]
        for i, j in itertools.combinations(range(len(contexts)), 2):
            agree = common(seen[i], seen[j])
            for column, (a, b) in enumerate(zip(rows[i], rows[j], strict=False)):
                end = min((column + 1) * self.cache.page_size, len(seen[i]), len(seen[j]))
                assert a != b or agree >= end
        for group in self.manager.shared_prefixes(contexts):
            first, *rest = group.rows
            assert all(common(seen[first], seen[r]) >= group.num_tokens for r in rest)

    def teardown(self) -> None:
        if hasattr(self, "live"):
            for context in self.live.values():
                self.manager.release(context.request_id)
            self.manager.check_integrity()


class CrowdedMachine(KeyedMachine):
    """A small pool with a host tier: hits are right, and cover at most the written pages."""

    num_pages = 40
    host_pages = 24

    def check_hit(self, context: Any, planned: int) -> None:
        assert context.start_idx <= self.cache.hit(marks_of(context))

    def matched(self, asked: list[Mark], found: int) -> None:
        assert found <= self.cache.match(asked)

    def fits(self, context: Any) -> bool:
        if context.end_idx <= self.num_pages * self.cache.page_size:
            return bool(self.manager.maybe_reserve(context))
        before = context.start_idx, context.active_idx
        with pytest.raises(kvcore.CapacityError, match="more than the whole pool"):
            self.manager.maybe_reserve(context)
        assert (context.start_idx, context.active_idx) == before
        return False


TestKeyed = KeyedMachine.TestCase
TestCrowded = CrowdedMachine.TestCase
for case in (TestKeyed, TestCrowded):
    case.settings = settings(
        max_examples=settings().max_examples,
        stateful_step_count=30,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
