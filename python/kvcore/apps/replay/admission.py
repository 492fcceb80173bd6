# SPDX-License-Identifier: Apache-2.0
"""Replay prompts one after another, to measure only the cache."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from kvcore import KVCacheError, TextGenerationContext
from kvcore.apps.replay.hints import VirtualClock
from kvcore.apps.replay.pool import FEWEST_TOKENS
from kvcore.apps.replay.report import REFUSED, ReplayReport, Tally, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvcore import PagedKVCacheManager
    from kvcore.apps.replay.pool import PoolSettings
    from kvcore.apps.replay.timeline import Timeline
    from kvcore.apps.replay.workload import Workload

_ANY_TOKEN = 0
_PROGRESS_EVERY = 64


def replay_admission(
    workload: Workload,
    pool: PoolSettings,
    *,
    timeline: Timeline | None = None,
    chunk: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Admit every request in order, and release it before the next request claims.

    Only prompts count; no output is generated. A request claims, reserves, marks its prompt as
    written, steps (which commits its pages) and is released. A request that might not fit into the
    empty pool is refused. With a disk, the next request waits until the disk has all stored pages,
    so only the times in the report depend on the machine.

    Parameters
    ----------
    workload : Workload
        The requests.
    pool : PoolSettings
        The pool to admit them to.
    timeline : Timeline, optional
        Records samples over time; the unit of time is a request.
    chunk : int, optional
        Maximum number of prompt tokens per step; windows also need pages for these tokens. By
        default a prompt runs in one step.
    on_progress : callable, optional
        Called from time to time with the number of finished requests.

    Returns
    -------
    ReplayReport
        The report, with mode "admission".
    """
    started = perf_counter_ns()
    longest = int(workload.prompt_lengths.max())
    clock = VirtualClock()
    with pool.manager(max_batch_size=1, max_seq_len=longest + 1, clock=clock) as manager:
        replay = AdmissionReplay(workload, pool, manager, clock, timeline, chunk or longest)
        replay.run_all(on_progress)
        return replay.report((perf_counter_ns() - started) / 1e9)


class AdmissionReplay:
    """Serve one request at a time and collect the counts."""

    def __init__(
        self,
        workload: Workload,
        pool: PoolSettings,
        manager: PagedKVCacheManager,
        clock: VirtualClock,
        timeline: Timeline | None,
        chunk: int,
    ) -> None:
        self._workload = workload
        self._pool = pool
        self._timeline = timeline
        self._chunk = max(chunk, FEWEST_TOKENS)
        self._manager = manager
        self._clock = clock
        self._arrivals = (workload.arrivals - workload.arrivals.min()).tolist()
        self._returns = pool.returns(workload)
        self._groups = pool.samples(manager, len(workload))
        self._tiers = pool.tier_hits(manager)
        self._tally = Tally()
        self._take_state_copies = pool.state_copies(manager)
        self._held = 0  # pages of the current request
        self._held_pages = 0  # sum of the pages of all served requests

    def run_all(self, on_progress: Callable[[int], None] | None) -> None:
        """Run every request in order."""
        for index in range(len(self._workload)):
            self.run(index, self._workload.prompt(index))
            if on_progress is not None and index % _PROGRESS_EVERY == 0:
                on_progress(index)

    def run(self, index: int, tokens: NDArray[np.int32]) -> None:
        """Admit and release one request."""
        tally = self._tally
        before = tally.manager_ns
        hit = self._admit(index, tokens)
        tally.step_ns.append(tally.manager_ns - before)
        tally.request_hits.append(hit)
        if self._timeline is not None:
            self._record(index, len(tokens), hit, tally.step_ns[-1])
        if hit == REFUSED:
            tally.refused += 1
            return
        tally.served += 1
        tally.served_prompt_tokens += len(tokens)
        tally.cached_tokens += hit
        tally.cached_pages += hit // self._pool.page_size
        self._held_pages += self._held

    def _record(self, index: int, prompt: int, hit: int, spent_ns: int) -> None:
        assert self._timeline is not None
        held = 0 if hit == REFUSED else self._held
        self._timeline.add_request(index, prompt, max(hit, 0))
        self._timeline.add_step(index, spent_ns)
        self._timeline.add_pages(index, held, self._manager.num_cached_blocks)

    def _admit(self, index: int, tokens: NDArray[np.int32]) -> int:
        """Return the tokens of the request found in the cache, or `REFUSED`."""
        manager, tally = self._manager, self._tally
        hit = REFUSED
        self._clock.now = self._arrivals[index]
        started = perf_counter_ns()
        context = TextGenerationContext(index, tokens, returns_in=self._returns[index])
        replica = self._choose_replica(context)
        tally.manager_ns += perf_counter_ns() - started
        if self._tiers is not None:
            self._tiers.begin(tokens, replica)
        started = perf_counter_ns()
        manager.claim(index, replica)
        try:
            if self._pool.most_pages(len(tokens), self._chunk) <= self._pool.pages_per_replica:
                hit = self._compute(context, len(tokens))
            tally.manager_ns += perf_counter_ns() - started
            if hit != REFUSED:
                self._look(index, len(tokens), hit)
            started = perf_counter_ns()
        finally:
            manager.release(index)
        tally.manager_ns += perf_counter_ns() - started
        if self._tiers is not None:
            self._tiers.flush()
        return hit

    def _compute(self, context: TextGenerationContext, prompt: int) -> int:
        """Run a prompt chunk by chunk; return its cached tokens."""
        hit = REFUSED
        while context.start_idx < prompt:
            self._reserve(context)
            hit = context.start_idx if hit == REFUSED else hit
            context.update(_ANY_TOKEN)
            self._manager.step([context])
            self._take_state_copies()
        return hit

    def _reserve(self, context: TextGenerationContext) -> None:
        if self._chunk < context.active_length:
            context.active_idx = context.start_idx + self._chunk
        if not self._manager.maybe_reserve(context):
            raise KVCacheError(
                f"request {context.request_id} does not fit an idle pool of {self._pool}"
            )
        if context.start_idx % self._pool.hit_tokens:
            self._manager.take_copies()
        self._take_state_copies()

    def _look(self, index: int, prompt: int, hit: int) -> None:
        """Record the held pages of a request whose prompt is computed; this time does not count."""
        self._held = -(-prompt // self._pool.page_size)
        if self._tiers is not None:
            self._tiers.end(index, hit, fits=True)
        if self._groups is not None:
            self._held = self._pool.total_pages - self._manager.num_free_blocks
            self._groups.look(index)

    def _choose_replica(self, context: TextGenerationContext) -> int:
        if self._pool.replicas == 1:
            return 0
        return self._manager.get_or_recommend_replica(context)

    def report(self, wall_seconds: float) -> ReplayReport:
        """Return the report."""
        mean = self._held_pages / max(1, self._tally.served)
        fitting = self._pool.total_pages / mean if mean else 0.0
        return summarize(
            "admission",
            self._workload,
            self._pool,
            self._manager,
            self._tally,
            mean_used_pages=mean,
            concurrency=min(fitting, self._pool.most_running),
            groups=self._groups.reports() if self._groups is not None else (),
            tiers=self._tiers,
            wall_seconds=wall_seconds,
            virtual_seconds=0.0,
        )
