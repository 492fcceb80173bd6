# SPDX-License-Identifier: Apache-2.0
"""Replay prompts one after the other, to see what the cache keeps."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from kvcore import CapacityError, KVCacheError, TextGenerationContext
from kvcore.replay.report import ReplayReport, Tally, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvcore.replay.pool import PoolSettings
    from kvcore.replay.timeline import Timeline
    from kvcore.replay.workload import Workload

_ANY_TOKEN = 0
_REFUSED = -1
_PROGRESS_EVERY = 64


def replay_admission(
    workload: Workload,
    pool: PoolSettings,
    *,
    timeline: Timeline | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Admit every request in order, each released before the next one claims.

    Only prompts count; no output is generated. A request claims, reserves, marks its prompt as
    written, steps (which commits its pages) and is released.

    Parameters
    ----------
    workload : Workload
        The requests.
    pool : PoolSettings
        The pool to admit them to.
    timeline : Timeline, optional
        Takes down how it went; its time is the number of requests.
    on_progress : callable, optional
        Called now and then with the number of requests done.

    Returns
    -------
    ReplayReport
        With mode "admission".
    """
    started = perf_counter_ns()
    replay = _AdmissionReplay(workload, pool, timeline)
    for index in range(len(workload)):
        replay.run(index, workload.prompt(index))
        if on_progress is not None and index % _PROGRESS_EVERY == 0:
            on_progress(index)
    return replay.report((perf_counter_ns() - started) / 1e9)


class _AdmissionReplay:
    """Serve one request at a time and count."""

    def __init__(self, workload: Workload, pool: PoolSettings, timeline: Timeline | None) -> None:
        self._workload = workload
        self._pool = pool
        self._timeline = timeline
        longest = int(workload.prompt_lengths.max())
        self._manager = pool.build_manager(max_batch_size=1, max_seq_len=longest + 1)
        self._tally = Tally()
        self._held_pages = 0

    def run(self, index: int, tokens: NDArray[np.int32]) -> None:
        """Admit and release one request."""
        tally = self._tally
        started = perf_counter_ns()
        hit = self._admit(index, tokens)
        spent = perf_counter_ns() - started
        tally.manager_ns += spent
        tally.step_ns.append(spent)
        if self._timeline is not None:
            self._record(index, len(tokens), hit, spent)
        if hit == _REFUSED:
            tally.refused += 1
            return
        tally.served += 1
        tally.served_prompt_tokens += len(tokens)
        tally.cached_tokens += hit
        tally.cached_pages += hit // self._pool.page_size
        self._held_pages += -(-len(tokens) // self._pool.page_size)

    def _record(self, index: int, prompt: int, hit: int, spent_ns: int) -> None:
        assert self._timeline is not None
        held = 0 if hit == _REFUSED else -(-prompt // self._pool.page_size)
        self._timeline.add_request(index, prompt, max(hit, 0))
        self._timeline.add_step(index, spent_ns)
        self._timeline.add_pages(index, held, self._manager.num_cached_blocks)

    def _admit(self, index: int, tokens: NDArray[np.int32]) -> int:
        manager = self._manager
        context = TextGenerationContext(index, tokens)
        manager.claim(index, self._choose_replica(context))
        try:
            if not manager.maybe_reserve(context):
                raise KVCacheError(f"request {index} does not fit an idle pool of {self._pool}")
            hit: int = context.start_idx
            if hit % self._pool.page_size:
                manager.take_copies()
            context.update(_ANY_TOKEN)
            manager.step([context])
        except CapacityError:
            hit = _REFUSED
        finally:
            manager.release(index)
        return hit

    def _choose_replica(self, context: TextGenerationContext) -> int:
        if self._pool.replicas == 1:
            return 0
        return self._manager.get_or_recommend_replica(context)

    def report(self, wall_seconds: float) -> ReplayReport:
        """Sum up."""
        return summarize(
            "admission",
            self._workload,
            self._pool,
            self._manager,
            self._tally,
            mean_used_pages=self._held_pages / max(1, self._tally.served),
            wall_seconds=wall_seconds,
            virtual_seconds=0.0,
        )
