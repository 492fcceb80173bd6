# SPDX-License-Identifier: Apache-2.0
"""Threads share a manager with groups, states and tenants; layers read the written values."""

from __future__ import annotations

import random
from typing import Any

import pytest

from builders import in_groups
from digest_model import DigestModel
from grouped_traffic import params_of
from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    PagedKVCacheManager,
    TextGenerationContext,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.policies import BY_NAME
from seen_resets import SeenResets
from together import THREADS, run_together, switch_often

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

__all__ = ["switch_often"]

pytestmark = pytest.mark.usefixtures("switch_often")

_ARRAYS = {"s": ((2,), "float32")}
_SHAPES: dict[str, tuple[Any, ...]] = {
    "all kinds": (
        FullAttention([0]),
        SlidingWindow([1], 5),
        ChunkedLocal([2], 6),
        State([3], _ARRAYS, 8),
    ),
    "states": (FullAttention([0]), State([1], _ARRAYS, 4)),
    "windows": (SlidingWindow([0], 4), SlidingWindow([1], 7)),
}
_REFUSALS = (CapacityError, InsufficientBlocksError, ValueError)
_PARENTS = ("p0", "p1")  # all threads may fork these


def _prompt(number: int, n: int) -> list[int]:
    return [number * 1000 + i for i in range(n)]


class Worker:
    """Serves its own requests; all threads share the prompts and two parents."""

    def __init__(self, resets: SeenResets, number: int) -> None:
        manager: PagedKVCacheManager = resets.manager
        self.manager, self.resets, self.number = manager, resets, number
        self.draw = random.Random(number)
        self.model = DigestModel(manager)
        self.live: list[TextGenerationContext] = []
        self.names = self.forks = self.steps = 0

    def _context(self, tokens: list[int]) -> TextGenerationContext:
        self.names += 1
        draw, name = self.draw, (self.number, self.names)
        tenant, priority = draw.choice([None, "a", "b"]), draw.choice([20, 50, 80])
        return TextGenerationContext(name, tokens, tenant=tenant, priority=priority)

    def begin(self) -> None:
        tail = [self.draw.randrange(3) for _ in range(self.draw.randint(1, 5))]
        begin = _prompt(self.draw.randrange(3), self.draw.randrange(14))
        context = self._context(begin + tail)
        self.manager.claim(context.request_id)
        self.live.append(context)

    def fork(self) -> None:
        """Fork a request that all threads fork, or a request of this thread."""
        if len(self.live) > 3:
            return
        if self.live and self.draw.random() < 0.5:
            parent = self.draw.choice(self.live)
            written, name = parent.tokens[: parent.start_idx].tolist(), parent.request_id
        else:
            number = self.draw.randrange(2)
            written, name = _prompt(number, 9), _PARENTS[number]
        child = self._context([*written, self.draw.randrange(3)])
        self.manager.fork(name, child)
        self.live.append(child)
        self.forks += 1

    def step(self) -> None:
        batch = [context for context in self.live if self.draw.random() < 0.7]
        if not batch:
            return
        (inputs,) = self.manager.fetch(batch)
        self.model.run(inputs, batch)
        for context in batch:
            context.update(self.draw.randrange(3))
        self.manager.step(batch)
        self.steps += 1
        for context in [context for context in batch if context.end_idx > 40]:
            self.release(context)

    def release(self, context: TextGenerationContext | None = None) -> None:
        if self.live:
            context = context or self.draw.choice(self.live)
            self.live.remove(context)
            self.manager.release(context.request_id)

    def truncate(self) -> None:
        if self.live:
            context = self.draw.choice(self.live)
            n = max(0, context.start_idx - self.draw.randrange(3))
            self.manager.truncate(context.request_id, n)
            if n < context.start_idx:
                context.rewind(n + 1)

    def look(self) -> None:
        prompt = _prompt(self.draw.randrange(3), 13)
        self.resets.check_pin(prompt)
        self.manager.match_prefix(prompt, touch=True)
        held = {name: each.held_pages for name, each in self.manager.tenant_metrics.items()}
        assert held["b"] <= 60, "a tenant stays below its ceiling"
        assert self.manager.state_metrics.available_slots >= 0

    def check(self) -> None:
        self.resets.reset()
        self.manager.check_integrity()

    def run(self, turns: int) -> None:
        verbs = [self.step] * 6 + [self.fork, self.release, self.truncate, self.look]
        for _ in range(turns):
            rare = self.draw.random() < 0.03
            verb = self.check if rare else self.draw.choice(verbs)
            try:
                self.begin() if len(self.live) < 2 else verb()
            except _REFUSALS:
                self.release()
        while self.live:
            self.release()


def _together(shape: str, eviction: str, turns: int) -> None:
    groups = _SHAPES[shape]
    states = {"num_states": 44} if isinstance(groups[-1], State) else {}
    options: dict[str, Any] = {"eviction": eviction, "max_draft_tokens": 2, **states}
    manager = PagedKVCacheManager(
        params_of(*groups, head_dim=1),
        max_batch_size=40,
        max_seq_len=60,
        num_pages=220,
        quotas={"a": (20, None), "b": (0, 60)},
        **in_groups(options),
    )
    model = DigestModel(manager)
    parents = [TextGenerationContext(name, _prompt(i, 9)) for i, name in enumerate(_PARENTS)]
    for context in parents:
        manager.claim(context.request_id)
        while context.start_idx < 9:
            (inputs,) = manager.fetch([context])
            model.run(inputs, [context])
            context.update(1)
            manager.step([context])
    resets = SeenResets(manager)
    workers = [Worker(resets, number) for number in range(THREADS)]
    run_together(lambda number: workers[number].run(turns))
    assert sum(worker.steps for worker in workers) > turns
    assert sum(worker.forks for worker in workers) > 0
    for name in _PARENTS:
        manager.release(name)
    manager.check_integrity()
    assert manager.num_free_blocks == manager.total_num_pages
    assert manager.state_metrics.used_slots == 0
    assert all(each.held_pages == 0 for each in manager.tenant_metrics.values())


@pytest.mark.parametrize(
    ("shape", "eviction"), [("all kinds", "priority"), ("states", "lru"), ("windows", "lfu")]
)
def test_threads_with_groups_states_and_tenants(shape: str, eviction: str) -> None:
    _together(shape, eviction, 80)


@pytest.mark.slow
@pytest.mark.parametrize("eviction", BY_NAME)
@pytest.mark.parametrize("shape", sorted(_SHAPES))
def test_threads_for_long(shape: str, eviction: str) -> None:
    _together(shape, eviction, 500)
