# SPDX-License-Identifier: Apache-2.0
"""Groups, states, tenants, policies and the host tier at once: invariants hold after every call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
    update_batch,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.policies import BY_NAME

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

_STATE = {"s": ((2,), "float32")}
_SHAPES: tuple[tuple[Any, ...] | None, ...] = (
    (FullAttention([0]), SlidingWindow([1], 4), State([2], _STATE, interval=4)),
    (FullAttention([0]), State([1], _STATE)),
    (FullAttention([0]), SlidingWindow([1], 6), ChunkedLocal([2], 4)),
    None,
)
_TENANTS = (None, "a", "b")


class _Traffic:
    """Random requests with shared prefixes, in a pool that is too small for them."""

    def __init__(self, seed: int, shape: tuple[Any, ...] | None, *, has_host: bool) -> None:
        rng = self.rng = random.Random(seed)
        pages = rng.choice([24, 40, 60])
        swap: dict[str, Any] = {"host_kvcache_swap_space_gb": 0.00001} if has_host else {}
        params = KVCacheParams(
            "float32",
            1,
            4,
            1 if shape is None else len(shape),
            page_size=2,
            enable_prefix_caching=True,
            groups=shape,
            enable_kvcache_swapping_to_host=has_host,
            **swap,
        )
        self.manager = PagedKVCacheManager(
            params,
            max_batch_size=6,
            max_seq_len=60,
            num_pages=pages,
            enable_runtime_checks=True,
            quotas={"a": (pages // 4, None), "b": (0, pages // 2)},
            eviction=rng.choice([*BY_NAME]),
            reserve_chunks=rng.random() < 0.5,
            max_draft_tokens=0 if shape is None else rng.choice([0, 2]),
        )
        self.prompts = [[rng.randrange(2) for _ in range(30)] for _ in range(3)]
        self.live: dict[Hashable, TextGenerationContext] = {}
        self.pins: list[Any] = []
        self.done: Counter[str] = Counter()
        self.names = 0

    def _context(self, tokens: list[int]) -> TextGenerationContext:
        self.names += 1
        tenant, priority = self.rng.choice(_TENANTS), self.rng.choice([20, 50, 80])
        return TextGenerationContext(self.names, tokens, tenant=tenant, priority=priority)

    def begin(self) -> None:
        if len(self.live) == 6:
            return self.release()
        tail = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 6))]
        tokens = self.rng.choice(self.prompts)[: self.rng.randrange(1, 30)] + tail
        context = self._context(tokens)
        if self.rng.random() < 0.3:
            context.active_idx = self.rng.randrange(1, len(tokens) + 1)
        self.manager.claim(context.request_id)
        self.live[context.request_id] = context
        if not self.manager.reserve(context):
            self.release()
        return None

    def step(self) -> None:
        batch = [context for context in self.live.values() if self.rng.random() < 0.7]
        if batch:
            self.manager.fetch(batch)
            tokens = [self.rng.randrange(3) for _ in batch]
            update_batch(batch, np.array(tokens, np.int32))
            self.manager.step(batch)
        for context in batch:
            if context.end_idx > 50:
                self.release(context.request_id)

    def release(self, name: Hashable = None) -> None:
        if self.live:
            name = self.rng.choice(list(self.live)) if name is None else name
            self.manager.release(name)
            del self.live[name]

    def fork(self) -> None:
        if 0 < len(self.live) < 6:
            parent = self.rng.choice(list(self.live.values()))
            written = parent.tokens[: parent.start_idx].tolist()
            child = self._context([*written, self.rng.randrange(3)])
            self.manager.fork(parent.request_id, child)
            self.live[child.request_id] = child

    def truncate(self) -> None:
        for context in list(self.live.values())[:1]:
            n = max(1, context.start_idx - self.rng.randrange(3))
            self.manager.truncate(context.request_id, n)
            context.rewind(n)

    def pin(self) -> None:
        self.pins.append(self.manager.pin(self.rng.choice(self.prompts)[: self.rng.randrange(30)]))
        if len(self.pins) > 2:
            self.pins.pop(0).release()

    def match(self) -> None:
        self.manager.match_prefix(self.rng.choice(self.prompts), touch=self.rng.random() < 0.5)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    def run(self, calls: int) -> None:
        verbs = (self.begin, self.step, self.release, self.fork, self.pin, self.truncate)
        rare = (self.match, self.reset)
        for _ in range(calls):
            verb = self.rng.choice(verbs if self.rng.random() < 0.95 else rare)
            try:
                verb()
            except (InsufficientBlocksError, CapacityError, ValueError) as refused:
                self.done[type(refused).__name__] += 1
                if self.rng.random() < 0.5:
                    self.release()
            else:
                self.done[verb.__name__] += 1
            self.manager.check_integrity()
        for pin in self.pins:
            pin.release()
        while self.live:
            self.release()
        self.manager.check_integrity()


def _mixed(seed: int, calls: int) -> None:
    shape = _SHAPES[seed // 2 % len(_SHAPES)]
    traffic = _Traffic(seed, shape, has_host=seed % 2 == 1)
    traffic.run(calls)
    assert min(traffic.done[verb] for verb in ("begin", "step", "fork", "pin")) > 0, traffic.done
    held = sum(each.held_pages for each in traffic.manager.tenant_metrics.values())
    assert held == 0, "pages are held without a request"


@pytest.mark.parametrize("seed", range(8))
def test_laws_hold_after_every_call(seed: int) -> None:
    _mixed(seed, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_laws_hold_over_many_calls(seed: int) -> None:
    _mixed(seed, 4000)
