# SPDX-License-Identifier: Apache-2.0
"""Long seeded runs with a host tier: small pools make pages move to the tier and back all the time.

The reference gives the hits, copies and evictions of both tiers; page contents are checked after
each call.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from paired_request import Request
from test_random_traffic import Traffic
from tiered_lockstep import TieredLockstep

ANY_ORDER_OF_CALLS = True  # no engine makes random calls


class TieredTraffic(Traffic):
    """An honest engine: a context's written tokens were fetched before."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.page_size = size = [1, 2, 3, 16][seed % 4]
        self.pair: TieredLockstep = TieredLockstep(
            size,
            draw.choice([5, 8, 12]),
            host_pages=draw.choice([1, 6, 40, 40]),
            replicas=draw.choice([1, 1, 2]),
            dedup=draw.random() < 0.7,
            partial=draw.random() < 0.8,
            threshold=draw.choice([None, 1, 2, 3]),
            max_seq_len=size * draw.choice([12, 30]),
        )
        # Families differ from their first token on, so that each family evicts the others.
        self.families = [[n, *self.runs(draw.randint(1, 4))] for n in range(5)]
        self.seen = collections.Counter[str]()

    def change(self) -> None:
        request = self.one(claimed=False)
        if request is None:
            return
        draw, model = self.draw, request.model
        kind = draw.choice(["extend", "rewind", "chunk"])
        if kind == "extend":
            request.both("extend", [draw.randrange(2) for _ in range(draw.randint(1, 3))])
        elif kind == "chunk":
            active = draw.randint(model.start_idx + 1, model.end_idx)
            request.core.active_idx = model.active_idx = active
        else:
            request.both("rewind", draw.randint(1, model.end_idx))

    def truncate(self) -> None:
        request = self.one()
        if request is not None:
            n = self.draw.randint(0, request.model.end_idx)
            self.pair.truncate(request, n)
            request.both("rewind", max(1, n))

    def visit(self) -> None:
        """Run a prompt of a family and release it."""
        prompt = self.draw.choice(self.families) + self.runs(1)
        request = self.pair.new(prompt[: self.pair.model.max_seq_len])
        self.pair.claim(request, self.replica())
        if request.request_id in self.pair.model.claims:
            self.pair.reserve(request)
            self.iterate([request], 1)
            self.pair.release(request)

    def oldest(self) -> Request:
        return next(r for r in self.pair.requests if r.request_id in self.pair.model.claims)

    def play(self, calls: int) -> None:
        own: dict[Any, Any] = {
            Traffic.change: TieredTraffic.change,
            Traffic.truncate: TieredTraffic.truncate,
        }
        verbs = [own.get(verb, verb) for verb in self.VERBS] + [TieredTraffic.visit] * 24
        verbs += [Traffic.unpin] * 3
        for _ in range(calls):
            while len(self.pair.model.claims) > 1:
                self.pair.release(self.oldest())
            self.draw.choice(verbs)(self)
            self.pair.check()


@pytest.mark.parametrize("seed", range(8))
def test_long_runs_agree_with_the_reference(seed: int) -> None:
    TieredTraffic(seed).play(200)


def test_runs_reach_what_they_are_there_for() -> None:
    seen = collections.Counter[str]()
    for seed in range(100, 106):
        traffic = TieredTraffic(seed)
        traffic.play(150)
        metrics = traffic.pair.core.metrics
        for name in ("h2d_blocks_copied", "d2h_blocks_copied", "evicted_pages", "copied_tokens"):
            seen[name] += getattr(metrics, name)
    assert min(seen.values()) > 10, seen
    assert len(seen) == 4, seen
