# SPDX-License-Identifier: Apache-2.0
"""Promises of reservations with bounds, for random groups, tiers, states and quotas.

A plan predicts `reserve`. "No" changes nothing and evicts nothing. "Yes" leaves `keep_free` pages,
and the tokens of `must_fit` fit afterwards, chunk by chunk, if no other request takes pages.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from grouped_traffic import manager_of, params_of, with_host_tier
from kvcore import CapacityError, KVCacheParams, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State
from state_model import state_params

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

STATE = {"s": ((2,), "float32")}


def drawn_params(kind: str, rng: random.Random) -> KVCacheParams:
    span, page = rng.choice((2, 3, 5, 8, 9)), rng.choice((1, 2, 4))
    full, window = FullAttention([0]), SlidingWindow([1], span)
    groups: dict[str, list[Any]] = {
        "full": [full],
        "full and window": [full, window],
        "window": [SlidingWindow([0], span)],
        "full and chunks": [full, ChunkedLocal([1], span)],
        "chunks": [ChunkedLocal([0], span)],
        "two windows": [full, window, SlidingWindow([2], rng.choice((3, 6, 11)))],
        "states": [full, State([1], STATE, rng.choice((None, 8)))],
        "states and window": [full, window, State([2], STATE, rng.choice((None, 8)))],
    }
    if "states" in kind:
        params = state_params(*groups[kind])
    else:
        params = params_of(*groups[kind], page_size=page)
    host = rng.choice((0, 8, 30))
    return with_host_tier(params, host) if host else params


class Promises:
    """A manager, its requests, and the counts of accepted and refused reservations."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.pages = rng.randrange(16, 50)
        options: dict[str, Any] = {"reserve_chunks": rng.random() < 0.7, "max_batch_size": 8}
        if rng.random() < 0.3:
            options["partial_page_reuse"] = rng.choice((False, True))
        self.tenants: list[str | None] = [None]
        if rng.random() < 0.5:
            most = rng.choice((None, rng.randrange(8, self.pages)))
            options["quotas"] = {"t": (rng.randrange(4), most), "u": (rng.randrange(4), None)}
            self.tenants += ["t", "u", "t"]
        if "states" in kind:
            options["num_states"] = rng.randrange(8, 14)
        self.by_chunk = options["reserve_chunks"]
        self.manager = manager_of(drawn_params(kind, rng), self.pages, **options)
        self.base = [[rng.randrange(3) for _ in range(60)] for _ in range(2)]
        self.live: dict[int, TextGenerationContext] = {}
        self.said = {True: 0, False: 0}
        self.text = f"{kind} {seed}"

    def prompt(self) -> list[int]:
        rng = self.rng
        tokens = rng.choice(self.base)[: rng.randrange(1, 60)]
        if rng.random() < 0.5:
            cut = rng.randrange(1, len(tokens) + 1)
            tokens = tokens[:cut] + [rng.randrange(3) for _ in range(rng.randrange(6))]
        return tokens

    def seen(self) -> Any:
        """Return all state that a refusal must not change."""
        manager = self.manager
        return (
            manager.num_free_blocks,
            manager.num_cached_blocks,
            manager.metrics,
            [manager.get_req_blocks(name) for name in self.live],
            [(each.start_idx, each.active_idx) for each in self.live.values()],
            [manager.match_prefix(tokens) for tokens in self.base],
        )

    def step(self, context: TextGenerationContext) -> None:
        self.manager.fetch([context])
        self.manager.take_copies()
        self.manager.take_state_copies()
        context.update(self.rng.randrange(3))
        self.manager.step([context])

    def serve(self, name: int) -> None:
        while self.live and (len(self.live) > 4 or self.rng.random() < 0.4):
            gone = self.rng.choice([*self.live])
            self.manager.release(gone)
            del self.live[gone]
        tokens = self.prompt()
        context = TextGenerationContext(
            name,
            tokens,
            active_idx=self.rng.randrange(1, len(tokens) + 1),
            tenant=self.rng.choice(self.tenants),
        )
        self.manager.claim(name)
        self.live[name] = context
        if not any(self.ask(context, tokens) for _ in range(3)):
            self.manager.release(name)
            del self.live[name]

    def ask(self, context: TextGenerationContext, tokens: list[int]) -> bool:
        rng, manager = self.rng, self.manager
        bounds: dict[str, Any] = {
            "max_hit": rng.choice((None, None, 0, rng.randrange(70))),
            "keep_free": rng.choice((0, 0, rng.randrange(self.pages))),
            "must_fit": rng.choice((None, len(tokens), rng.randrange(len(tokens) + 1))),
        }
        text, before = f"{self.text}: {bounds}", self.seen()
        plan = manager.plan(context, **bounds)
        assert self.seen() == before, text
        try:
            fits = manager.reserve(context, **bounds)
        except CapacityError:
            fits = False
        self.said[fits] += 1
        assert fits is plan.fits, text
        if not fits:
            assert self.seen() == before, text
            return False
        assert context.start_idx == plan.hit_tokens <= (bounds["max_hit"] or plan.hit_tokens), text
        left = before[0] - plan.new_pages - plan.evictable_hit_pages
        assert manager.num_free_blocks == left >= bounds["keep_free"], text
        if self.by_chunk:
            self.grow(context, bounds["must_fit"] or 0, bounds["keep_free"], text)
        elif rng.random() < 0.8:
            self.step(context)
        return True

    def grow(self, context: TextGenerationContext, end: int, keep_free: int, text: str) -> None:
        """Run chunks no longer than the first chunk, while no other request takes pages."""
        longest = context.active_idx - context.start_idx
        while True:
            self.step(context)
            if context.start_idx >= end:
                return
            chunk = self.rng.randrange(1, longest + 1)
            context.active_idx = min(context.start_idx + chunk, context.end_idx, end)
            assert self.manager.reserve(context), text
            assert self.manager.num_free_blocks >= keep_free, text


@pytest.mark.parametrize(
    "kind",
    [
        *("full", "full and window", "window", "full and chunks", "chunks", "two windows"),
        *("states", "states and window"),
    ],
)
def test_reservations_keep_what_they_promise(kind: str) -> None:
    said = {True: 0, False: 0}
    for seed in range(25):
        promises = Promises(kind, seed)
        for name in range(25):
            promises.serve(name)
        said = {answer: said[answer] + promises.said[answer] for answer in said}
    assert min(said.values()) > 100, said
