# SPDX-License-Identifier: Apache-2.0
"""Replay a workload through a small inference engine in virtual time.

The engine batches continuously. Each step runs one token (or `decode_steps`) of every request
that generates, and in what is left of the step's token budget the prompts that are not written
yet, in chunks, oldest request first. When the next tokens do not fit the pool, the newest
request of that replica is sent back to the queue and its pages go. A step lasts as long as its
prompt tokens take at the prefill rate, plus the decode steps at the decode rate. Only this clock
is simulated: every claim, reserve, fetch, step and release is a call to the real manager.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from kvcore import KVCacheError, TextGenerationContext, update_batch
from kvcore.replay.arrivals import ArrivalQueue
from kvcore.replay.batch import Chunk, DecodeBatch, Job
from kvcore.replay.report import ReplayReport, Tally, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvcore.replay.pool import PoolSettings
    from kvcore.replay.workload import Workload

_PROGRESS_EVERY = 64
_SAMPLE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Set the pace of the simulated engine.

    Attributes
    ----------
    concurrency : int
        Requests running at a time, over all replicas.
    prefill_rate : float
        Prompt tokens per second.
    decode_rate : float
        Decode steps per second: output tokens per second of one request while no prompt runs.
    chunk : int
        Most prompt tokens per step.
    decode_steps : int
        Tokens per request in a step that runs no prompt.
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
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Serve every request in virtual time.

    A request whose prompt and output together are larger than a replica's pool is refused on
    arrival. All others are served, however often they are preempted.

    Parameters
    ----------
    workload : Workload
        The requests.
    pool : PoolSettings
        The pool to serve them from.
    engine : EngineSettings, optional
        The pace of the engine.
    on_progress : callable, optional
        Called now and then with the number of requests done.

    Returns
    -------
    ReplayReport
        With mode "online".
    """
    started = perf_counter_ns()
    replay = _OnlineReplay(workload, pool, engine or EngineSettings(), on_progress)
    replay.run()
    return replay.report((perf_counter_ns() - started) / 1e9)


class _OnlineReplay:
    """Schedule requests onto one manager.

    A request is in exactly one place: arrivals, `_waiting` (a heap by order of arrival),
    `_prefills` (claimed, prompt not written yet, oldest first) or `_decodes`.
    """

    def __init__(
        self,
        workload: Workload,
        pool: PoolSettings,
        engine: EngineSettings,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._workload = workload
        self._pool = pool
        self._engine = engine
        self._on_progress = on_progress
        self._prompt_lengths: list[int] = workload.prompt_lengths.tolist()
        self._output_lengths: list[int] = workload.output_lengths.tolist()
        self._output_starts: list[int] = workload.output_starts.tolist()
        longest = int((workload.prompt_lengths + workload.output_lengths).max())
        concurrency = min(engine.concurrency, len(workload))
        self._manager = pool.build_manager(
            max_batch_size=concurrency, max_seq_len=longest + engine.decode_steps
        )
        self._arrivals = ArrivalQueue(workload)
        self._waiting: list[tuple[int, Job]] = []
        self._prefills: list[Job] = []
        self._decodes = DecodeBatch(concurrency, workload.output_tokens, pool.page_size)
        self._tally = Tally()
        self._now = 0.0
        self._arrived = 0
        self._step_ns = 0
        self._unsampled_seconds = 0.0
        self._sampled_seconds = 0.0
        self._used_page_seconds = 0.0
        self._may_admit = True

    # -- the event loop ---------------------------------------------------------------------

    def run(self) -> None:
        """Step until every request was served or refused."""
        while True:
            self._receive()
            if self._waiting or self._prefills or len(self._decodes):
                self._step()
            elif len(self._arrivals):
                self._now = self._arrivals.next_time
            else:
                return

    def _receive(self) -> None:
        while self._arrivals.next_time <= self._now:
            arrival, index = self._arrivals.pop()
            positions = self._prompt_lengths[index] + self._output_lengths[index] - 1
            if positions > self._pool.pages_per_replica * self._pool.page_size:
                self._tally.refused += 1
                self._finish(index)
                continue
            heapq.heappush(self._waiting, (self._arrived, Job(index, self._arrived, arrival)))
            self._arrived += 1

    def _step(self) -> None:
        self._step_ns = 0
        preempted = self._tally.preemptions
        steps = self._reserve_decodes(self._wanted_steps())
        if self._tally.preemptions == preempted:
            self._admit_waiting()
        chunks = self._cut_chunks()
        if not chunks and not len(self._decodes):
            raise KVCacheError(f"request {self._waiting[0][1].index} does not fit an idle pool")
        self._execute(chunks, steps)
        self._pass_time(sum(chunk.count for chunk in chunks), steps)
        self._start_decodes(chunks)
        self._retire()
        self._tally.step_ns.append(self._step_ns)
        self._tally.manager_ns += self._step_ns

    def _wanted_steps(self) -> int:
        """Look ahead only in steps that will run no prompt."""
        prompt_due = self._prefills or (self._waiting and self._may_admit and self._has_room())
        return 1 if prompt_due else self._engine.decode_steps

    def _has_room(self) -> bool:
        return len(self._prefills) + len(self._decodes) < self._engine.concurrency

    # -- memory -----------------------------------------------------------------------------

    def _reserve_decodes(self, steps: int) -> int:
        """Reserve the next tokens of every generating request; answer how many each.

        The next one is made to fit, by preemption where it must be; more only if they fit.
        """
        while (stuck := self._reserve_rows(1)) is not None:
            self._preempt_newest(stuck.replica)
        return steps if steps == 1 or self._reserve_rows(steps) is None else 1

    def _reserve_rows(self, steps: int) -> Job | None:
        """Reserve for the rows that need pages; answer the first that does not fit."""
        decodes = self._decodes
        rows = decodes.short_of(steps)
        if not len(rows):
            return None
        contexts = [decodes.contexts[row] for row in rows.tolist()]
        started = perf_counter_ns()
        reserved = self._manager.maybe_reserve_batch(contexts, steps)
        self._step_ns += perf_counter_ns() - started
        decodes.make_room(rows[:reserved], steps)
        return decodes.jobs[rows[reserved]] if reserved < len(rows) else None

    def _preempt_newest(self, replica: int) -> None:
        running = self._prefills + self._decodes.jobs
        job = max((j for j in running if j.replica == replica), key=lambda j: j.rank)
        if job in self._prefills:
            self._prefills.remove(job)
        else:
            row = self._decodes.jobs.index(job)
            job.generated = self._output_lengths[job.index] - self._decodes.left(row)
            self._decodes.remove(row)
        job.written = job.context.start_idx
        self._release(job)
        self._tally.preemptions += 1
        heapq.heappush(self._waiting, (job.rank, job))

    def _release(self, job: Job) -> None:
        started = perf_counter_ns()
        self._manager.release(job.index)
        self._charge(job, perf_counter_ns() - started)
        self._may_admit = True

    def _charge(self, job: Job, spent: int) -> None:
        job.manager_ns += spent
        self._step_ns += spent

    # -- admission --------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Admit in order of arrival while there is room in the step, the batch and the pool."""
        budget = self._engine.chunk - sum(job.left_to_write for job in self._prefills)
        while self._waiting and self._may_admit and budget > 0 and self._has_room():
            job = self._waiting[0][1]
            if not self._admit(job):
                self._may_admit = False  # until a release
                return
            heapq.heappop(self._waiting)
            self._prefills.append(job)
            budget -= job.left_to_write

    def _admit(self, job: Job) -> bool:
        tokens = self._workload.prompt(job.index) if job.opened is None else None
        started = perf_counter_ns()
        if tokens is not None:
            job.opened = TextGenerationContext(job.index, tokens)
        fits = self._claim_and_reserve(job)
        self._charge(job, perf_counter_ns() - started)
        if fits:
            self._count_hit(job)
        return fits

    def _claim_and_reserve(self, job: Job) -> bool:
        manager, context = self._manager, job.context
        replicated = self._pool.replicas > 1
        job.replica = manager.get_or_recommend_replica(context) if replicated else 0
        manager.claim(job.index, job.replica)
        fits = manager.maybe_reserve(context)
        if not fits:
            manager.release(job.index)
            fits = replicated and self._claim_emptiest(job, context)
        if fits and context.start_idx % self._pool.page_size:
            manager.take_copies()  # of a partly reused page; there is no pool to copy in
        return fits

    def _claim_emptiest(self, job: Job, context: TextGenerationContext) -> bool:
        """Try the replica with most free pages once the one with the best hit is full."""
        manager = self._manager
        manager.claim(job.index, "auto")
        job.replica = manager.get_replica(context)
        fits = manager.maybe_reserve(context)
        if not fits:
            manager.release(job.index)
        return fits

    def _count_hit(self, job: Job) -> None:
        hit = job.context.start_idx
        if job.was_admitted:
            self._tally.recomputed_tokens += max(0, job.written - hit)
            return
        job.was_admitted = True
        self._tally.cached_tokens += hit
        self._tally.cached_pages += hit // self._pool.page_size

    # -- one step ---------------------------------------------------------------------------

    def _cut_chunks(self) -> list[Chunk]:
        """Share the step's token budget among the prompts, oldest first."""
        budget = self._engine.chunk
        chunks = []
        for job in self._prefills:
            left = job.left_to_write
            count = min(budget, left)
            if count == 0:
                break
            job.context.active_idx = job.context.start_idx + count
            chunks.append(Chunk(job, count, count == left))
            budget -= count
        return chunks

    def _execute(self, chunks: list[Chunk], steps: int) -> None:
        prompts = [chunk.job.context for chunk in chunks]
        batch = self._decodes.contexts + prompts
        started = perf_counter_ns()
        self._manager.fetch(batch, steps)
        self._step_ns += perf_counter_ns() - started
        for _ in range(steps):
            rows, tokens = self._decodes.next_tokens()
            if chunks:
                rows, tokens = batch, np.concatenate((tokens, self._first_tokens(chunks)))
            started = perf_counter_ns()
            update_batch(rows, tokens)
            self._step_ns += perf_counter_ns() - started
        started = perf_counter_ns()
        self._manager.step(batch)
        self._step_ns += perf_counter_ns() - started

    def _first_tokens(self, chunks: list[Chunk]) -> NDArray[np.int32]:
        """Read the token that follows each chunk; the context drops it if the prompt goes on."""
        starts = self._output_starts
        places = [starts[chunk.job.index] + chunk.job.generated for chunk in chunks]
        return self._workload.output_tokens.take(places)

    def _pass_time(self, prompt_tokens: int, steps: int) -> None:
        seconds = prompt_tokens / self._engine.prefill_rate
        if len(self._decodes):
            seconds += steps / self._engine.decode_rate
        self._now += seconds
        self._unsampled_seconds += seconds
        if len(self._tally.step_ns) % _SAMPLE_EVERY == 0:
            self._sample_occupancy()

    def _sample_occupancy(self) -> None:
        started = perf_counter_ns()
        free = self._manager.num_free_blocks
        self._step_ns += perf_counter_ns() - started
        used = self._pool.total_pages - free
        self._used_page_seconds += used * self._unsampled_seconds
        self._sampled_seconds += self._unsampled_seconds
        self._unsampled_seconds = 0.0

    def _start_decodes(self, chunks: list[Chunk]) -> None:
        """Move the requests whose prompt is written now on to the generating ones."""
        for chunk in chunks:
            if not chunk.is_last:
                continue
            job = chunk.job
            self._prefills.remove(job)
            job.generated += 1
            cursor = self._output_starts[job.index] + job.generated
            left = self._output_lengths[job.index] - job.generated
            self._decodes.add(job, cursor=cursor, left=left)
            if job.first_token < 0:
                job.first_token = self._now
                self._tally.first_token_s.append(self._now - job.arrival)

    def _retire(self) -> None:
        for job in self._decodes.take_finished():
            self._release(job)
            tally = self._tally
            tally.served += 1
            tally.served_prompt_tokens += self._prompt_lengths[job.index]
            tally.output_tokens += self._output_lengths[job.index]
            tally.request_ns.append(job.manager_ns)
            self._finish(job.index)

    def _finish(self, index: int) -> None:
        self._arrivals.answered(index, self._now)
        done = self._tally.served + self._tally.refused
        if self._on_progress is not None and done % _PROGRESS_EVERY == 0:
            self._on_progress(done)

    def report(self, wall_seconds: float) -> ReplayReport:
        """Sum up."""
        return summarize(
            "online",
            self._workload,
            self._pool,
            self._manager,
            self._tally,
            mean_used_pages=self._used_page_seconds / max(self._sampled_seconds, 1e-9),
            wall_seconds=wall_seconds,
            virtual_seconds=self._now,
        )
