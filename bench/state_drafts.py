# SPDX-License-Identifier: Apache-2.0
"""Measure speculative decoding in a model whose layers keep a state.

The time is that of one round of 16 requests, from ``fetch`` to ``step``. The state of a request has
1 MiB in a pool in host memory. There are three cases: without drafts; with 3 drafts that are all
accepted, where each state is copied before the drafts run; and with drafts that are each accepted
with a probability of .7, where most rounds resume from a kept state. The bench runs no model. Other
rows count the runs of a request, and the tokens of these runs per token that the request gets. The
limit of the copies is a bare loop over the same bytes. The last row is a bare loop over the bytes
that kernels would write if each draft had its own slot.
"""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

import kvcore
from harness import Row, main, make_row, plain_row
from kvcore.groups import FullAttention, State

_REQUESTS = 16
_DRAFTS = 3
_SLOT = 1 << 20  # bytes
_PROMPT = 64


@dataclass
class Counts:
    """Counts of the work that the model would do."""

    rounds: int = 0
    run: int = 0  # tokens that the model runs
    yielded: int = 0
    alone: int = 0  # runs of accepted tokens without drafts
    copies: int = 0  # copies of states


class _Engine:
    """Requests that decode in rounds with `drafts` draft tokens."""

    def __init__(self, drafts: int, accepts: float) -> None:
        state = State([1], {"ssm": ((_SLOT // 4,), "float32")})
        params = kvcore.KVCacheParams(
            "float16",
            1,
            8,
            2,
            page_size=16,
            enable_prefix_caching=True,
            groups=(FullAttention([0]), state),
        )
        self.manager = kvcore.PagedKVCacheManager(
            params,
            _REQUESTS,
            1 << 20,
            num_pages=20_000,
            num_states=3 * _REQUESTS,
            max_draft_tokens=drafts,
        )
        self.drafts, self.accepts = drafts, accepts
        self.random = random.Random(1)
        self.counts = Counts()
        self.contexts = []
        for i in range(_REQUESTS):
            prompt = np.random.default_rng(i).integers(0, 30_000, _PROMPT).tolist()
            context = kvcore.TextGenerationContext(i, prompt)
            self.manager.claim(i)
            while context.end_idx == _PROMPT:
                self.manager.fetch([context])
                context.update(1)
                self.manager.step([context])
            self.contexts.append(context)

    def round(self) -> float:
        """Run a round of all requests; return the time of the round in microseconds."""
        manager, contexts, counts = self.manager, self.contexts, self.counts
        known = [context.end_idx for context in contexts]
        for context in contexts:
            if self.drafts:
                context.extend([7] * self.drafts)
        begun = perf_counter_ns()
        manager.fetch(contexts)
        spent = perf_counter_ns() - begun
        for context, end in zip(contexts, known, strict=True):
            counts.rounds += 1
            counts.run += context.active_idx - context.start_idx
            if context.active_idx < context.end_idx:  # accepted tokens run without drafts
                counts.alone += 1
                context.rewind(end)
                context.active_idx = end - 1
                begun = perf_counter_ns()
                context.update(1)
                spent += perf_counter_ns() - begun
                continue
            kept = 0
            while kept < self.drafts and self.random.random() < self.accepts:
                kept += 1
            counts.yielded += kept + 1
            begun = perf_counter_ns()
            if kept < self.drafts:
                manager.accept(context, end + kept)
            context.update(1)
            spent += perf_counter_ns() - begun
        begun = perf_counter_ns()
        manager.step(contexts)
        return (spent + perf_counter_ns() - begun) / 1000


def _copies(slots: int, rounds: int) -> float:
    """Return the microseconds of copying ``slots`` slots: the median of the rounds."""
    source, target = (np.zeros((slots, _SLOT), np.uint8) for _ in range(2))
    times = []
    for _ in range(rounds):
        begun = perf_counter_ns()
        target[:] = source
        times.append((perf_counter_ns() - begun) / 1000)
    return sorted(times)[len(times) // 2]


def measure(options: Namespace) -> list[Row]:
    """Measure rounds, and count their runs and tokens."""
    rounds = 20 if options.quick else 200
    copied, written = _copies(_REQUESTS, rounds), _copies(_REQUESTS * _DRAFTS, rounds)
    found = []
    for key, name, drafts, accepts, limit in (
        ("none", "no drafts", 0, 1.0, None),
        ("accepted", f"{_DRAFTS} drafts, all accepted", _DRAFTS, 1.0, copied),
        ("mixed", f"{_DRAFTS} drafts, each accepted with .7", _DRAFTS, 0.7, copied),
    ):
        engine = _Engine(drafts, accepts)
        samples = [engine.round() for _ in range(rounds)]
        more = {"limit": limit, "limit_name": "one slot of each copied"} if limit else {}
        text = f"round of {_REQUESTS} requests, states of 1 MiB, {name}"
        found.append(make_row(f"state_drafts.{key}", text, samples, **more))
        counts = engine.counts
        for what, value in (
            ("tokens for each run of a request", counts.yielded / counts.rounds),
            ("tokens run for each token", counts.run / counts.yielded),
            ("runs without drafts, of all", counts.alone / counts.rounds),
        ):
            found.append(
                plain_row(f"state_drafts.{key}.{what.split()[0]}", what, value, "", rounds)
            )
    other = f"the other way: {_DRAFTS} more slots of each written, 1 MiB"
    found.append(plain_row("state_drafts.slots", other, written, "us", rounds))
    return found


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
