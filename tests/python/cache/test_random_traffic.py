# SPDX-License-Identifier: Apache-2.0
"""Long seeded runs of traffic against the reference: pools that stay full, prompts that overlap.

Hypothesis finds short failures; these runs make thousands of calls on one manager. Most calls hit,
evict, copy, swap, or are refused for lack of pages.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable
from typing import Any

import pytest

from lockstep import Lockstep
from paired_request import Request

ANY_ORDER_OF_CALLS = True  # no engine makes random calls


class Traffic:
    """Random calls over a few families of prompts."""

    def __init__(self, seed: int, eviction: str = "lru") -> None:
        draw = self.draw = random.Random(seed)
        self.page_size = size = [1, 2, 3, 16, 128, 2, 3, 4][seed % 8]
        self.pair = Lockstep(
            size,
            draw.choice([4, 6, 10, 16, 24]),
            replicas=draw.choice([1, 1, 2, 3]),
            caching=draw.random() < 0.95,
            dedup=draw.random() < 0.7,
            partial=draw.random() < 0.8,
            pool=draw.random() < 0.4,
            max_seq_len=size * draw.choice([12, 30]),
            eviction=eviction,
        )
        self.families = [self.runs(draw.randint(2, 6)) for _ in range(draw.randint(1, 3))]
        self.seen = collections.Counter[str]()

    def runs(self, count: int) -> list[int]:
        draw = self.draw
        return [
            token
            for token in (draw.randrange(3) for _ in range(count))
            for _ in range(draw.randint(1, self.page_size + self.page_size // 2 + 1))
        ]

    def one(self, *, claimed: bool = True) -> Request | None:
        requests = self.pair.requests[-12:]
        if claimed:
            requests = [r for r in requests if r.request_id in self.pair.model.claims]
        return self.draw.choice(requests) if requests else None

    def batch(self) -> list[Request]:
        rows = [self.one() for _ in range(self.draw.randint(0, 5))]
        return list(dict.fromkeys(row for row in rows if row is not None))

    def steps(self) -> int:
        return self.draw.choice([1, 1, 1, 1, 2, 5])

    def options(self) -> dict[str, Any]:
        """Return the options of a reservation, mostly no option."""
        draw, model = self.draw, self.pair.model
        most = {
            "max_hit": 6 * model.page_size,
            "keep_free": model.num_pages,
            "must_fit": min(model.num_pages * model.page_size, model.max_seq_len) + 1,
        }
        return {name: draw.randint(0, n) for name, n in most.items() if draw.random() < 0.15}

    def replica(self) -> int:
        return self.draw.randrange(len(self.pair.model.cache))

    # -- calls -----------------------------------------------------------------------------------
    def arrive(self) -> Request:
        draw = self.draw
        family = draw.choice(self.families)
        tokens = family[: draw.randint(0, len(family))] + self.runs(draw.randint(0, 2))
        tokens = tokens[: self.pair.model.max_seq_len] or [0]
        ns = (draw.choice(["", "a"]), None) if draw.random() < 0.1 else (None, None)
        active = draw.randint(1, len(tokens)) if draw.random() < 0.2 else None
        foreign = draw.random() < 0.25
        request = self.pair.new(tokens, foreign=foreign, ns=ns, active_idx=active)
        self.pair.claim(request, self.replica())
        return request

    def serve(self) -> None:
        request = self.arrive()
        if request.request_id in self.pair.model.claims:
            self.iterate([request], self.steps())
            if self.draw.random() < 0.7:
                self.pair.release(request)

    def run(self) -> None:
        batch, num_steps = self.batch(), self.steps()
        if self.draw.random() < 0.6:
            batch = [r for r in batch if self.pair.reserve(r, num_steps, **self.options())]
        self.iterate(batch, num_steps)

    def iterate(self, batch: list[Request], num_steps: int) -> None:
        if self.pair.fetch(batch, num_steps) is None:
            self.seen["fetch refused"] += 1
            return
        for request in batch:
            for _ in range(num_steps):
                request.both("update", self.draw.randrange(2))
        self.pair.step(batch)

    def reserve(self) -> None:
        request = self.one(claimed=self.draw.random() < 0.95)
        if request is None:
            return
        options = self.options()
        if self.pair.reserve(request, self.steps(), **options) is False:
            self.seen["reserve refused"] += 1
            self.seen["margin refused"] += self.pair.core.plan(request.core).fits

    def reserve_batch(self) -> None:
        self.pair.reserve_batch(self.batch(), self.steps())

    def fetch(self) -> None:
        self.pair.fetch(self.batch(), self.steps())

    def step(self) -> None:
        self.pair.step(self.batch())

    def release(self) -> None:
        request = self.one()
        if request is not None:
            self.pair.release(request)

    def preempt(self) -> None:
        request = self.one(claimed=False)
        if request is not None:
            self.pair.release(request)
            self.pair.claim(request, self.replica())
            self.pair.reserve(request, self.steps(), **self.options())

    def change(self) -> None:
        request = self.one(claimed=False)
        if request is None:
            return
        draw, model = self.draw, request.model
        kind = draw.choice(["update", "extend", "rewind", "chunk", "chunk"])
        if kind == "update":
            request.both("update", draw.randrange(2))
        elif kind == "extend":
            request.both("extend", [draw.randrange(2) for _ in range(draw.randint(1, 3))])
        elif kind == "chunk":
            active = draw.randint(model.start_idx + 1, model.end_idx)
            request.core.active_idx = model.active_idx = active
        else:
            request.both("rewind", draw.randint(1, model.end_idx))

    def fork(self) -> None:
        parent = self.one()
        if parent is None:
            return
        draw, model = self.draw, parent.model
        cut = model.start_idx if draw.random() < 0.8 else draw.randint(1, model.end_idx)
        children = [
            self.pair.new(
                model.ids[:cut] + [draw.randrange(2) for _ in range(draw.randint(1, 3))],
                foreign=draw.random() < 0.25,
                ns=(model.extra_key, model.cache_salt),
            )
            for _ in range(draw.randint(1, 3))
        ]
        self.pair.fork(parent, children)
        self.seen["forked"] += self.pair.core.contains(children[0].request_id)
        self.pair.shared_prefixes(self.batch())
        if draw.random() < 0.5:
            batch = [r for r in (*children, parent) if r.request_id in self.pair.model.claims]
            self.iterate(batch, self.steps())

    def truncate(self) -> None:
        request = self.one()
        if request is not None:
            n = self.draw.randint(0, request.model.end_idx)
            self.pair.truncate(request, n)
            if n > 0 and self.draw.random() < 0.8:
                request.both("rewind", n)

    def speculate(self) -> None:
        batch = self.batch()
        for request in batch:
            request.both("extend", [self.draw.randrange(2) for _ in range(4)])
        if self.pair.fetch(batch) is None:
            return
        for request in batch:
            n = request.model.end_idx - self.draw.randint(0, 4)
            self.pair.truncate(request, n)
            request.both("rewind", n)
            request.both("update", self.draw.randrange(2))
        self.pair.step(batch)

    def pin(self) -> None:
        request = self.one(claimed=False)
        if request is not None and len(self.pair.pins) < 3:
            model = request.model
            tokens = model.ids[: self.draw.randint(0, len(model.ids))]
            self.pair.pin(tokens, (model.extra_key, model.cache_salt), self.replica())

    def unpin(self) -> None:
        if self.pair.pins:
            self.pair.unpin(self.draw.randrange(len(self.pair.pins)))

    def reset(self) -> None:
        # Pages that requests hold over a reset are not hit again: see test_reset.py.
        if self.draw.random() < 0.05 and not (self.pair.model.claims or self.pair.pins):
            assert self.pair.core.reset_prefix_cache()
            self.pair.model.reset()

    VERBS = (
        [serve] * 6 + [run] * 6 + [arrive] * 2 + [reserve] * 4 + [reserve_batch, fetch, step]
        + [release] * 3 + [preempt] * 2 + [change] * 3 + [fork] * 3 + [truncate, speculate]
        + [pin, unpin, reset]
    )  # fmt: skip

    def play(self, calls: int) -> None:
        for _ in range(calls):
            self.draw.choice(self.VERBS)(self)
            self.pair.check()


@pytest.mark.parametrize("seed", range(24))
def test_long_runs_agree_with_the_reference(seed: int) -> None:
    Traffic(seed).play(250)


def totals(runs: Iterable[Traffic]) -> dict[str, Any]:
    seen = collections.Counter[str]()
    for traffic in runs:
        metrics = traffic.pair.core.metrics
        seen.update(traffic.seen)
        for name in ("cache_tokens", "copied_tokens", "evicted_pages"):
            seen[name] += getattr(metrics, name)
    return seen


def test_runs_reach_what_they_are_there_for() -> None:
    runs = [Traffic(seed) for seed in range(100, 106)]
    for traffic in runs:
        traffic.play(150)
    seen = totals(runs)
    for name in (
        "cache_tokens",
        "copied_tokens",
        "evicted_pages",
        "forked",
        "fetch refused",
        "reserve refused",
        "margin refused",
    ):
        assert seen[name] > 10, seen
