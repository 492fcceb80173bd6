# SPDX-License-Identifier: Apache-2.0
"""Random traffic: a reader of the events always has the exact set of cached pages."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from event_mirror import Mirror, manager_of
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.errors import KVCacheError
from kvcore.keys import page_keys

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

SALTS = (None, "a", "b")
IMAGES = (None, [(1, 4, b"cat")], [(1, 4, b"dog"), (6, 1, b"cat")])


class Traffic:
    """Requests with shared prefixes; the test can query every prompt that was ever cached."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        params = KVCacheParams(
            "float32", 1, 4, 1, page_size=2, enable_prefix_caching=True, data_parallel_degree=2,
            n_devices=2,
        )  # fmt: skip
        self.options: dict[str, Any] = {
            "devices": ["cpu", "cpu"],
            "num_pages": 24,
            "max_batch_size": 16,
        } | options
        self.mgr: PagedKVCacheManager = manager_of(params, **self.options)
        self.params = params
        self.mirror = Mirror()
        self.live: list[TextGenerationContext] = []
        self.asked: list[tuple[list[int], str | None, Any]] = []
        self.names = 0

    def begin(self) -> None:
        if len(self.live) == 6:
            return
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(8, 14))]
        salt, images = self.rng.choice(SALTS), self.rng.choice(IMAGES)
        self.names += 1
        ctx = TextGenerationContext(self.names, tokens, cache_salt=salt, extra_keys=images)
        self.mgr.claim(self.names, self.rng.randrange(2))
        self.live.append(ctx)

    def step(self) -> None:
        ready = []
        for ctx in self.live:
            if len(ctx.tokens) < 40 and self.rng.random() < 0.7 and self.mgr.maybe_reserve(ctx):
                ready.append(ctx)
        ready.sort(key=lambda ctx: self.mgr.get_replica(ctx))
        if not ready:
            return
        with contextlib.suppress(KVCacheError):
            self.mgr.fetch(ready)
            for ctx in ready:
                ctx.update(self.rng.randrange(2))
            self.mgr.step(ready)
        for ctx in ready:
            self.asked.append((ctx.tokens.tolist(), ctx.cache_salt, ctx.extra_keys))

    def fork(self) -> None:
        if not self.live or len(self.live) == 6:
            return
        parent = self.rng.choice(self.live)
        if parent.start_idx == 0:
            return
        self.names += 1
        child = TextGenerationContext(
            self.names,
            parent.tokens,
            cache_salt=parent.cache_salt,
            extra_keys=parent.extra_keys,
        )
        with contextlib.suppress(KVCacheError, ValueError):
            self.mgr.fork(parent.request_id, child)
            self.live.append(child)

    def release(self) -> None:
        if self.live:
            ctx = self.live.pop(self.rng.randrange(len(self.live)))
            self.mgr.release(ctx.request_id)

    def act(self) -> None:
        verb = self.rng.choices(
            (self.begin, self.step, self.fork, self.release, self.mgr.reset_prefix_cache),
            (6, 12, 2, 5, 0.2),
        )[0]
        verb()

    def check(self) -> None:
        self.mirror.read(self.mgr.take_events())
        for replica in range(2):
            stats = self.mgr._core.stats(replica)
            assert len(self.mirror.of(replica)) == stats.cached_pages
            assert len(self.mirror.of(replica, "CPU")) == stats.host_cached_pages
        for tokens, salt, images in self.rng.sample(self.asked, min(5, len(self.asked))):
            options: dict[str, Any] = {"cache_salt": salt, "extra_keys": images}
            keys = page_keys(tokens, 2, seed=self.mgr.fingerprint, **options)
            for replica in range(2):
                known = self.mirror.of(replica)
                hit = next((i for i, key in enumerate(keys) if key not in known), len(keys))
                found = self.mgr.match_prefix(tokens, None, salt, replica, extra_keys=images)
                assert found == 2 * hit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dedup": False, "partial_page_reuse": False},
        {"tiers": ["host:1KiB"]},
        {"tiers": ["host:1KiB"], "write_policy": "write_back"},
        {"events": 20, "tiers": ["host:1KiB"]},
    ],
    ids=["device", "no dedup", "host", "write back", "overflow"],
)
def test_a_reader_of_events_knows_what_is_cached(options: dict[str, Any], seed: int) -> None:
    traffic = Traffic(seed, **options)
    for _ in range(300):
        traffic.act()
        traffic.check()


@pytest.mark.parametrize("seed", range(3))
def test_what_a_snapshot_brings_is_told(seed: int, tmp_path: Any) -> None:
    traffic, other = Traffic(seed), Traffic(seed)
    for _ in range(200):
        traffic.act()
        other.act()
    traffic.mgr.snapshot(tmp_path / "cache")
    other.mgr.restore(tmp_path / "cache")
    other.asked += traffic.asked
    other.check()
