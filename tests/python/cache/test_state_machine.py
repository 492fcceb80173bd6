# SPDX-License-Identifier: Apache-2.0
"""Hypothesis drives kvcore and the reference through every call and compares after each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcore
from foreign_context import Context
from lockstep import Lockstep
from paired_request import Request
from reference_claims import Namespace
from reference_policies import RANKED
from searches import machine_settings

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

NAMESPACES: list[Namespace] = [(None, None), ("", None), (None, ""), ("a", "b"), ("ab", "")]
NUM_STEPS = st.sampled_from([1, 1, 1, 2, 5])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_hit": st.none() | st.integers(0, 12),
        "keep_free": st.integers(0, 8),
        "must_fit": st.none() | st.integers(0, 40),
    },
)
TOKEN = st.integers(-1, 1)


def has_requests(machine: PagedManagerMachine) -> bool:
    return bool(machine.pair.requests)


class PagedManagerMachine(RuleBasedStateMachine):
    """All calls in any order, with invalid calls among them."""

    pair: Lockstep
    page_size: int

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16, 128]),
        num_pages=st.integers(1, 16),
        replicas=st.sampled_from([1, 1, 2, 3]),
        caching=st.sampled_from([True] * 7 + [False]),
        dedup=st.sampled_from([True, True, False]),
        partial=st.sampled_from([True, True, False]),
        max_pages=st.integers(4, 20),
        pool=st.sampled_from([False, False, True]),
        eviction=st.sampled_from(["lru"] * 3 + [*RANKED]),
    )
    def build(self, page_size: int, num_pages: int, max_pages: int, **rest: Any) -> None:
        self.page_size = page_size
        self.pair = Lockstep(page_size, num_pages, max_seq_len=max_pages * page_size, **rest)

    # -- drawing ---------------------------------------------------------------------------------
    def request(self, data: st.DataObject, *, claimed: bool = False) -> Request:
        """Draw a request, mostly a recent request."""
        requests = list(self.pair.requests)
        if claimed:
            requests = [r for r in requests if r.request_id in self.pair.model.claims] or requests
        back: int = data.draw(st.integers(0, min(7, len(requests) - 1)), "request")
        return requests[-1 - back]

    def batch(self, data: st.DataObject, *, claimed: bool = False) -> list[Request]:
        size: int = data.draw(st.integers(0, 4), "batch size")
        drawn = [self.request(data, claimed=claimed) for _ in range(size)]
        return list(dict.fromkeys(drawn))

    def replica(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.pair.model.cache) - 1), "replica")

    def prompt(self, data: st.DataObject) -> list[int]:
        """Draw runs of few distinct tokens, so that prompts share whole and partial pages."""
        run = st.tuples(st.integers(-1, 1), st.integers(1, self.page_size + 1))
        runs = data.draw(st.lists(run, min_size=1, max_size=3), "runs")
        tokens = [token for token, length in runs for _ in range(length)]
        if self.pair.requests and data.draw(st.integers(0, 3), "continue another") > 0:
            other = self.request(data).model.ids
            cut: int = data.draw(st.integers(0, len(other)), "cut")
            return other[: len(other) - cut] + tokens
        return tokens

    def arrival(self, data: st.DataObject) -> Request:
        tokens = self.prompt(data)
        ns: Namespace = (None, None)
        if data.draw(st.integers(0, 3), "namespace?") == 0:
            ns = data.draw(st.sampled_from(NAMESPACES), "namespace")
        active = None
        if data.draw(st.integers(0, 3), "chunk?") == 0:
            active = data.draw(st.integers(1, len(tokens)), "active_idx")
        foreign = data.draw(st.integers(0, 2), "foreign") == 0
        request = self.pair.new(tokens, foreign=foreign, ns=ns, active_idx=active)
        self.pair.claim(request, self.replica(data))
        return request

    def iterate(self, batch: list[Request], num_steps: int, sampled: int) -> None:
        """Run a batch for some steps and commit."""
        if self.pair.fetch(batch, num_steps) is not None:
            for request in batch:
                for _ in range(num_steps):
                    request.both("update", sampled)
            self.pair.step(batch)

    # -- requests --------------------------------------------------------------------------------
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        request = self.arrival(data)
        if data.draw(st.booleans(), "reserve"):
            options: Any = data.draw(OPTIONS, "options")
            self.pair.reserve(request, **options)

    @rule(data=st.data(), num_steps=NUM_STEPS, sampled=TOKEN, stays=st.booleans())
    def serve(self, data: st.DataObject, num_steps: int, sampled: int, stays: bool) -> None:
        """Serve a request from arrival to answer; if it leaves, its pages stay cached."""
        request = self.arrival(data)
        if request.request_id in self.pair.model.claims:
            self.iterate([request], num_steps, sampled)
            if not stays:
                self.pair.release(request)

    @precondition(has_requests)
    @rule(data=st.data(), num_steps=NUM_STEPS, sampled=TOKEN, reserve=st.booleans())
    def run(self, data: st.DataObject, num_steps: int, sampled: int, reserve: bool) -> None:
        """Run one iteration of an engine; a reserved batch can be fetched."""
        batch = self.batch(data, claimed=True)
        if reserve:
            batch = [r for r in batch if self.pair.reserve(r, num_steps)]
            assert self.pair.fetch(batch, num_steps) is not None, "reserved, yet fetch failed"
        self.iterate(batch, num_steps, sampled)

    @precondition(has_requests)
    @rule(data=st.data())
    def change_a_context(self, data: st.DataObject) -> None:
        """Add or reject draft tokens, set a chunk, or rewind by any number of tokens."""
        request = self.request(data)
        model = request.model
        kind = data.draw(st.sampled_from(["update", "extend", "rewind", "active_idx"]), "kind")
        if kind == "update":
            request.both("update", data.draw(TOKEN))
        elif kind == "extend":
            request.both("extend", data.draw(st.lists(TOKEN, min_size=1, max_size=3)))
        elif kind == "active_idx":
            active = data.draw(st.integers(model.start_idx + 1, model.end_idx), "active_idx")
            request.core.active_idx = model.active_idx = active
        else:
            request.both("rewind", data.draw(st.integers(1, model.end_idx), "n"))

    @precondition(has_requests)
    @rule(data=st.data())
    def update_batch(self, data: st.DataObject) -> None:
        batch = self.batch(data)
        tokens = np.array([data.draw(TOKEN) for _ in batch], np.int32)
        kvcore.update_batch([r.core for r in batch], tokens)
        for request, token in zip(batch, tokens.tolist(), strict=True):
            request.model.update(token)

    # -- requests with a common past -------------------------------------------------------------
    @precondition(has_requests)
    @rule(data=st.data(), count=st.integers(0, 3), run=st.booleans(), sampled=TOKEN)
    def fork(self, data: st.DataObject, count: int, run: bool, sampled: int) -> None:
        """Fork a request; some forks have other tokens, too few tokens, or another namespace."""
        parent = self.request(data, claimed=True)
        written = [r for r in self.pair.requests if self.pair.model.has_written(r.model)]
        if written:
            parent = data.draw(st.sampled_from([*written[-4:], parent]), "parent")
        children = [self.child(data, parent.model) for _ in range(count)]
        self.pair.fork(parent, children)
        if run:
            batch = [r for r in (parent, *children) if r.request_id in self.pair.model.claims]
            self.iterate(data.draw(st.permutations(batch), "order"), 1, sampled)

    def child(self, data: st.DataObject, parent: Context) -> Request:
        tail = data.draw(st.lists(TOKEN, min_size=1, max_size=3), "tail")
        cut = st.integers(max(0, parent.start_idx - 1), parent.end_idx)
        tokens = parent.ids[: data.draw(cut, "cut")] + tail
        ns = parent.extra_key, parent.cache_salt
        kind = data.draw(st.integers(0, 15), "kind of fork")
        if kind == 0:
            tokens[data.draw(st.integers(0, len(tokens) - 1), "other token")] += 1
        elif kind == 1 and self.pair.model.has_written(parent):
            ns = ("another", None)
        active = data.draw(st.one_of(st.none(), st.integers(1, len(tokens))), "active_idx")
        foreign = data.draw(st.integers(0, 2), "foreign") == 0
        return self.pair.new(tokens, foreign=foreign, ns=ns, active_idx=active)

    @precondition(has_requests)
    @rule(data=st.data(), follows=st.integers(0, 3))
    def truncate(self, data: st.DataObject, follows: int) -> None:
        """Truncate a request and mostly, but not always, rewind its context."""
        request = self.request(data, claimed=True)
        n: int = data.draw(st.integers(-1, request.model.end_idx + 1), "n")
        self.pair.truncate(request, n)
        if follows and 1 <= n <= request.model.end_idx:
            request.both("rewind", n)

    @precondition(has_requests)
    @rule(data=st.data(), drafts=st.lists(TOKEN, max_size=6), sampled=TOKEN)
    def speculate(self, data: st.DataObject, drafts: list[int], sampled: int) -> None:
        """Run one round of speculative decoding; some of the draft tokens are accepted."""
        request = self.request(data, claimed=True)
        request.both("extend", drafts)
        if self.pair.fetch([request]) is None:
            return
        n = request.model.end_idx - data.draw(st.integers(0, len(drafts)), "rejected")
        self.pair.truncate(request, n)
        request.both("rewind", n)
        request.both("update", sampled)
        self.pair.step([request])

    @precondition(has_requests)
    @rule(data=st.data(), claimed=st.booleans())
    def shared_prefixes(self, data: st.DataObject, claimed: bool) -> None:
        self.pair.shared_prefixes(self.batch(data, claimed=claimed))

    # -- calls -----------------------------------------------------------------------------------
    @precondition(has_requests)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        self.pair.claim(self.request(data), self.replica(data))

    @precondition(has_requests)
    @rule(data=st.data(), num_steps=NUM_STEPS, options=OPTIONS)
    def reserve(self, data: st.DataObject, num_steps: int, options: Any) -> None:
        self.pair.reserve(self.request(data, claimed=True), num_steps, **options)

    @precondition(has_requests)
    @rule(data=st.data(), num_steps=NUM_STEPS)
    def reserve_batch(self, data: st.DataObject, num_steps: int) -> None:
        self.pair.reserve_batch(self.batch(data, claimed=True), num_steps)

    @precondition(has_requests)
    @rule(data=st.data(), num_steps=NUM_STEPS, claimed=st.booleans())
    def fetch(self, data: st.DataObject, num_steps: int, claimed: bool) -> None:
        self.pair.fetch(self.batch(data, claimed=claimed), num_steps)

    @precondition(has_requests)
    @rule(data=st.data(), claimed=st.booleans())
    def step(self, data: st.DataObject, claimed: bool) -> None:
        self.pair.step(self.batch(data, claimed=claimed))

    @precondition(has_requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pair.release(self.request(data))

    @precondition(has_requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Release a request and claim it again, perhaps on another replica."""
        request = self.request(data, claimed=True)
        self.pair.release(request)
        self.pair.claim(request, self.replica(data))
        self.pair.reserve(request)

    @precondition(has_requests)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        model = self.request(data).model
        cut = len(model.ids) - data.draw(st.integers(0, len(model.ids)), "cut")
        self.pair.pin(model.ids[:cut], (model.extra_key, model.cache_salt), self.replica(data))

    @precondition(has_requests)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        model = self.request(data).model
        cut = len(model.ids) - data.draw(st.integers(0, len(model.ids)), "cut")
        self.pair.touch(model.ids[:cut], (model.extra_key, model.cache_salt), self.replica(data))

    @precondition(lambda self: bool(self.pair.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pair.unpin(data.draw(st.integers(0, len(self.pair.pins) - 1), "pin"))

    @precondition(lambda self: any(self.pair.model.cache))
    @rule(now=st.integers(0, 3))
    def reset_prefix_cache(self, now: int) -> None:
        # Pages that requests hold over a reset are not hit again: see test_reset.py.
        if now == 0 and not (self.pair.model.claims or self.pair.pins):
            assert self.pair.core.reset_prefix_cache()
            self.pair.model.reset()

    @precondition(has_requests)
    @rule(data=st.data())
    def invalid_call(self, data: st.DataObject) -> None:
        core, request = self.pair.core, self.request(data)
        name, replicas = request.request_id, core.num_replicas
        calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
            "no such replica": (IndexError, lambda: core.external_claim("new", replicas)),
            "not claimed": (kvcore.RequestNotFoundError, lambda: core.release("new")),
            "no steps": (ValueError, lambda: core.maybe_reserve(request.core, 0)),
            "twice": (ValueError, lambda: core.fetch([request.core, request.core])),
            "pinned nowhere": (IndexError, lambda: core.pin([1, 2], replica_idx=replicas)),
            "matched nowhere": (IndexError, lambda: core.match_prefix([1], replica_idx=replicas)),
            "parent unknown": (
                kvcore.RequestNotFoundError,
                lambda: core.fork("new", kvcore.TextGenerationContext("newer", [1])),
            ),
            "truncated unknown": (kvcore.RequestNotFoundError, lambda: core.truncate("new", 0)),
            "table of tokens": (ValueError, lambda: core.match_prefix(np.zeros((2, 2), np.int32))),
        }
        if core.contains(name):
            claim = kvcore.AlreadyClaimedError, lambda: core.external_claim(name, 0)
            calls["claimed twice"] = claim
        expected, call = calls[data.draw(st.sampled_from(sorted(calls)), "call")]
        with pytest.raises(expected):
            call()

    # -- after each rule -------------------------------------------------------------------------
    @invariant()
    def agrees_with_the_reference(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        """After all releases the pool is full."""
        if not hasattr(self, "pair"):
            return
        while self.pair.pins:
            self.pair.unpin(0)
        for request in self.pair.requests:
            if self.pair.core.contains(request.request_id):
                self.pair.release(request)
        self.pair.check()
        core = self.pair.core
        assert core.num_free_blocks == core.num_replicas * core.total_num_pages
        core.reset_prefix_cache()
        assert all(self.pair.core.match_prefix(list(t), *ns) == 0 for ns, t in self.pair.known)


TestPagedManagerMachine = PagedManagerMachine.TestCase
TestPagedManagerMachine.settings = machine_settings(examples=150, steps=40)
