# SPDX-License-Identifier: Apache-2.0
"""Replay a workload through a small inference engine in virtual time.

The engine uses continuous batching, see ``kvcore.scheduler``. The time of a step is the time of its
prompt tokens at the prefill rate plus the time of its decode steps at the decode rate. Only this
clock is simulated: every claim, reserve, fetch, step and release is a call of the real manager.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore import CapacityError, TextGenerationContext, update_batch
from kvcore.apps.replay.arrivals import ArrivalQueue
from kvcore.apps.replay.hints import VirtualClock
from kvcore.apps.replay.report import REFUSED, ReplayReport, Tally, summarize
from kvcore.apps.replay.timing import CallTimer, TimedManager
from kvcore.scheduler import Batch, Request, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvcore import PagedKVCacheManager
    from kvcore.apps.replay.pool import PoolSettings
    from kvcore.apps.replay.timeline import Timeline
    from kvcore.apps.replay.workload import Workload

_PROGRESS_EVERY = 64
_SAMPLE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The speed and the limits of the simulated engine.

    Attributes
    ----------
    concurrency : int
        Maximum number of running requests, over all replicas.
    prefill_rate : float
        Prompt tokens per second.
    decode_rate : float
        Decode steps per second: output tokens per second of one request while no prompt runs.
    chunk : int
        Maximum number of prompt tokens per step.
    decode_steps : int
        Tokens per request in a step without prompts.
    """

    concurrency: int = 256
    prefill_rate: float = 40_000.0
    decode_rate: float = 40.0
    chunk: int = 8_192
    decode_steps: int = 1


def replay_online(
    workload: Workload,
    pool: PoolSettings,
    engine: EngineSettings | None = None,
    *,
    timeline: Timeline | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Serve every request in virtual time.

    A request whose prompt and output together are larger than a replica's pool is refused on
    arrival. All other requests are served, even if they are preempted many times. If layers keep a
    state, at most `PoolSettings.most_running` requests run at a time. With a disk, the hits depend
    on its speed: its time is not simulated, and the replay does not wait for its writes.

    Parameters
    ----------
    workload : Workload
        The requests.
    pool : PoolSettings
        The pool to serve them from.
    engine : EngineSettings, optional
        The speed and the limits of the engine.
    timeline : Timeline, optional
        Records samples over time; the unit of time is a simulated second.
    on_progress : callable, optional
        Called from time to time with the number of finished requests.

    Returns
    -------
    ReplayReport
        The report, with mode "online".
    """
    started = perf_counter_ns()
    engine = engine or EngineSettings()
    longest = int((workload.prompt_lengths + workload.output_lengths).max())
    clock = VirtualClock()
    most = _concurrency(workload, pool, engine)
    with pool.manager(
        max_batch_size=min(most, pool.state_slots or most),
        max_seq_len=longest + engine.decode_steps,
        clock=clock,
    ) as manager:
        replay = _OnlineReplay(workload, pool, engine, manager, clock, timeline, on_progress)
        replay.run()
        return replay.report((perf_counter_ns() - started) / 1e9)


def _concurrency(workload: Workload, pool: PoolSettings, engine: EngineSettings) -> int:
    """Return the maximum number of running requests, over all replicas."""
    return int(min(engine.concurrency, len(workload), pool.most_running))


@dataclass(slots=True, eq=False)
class _Job:
    """State of one request: its index, its arrival time, and the place of its output's end."""

    index: int
    arrival: float
    output_end: int
    has_begun: bool = False


class _OnlineReplay:
    """Add requests to a scheduler as they arrive, run its steps, and collect the counts."""

    def __init__(
        self,
        workload: Workload,
        pool: PoolSettings,
        engine: EngineSettings,
        manager: PagedKVCacheManager,
        clock: VirtualClock,
        timeline: Timeline | None,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._workload = workload
        self._pool = pool
        self._engine = engine
        self._timeline = timeline
        self._on_progress = on_progress
        self._prompt_lengths: list[int] = workload.prompt_lengths.tolist()
        self._output_lengths: list[int] = workload.output_lengths.tolist()
        self._output_ends: list[int] = (workload.output_starts + workload.output_lengths).tolist()
        concurrency = _concurrency(workload, pool, engine)
        self._manager = manager
        self._tiers = pool.tier_hits(manager)
        self._timer = CallTimer()
        timed: Any = TimedManager(manager, self._timer)
        if self._tiers is not None:
            timed.maybe_reserve = self._tiers.watching(timed.maybe_reserve)
        self._open = self._timer.timed(TextGenerationContext, of_one=True)
        self._scheduler = Scheduler(
            timed,
            max_running=concurrency,
            max_batch_tokens=concurrency + engine.chunk,
            max_prompt_tokens=engine.chunk,
            num_steps=engine.decode_steps,
            update=self._timer.timed(update_batch),
        )
        self._arrivals = ArrivalQueue(
            workload.arrivals, workload.next_turns, workload.think_times, workload.waits
        )
        self._tally = Tally(request_hits=array("q", [REFUSED]) * len(workload))
        self._now = 0.0
        self._start = self._arrivals.next_time
        self._clock = clock
        self._returns = pool.returns(workload)
        self._unsampled_seconds = 0.0
        self._used = 0  # pages at the last sample
        self._next_sample = 0  # the step that is sampled next
        self._sampled_seconds = 0.0
        self._used_page_seconds = 0.0
        self._running_seconds = 0.0
        self._groups = pool.samples(manager, len(workload))
        self._take_state_copies = pool.state_copies(manager)

    def run(self) -> None:
        """Step until every request is served or refused."""
        while True:
            self._receive()
            before = self._timer.spent_ns
            if batch := self._scheduler.next_batch():
                self._step(batch)
                self._take_state_copies()
                self._tally.step_ns.append(self._timer.spent_ns - before)
                if self._timeline is not None:
                    self._timeline.add_step(self._now, self._tally.step_ns[-1])
            elif len(self._arrivals):
                self._wait_for_arrival()
            else:
                return

    def _receive(self) -> None:
        self._clock.now = self._now - self._start
        while self._arrivals.next_time <= self._now:
            arrival, index = self._arrivals.pop()
            request = Request(
                partial(self._context, index),
                self._output_lengths[index],
                num_prompt=self._prompt_lengths[index],
                owner=_Job(index, arrival, self._output_ends[index]),
            )
            try:
                self._scheduler.add(request)
            except CapacityError:
                self._tally.refused += 1
                self._finish(index)

    def _context(self, index: int) -> TextGenerationContext:
        context: TextGenerationContext = self._open(index, self._workload.prompt(index))
        context.returns_in = self._returns[index]
        return context

    def _step(self, batch: Batch) -> None:
        self._pass_time(batch)
        for request in batch.completed:
            if not request.owner.has_begun:
                request.owner.has_begun = True
                self._tally.first_token_s.append(self._now - request.owner.arrival)
        for request in self._scheduler.update(batch, self._next_tokens(batch)):
            self._retire(request)

    def _pass_time(self, batch: Batch) -> None:
        decodes = len(self._scheduler.decodes)
        seconds = batch.num_steps / self._engine.decode_rate if decodes else 0.0
        if self._scheduler.prefills:
            tokens = sum(int(each.row_offsets[-1]) for each in batch.inputs)
            seconds = (tokens - decodes) / self._engine.prefill_rate + seconds
        self._now += seconds
        self._unsampled_seconds += seconds
        self._running_seconds += seconds * self._scheduler.num_running
        if len(self._tally.step_ns) >= self._next_sample:
            self._next_sample = len(self._tally.step_ns) + _SAMPLE_EVERY
            self._sample_occupancy()

    def _wait_for_arrival(self) -> None:
        """Let the time pass until the next arrival. No page is used in this time."""
        self._count_used()
        self._sampled_seconds += self._arrivals.next_time - max(self._now, self._start)
        self._now = self._arrivals.next_time
        self._next_sample = 0

    def _count_used(self) -> None:
        """Count the pages of the last sample for the time of the steps since the sample before."""
        self._used_page_seconds += self._used * self._unsampled_seconds
        self._sampled_seconds += self._unsampled_seconds
        self._unsampled_seconds = 0.0

    def _sample_occupancy(self) -> None:
        free = self._timer.timed(lambda: self._manager.num_free_blocks)()
        self._used = used = self._pool.total_pages - free
        self._count_used()
        if self._timeline is not None:
            self._timeline.add_pages(self._now, used, self._manager.num_cached_blocks)
        if self._groups is not None:
            self._groups.look(self._tally.served + self._tally.refused)

    def _next_tokens(self, batch: Batch) -> NDArray[np.int32]:
        """Read the next tokens of each request; tokens after its output have no effect."""
        places = np.array([each.owner.output_end - each.left for each in batch.requests], np.int64)
        steps = np.arange(batch.num_steps)[:, None]
        return self._workload.output_tokens_at(places + steps)

    def _retire(self, request: Request) -> None:
        index, tally = request.owner.index, self._tally
        tally.served += 1
        tally.served_prompt_tokens += request.num_prompt
        tally.output_tokens += self._output_lengths[index]
        tally.cached_tokens += request.cached_tokens
        tally.cached_pages += request.cached_tokens // self._pool.page_size
        tally.request_hits[index] = request.cached_tokens
        tally.request_ns.append(self._timer.of_request.pop(index))
        if self._timeline is not None:
            self._timeline.add_request(self._now, request.num_prompt, request.cached_tokens)
        self._finish(index)

    def _finish(self, index: int) -> None:
        self._arrivals.answered(index, self._now)
        done = self._tally.served + self._tally.refused
        if self._on_progress is not None and done % _PROGRESS_EVERY == 0:
            self._on_progress(done)

    def report(self, wall_seconds: float) -> ReplayReport:
        """Return the report."""
        self._count_used()
        self._tally.manager_ns = self._timer.spent_ns
        self._tally.preemptions = self._scheduler.num_preemptions
        self._tally.recomputed_tokens = self._scheduler.recomputed_tokens
        return summarize(
            "online",
            self._workload,
            self._pool,
            self._manager,
            self._tally,
            mean_used_pages=self._used_page_seconds / max(self._sampled_seconds, 1e-9),
            concurrency=self._running_seconds / max(self._now - self._start, 1e-9),
            groups=self._groups.reports() if self._groups is not None else (),
            tiers=self._tiers,
            wall_seconds=wall_seconds,
            virtual_seconds=self._now,
        )
