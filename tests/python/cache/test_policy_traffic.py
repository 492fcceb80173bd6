# SPDX-License-Identifier: Apache-2.0
"""Seeded runs of all calls with each eviction policy evict the reference's victims."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import slow_but
from paired_request import Request
from reference_policies import RANKED
from test_random_traffic import Traffic

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

POLICIES = [name for name in RANKED if name != "lru"]


class PolicyTraffic(Traffic):
    """Requests with priorities, some with a time limit, while time passes."""

    def terms(self) -> dict[str, Any]:
        terms: dict[str, Any] = {"priority": self.draw.choice([10, 50, 50, 90])}
        if self.draw.random() < 0.5:
            terms["ttl"] = self.draw.randint(1, 40)
        return terms

    def arrive(self) -> Request:
        draw, new, terms = self.draw, self.pair.new, self.terms()
        self.pair.model.now += draw.randint(0, 3)

        def new_with_terms(*args: Any, **rest: Any) -> Request:
            return new(*args, **rest, terms=terms)

        self.pair.new = new_with_terms  # type: ignore[method-assign]
        try:
            return super().arrive()
        finally:
            self.pair.new = new  # type: ignore[method-assign]

    def touch(self) -> None:
        request = self.one(claimed=False)
        if request is not None:
            model = request.model
            tokens = model.ids[: self.draw.randint(0, len(model.ids))]
            self.pair.touch(tokens, (model.extra_key, model.cache_salt), self.replica())

    VERBS = Traffic.VERBS + [touch] * 2  # type: ignore[list-item]


class HintTraffic(PolicyTraffic):
    """Requests with hints, which change while the requests run."""

    HINTS = (None, None, "soon", "later", "never", 3, 20)

    def terms(self) -> dict[str, Any]:
        self.pair.model.now += self.draw.choice([0, 0, 0, 20])
        return super().terms() | {"returns_in": self.draw.choice(self.HINTS)}

    def change_hint(self) -> None:
        request = self.one(claimed=True)
        if request is not None and not request.foreign:
            request.core.returns_in = hint = self.draw.choice(self.HINTS)
            self.pair.model.terms[request.request_id]["returns_in"] = hint

    VERBS = PolicyTraffic.VERBS + [change_hint] * 2  # type: ignore[list-item]


@pytest.mark.parametrize("seed", slow_but([301], [301, 305]))
@pytest.mark.parametrize("eviction", POLICIES)
def test_victims_are_those_of_the_reference(eviction: str, seed: int) -> None:
    PolicyTraffic(seed, eviction).play(150)


@pytest.mark.parametrize("seed", slow_but(range(321, 326), range(320, 340)))
def test_hints_choose_the_victims_of_the_reference(seed: int) -> None:
    HintTraffic(seed, "hinted").play(400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(310, 320))
@pytest.mark.parametrize("eviction", POLICIES)
def test_victims_of_long_runs_are_those_of_the_reference(eviction: str, seed: int) -> None:
    PolicyTraffic(seed, eviction).play(400)


def test_runs_evict_what_was_used_again() -> None:
    traffic = PolicyTraffic(301, "slru")
    traffic.play(300)
    metrics = traffic.pair.core.metrics
    assert min(metrics.cache_tokens, metrics.evicted_pages) > 10
    assert any(past.uses > 1 for _, past in traffic.pair.model.past.values())
