# SPDX-License-Identifier: Apache-2.0
"""One process of a soak: serve requests with a disk and a server, and check all that is read.

    python tests/soak/worker.py SHAPE WEIGHTS SEED FOLDER REDIS_URL

Ends at SIGTERM. Each second it prints its counters as a line of JSON.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "traffic"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from digest_model import DigestModel
from grouped_traffic import params_of
from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    PagedKVCacheManager,
    TextGenerationContext,
    TierOptions,
    update_batch,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State

#: Layers of the served models. Processes with different models share the server.
_SHAPES: Final[dict[str, tuple[Any, ...]]] = {
    "flat": (FullAttention([0, 1]),),
    "windows": (FullAttention([0]), SlidingWindow([1], 5), ChunkedLocal([2], 6)),
    "states": (FullAttention([0]), State([1], {"s": ((2,), "float32")}, 8)),
}

_REFUSALS = (CapacityError, InsufficientBlocksError)
_VOCABULARY = 50
_LONGEST = 120  # tokens of a request


class JumpingClock:
    """A clock whose seconds sometimes jump back or forward, by up to an hour."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._ahead = draw, 0.0

    def __call__(self) -> float:
        if self._draw.random() < 0.001:
            self._ahead = self._draw.choice([-3600.0, -1.0, 0.0, 1.0, 3600.0])
        return time.monotonic() + self._ahead


class Worker:
    """Serve random requests; `weights` is the first value of the model's digests."""

    def __init__(self, shape: int, weights: int, seed: int, folder: str, url: str) -> None:
        self._draw = random.Random(seed)
        name, groups = [*_SHAPES.items()][shape]
        shared = random.Random(7)  # the same prompts in every process
        self._prompts = [shared.choices(range(_VOCABULARY), k=60) for _ in range(12)]
        self._tells = self._draw.random() < 0.5
        self.manager = PagedKVCacheManager(
            params_of(*groups),
            max_batch_size=8,
            max_seq_len=_LONGEST + 8,
            num_pages=160,
            eviction=self._draw.choice(["lru", "arc", "priority"]),
            clock=JumpingClock(self._draw),
            tiers=TierOptions(
                ["host:16KiB", f"disk:{folder}:2MiB", f"{url}?timeout=0.3&ttl=60"],
                fingerprint=f"{name}, weights {weights}",
                async_onload=self._draw.random() < 0.5,
                store_timeout=1.0,
            ),
            events=self._tells,
        )
        self._model = DigestModel(self.manager, weights)
        self._live: list[TextGenerationContext] = []
        self.requests = self.steps = self.cached = 0
        self.longest = 0.0  # seconds of a call

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.longest = max(self.longest, time.monotonic() - began)

    def _begin(self) -> None:
        self.requests += 1
        prompt = self._draw.choice(self._prompts)[: self._draw.randint(1, 60)]
        tail = self._draw.choices(range(_VOCABULARY), k=self._draw.randint(1, 20))
        context = TextGenerationContext(
            self.requests,
            prompt + tail,
            cache_salt=self._draw.choice([None, None, "a"]),
            priority=self._draw.choice([20, 50, 80]),
            ttl=self._draw.choice([None, 0.5]),
        )
        self.manager.claim(context.request_id)
        self._live.append(context)
        with self._timed():
            if self.manager.maybe_reserve(context):
                self.cached += context.start_idx

    def _fork(self) -> None:
        parent = self._draw.choice(self._live)
        written = parent.tokens[: parent.start_idx].tolist()
        self.requests += 1
        token = self._draw.randrange(_VOCABULARY)
        child = TextGenerationContext(
            self.requests, [*written, token], cache_salt=parent.cache_salt
        )
        self.manager.fork(parent.request_id, child)
        self._live.append(child)

    def _step(self) -> None:
        batch = [each for each in self._live if not each.pending or self._draw.random() < 0.1]
        if not batch:
            return
        with self._timed():
            (inputs,) = self.manager.fetch(batch)
        self._model.run(inputs, batch)
        update_batch(batch, self._draw.choices(range(_VOCABULARY), k=len(batch)))
        with self._timed():
            self.manager.step(batch)
        self.steps += 1
        for context in [each for each in batch if each.end_idx > _LONGEST]:
            self._release(context)

    def _release(self, context: TextGenerationContext | None = None) -> None:
        if self._live:
            context = context or self._draw.choice(self._live)
            self._live.remove(context)
            with self._timed():
                self.manager.release(context.request_id)

    def _ask(self) -> None:
        with self._timed():
            self.manager.prefetch(self._draw.choice(self._prompts))
        if self._tells:
            self.manager.take_events()

    def _rare(self) -> None:
        self.manager.check_integrity()
        if self._draw.random() < 0.2:
            self.manager.flush(0.2)

    def turn(self) -> None:
        """Run one random operation."""
        verbs: list[Callable[[], None]] = [self._step] * 12
        verbs += [self._begin] * 2 + [self._fork, self._release, self._ask]
        verb = self._rare if self._draw.random() < 0.01 else self._draw.choice(verbs)
        try:
            self.manager.poll()
            self._begin() if len(self._live) < 2 else verb()
        except _REFUSALS:
            self._release()

    def line(self, *, is_last: bool = False) -> str:
        """Return the counters as a line of JSON."""
        tiers = self.manager.tier_metrics
        return json.dumps(
            {
                "requests": self.requests,
                "steps": self.steps,
                "positions": self._model.read,
                "cached": self.cached,
                "longest": round(self.longest, 3),
                **{f"{name} hits": tier.hits for name, tier in tiers.items()},
                **{f"{name} corrupt": tier.corrupt for name, tier in tiers.items()},
                **{f"{name} failures": tier.errors + tier.timeouts for name, tier in tiers.items()},
                "is_last": is_last,
            }
        )

    def end(self) -> None:
        """Release all requests, and check that no page is lost."""
        while self._live:
            self._release()
        self.manager.flush(5)
        self.manager.reset_prefix_cache()
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.manager.total_num_pages
        print(self.line(is_last=True), flush=True)
        self.manager.close()


def main() -> None:
    """Serve until SIGTERM arrives."""
    shape, weights, seed, folder, url = sys.argv[1:]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    worker = Worker(int(shape), int(weights), int(seed), folder, url)
    told = time.monotonic()
    print(worker.line(), flush=True)
    while not asked:
        worker.turn()
        if time.monotonic() > told + 1:
            told = time.monotonic()
            print(worker.line(), flush=True)
    worker.end()


if __name__ == "__main__":
    main()
