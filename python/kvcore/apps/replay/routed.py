# SPDX-License-Identifier: Apache-2.0
"""Replay prompts with a router and many workers, each with its own cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.apps.replay.admission import AdmissionReplay
from kvcore.apps.replay.hints import VirtualClock
from kvcore.apps.replay.online import EngineSettings
from kvcore.apps.replay.pool import PoolError
from kvcore.apps.replay.report import gib
from kvcore.cache_events import PagesRemoved, PagesStored
from kvcore.keys import page_keys
from kvcore.routing import POLICIES, PrefixIndex, Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvcore import PagedKVCacheManager, TextGenerationContext
    from kvcore.apps.replay.pool import PoolSettings
    from kvcore.apps.replay.workload import Workload
    from kvcore.metrics import MissMetrics

__all__ = ["MOST_ROUTED", "RoutingReport", "replay_routed"]

MOST_ROUTED = 4096  # bound of the prefix index


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """The results of a routing policy.

    Attributes
    ----------
    route : str
        Name of the policy, from `kvcore.routing.POLICIES`.
    replicas, pages, page_size : int
        Workers, pages of each worker, tokens of a page.
    page_bytes : int
        Bytes of a page of the served model; 0 if unknown.
    requests, refused : int
        Served requests, and refused requests, which are larger than a worker's pool.
    prompt_tokens, cached_tokens, computed_tokens : int
        Prompt tokens of all requests; prompt tokens of served requests found in the cache; prompt
        tokens of served requests computed.
    token_hit_rate : float
        `cached_tokens` over `prompt_tokens`.
    imbalance : float
        Maximum of the workers' computed tokens, divided by their mean; 1 is even.
    idle_replicas : int
        Workers that computed no token.
    route_us_p50, route_us_p99 : float
        Microseconds to choose a worker, without the time for page keys.
    wall_seconds : float
        Time of the whole replay.
    misses : MissMetrics or None
        Tokens that admissions missed, by reason; None unless the pool has `explain`.
    """

    route: str
    replicas: int
    pages: int
    page_size: int
    page_bytes: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    token_hit_rate: float
    imbalance: float
    idle_replicas: int
    route_us_p50: float
    route_us_p99: float
    wall_seconds: float
    misses: MissMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON; `memory_gib` if the page has known bytes."""
        size = {"memory_gib": gib(self.pages * self.page_bytes)} if self.page_bytes else {}
        return asdict(self) | size


def replay_routed(
    workload: Workload,
    pool: PoolSettings,
    route: str,
    engine: EngineSettings | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> RoutingReport:
    """Admit every request on the worker that a router chooses.

    The router receives only the events of the workers' caches. Each request is admitted as in
    `replay_admission`, in the order of arrival. It counts as load until its output is generated; a
    worker computes its prompts one after another.

    Parameters
    ----------
    workload : Workload
        The requests.
    pool : PoolSettings
        The pool; its replicas are the workers.
    route : str
        Name of a policy from `kvcore.routing.POLICIES`.
    engine : EngineSettings, optional
        Its `prefill_rate` and `decode_rate` give the time for which a request counts as load.
    on_progress : callable, optional
        Called from time to time with the number of finished requests.

    Returns
    -------
    RoutingReport

    Raises
    ------
    PoolError
        The pool has more than `MOST_ROUTED` replicas, tiers or groups, or the manager refuses it.
    ValueError
        `route` is not the name of a policy.
    """
    if route not in POLICIES:
        raise ValueError(f"route is {route!r}, must be one of {', '.join(POLICIES)}")
    if pool.replicas > MOST_ROUTED:
        raise PoolError(
            f"there are {pool.replicas} replicas; expected at most {MOST_ROUTED} to route to"
        )
    if pool.host_pages or pool.model is not None:
        raise PoolError(
            "a replay with routing has flat pages and no tiers; remove groups and tiers"
        )
    started = perf_counter_ns()
    longest = int(workload.prompt_lengths.max())
    clock = VirtualClock()
    with pool.manager(
        max_batch_size=1, max_seq_len=longest + 1, clock=clock, events=True
    ) as manager:
        replay = _RoutedReplay(workload, pool, manager, clock, route, engine or EngineSettings())
        replay.run_all(on_progress)
        return replay.routing((perf_counter_ns() - started) / 1e9)


class _RoutedReplay(AdmissionReplay):
    """Serve each request on the worker that the router chooses."""

    def __init__(
        self,
        workload: Workload,
        pool: PoolSettings,
        manager: PagedKVCacheManager,
        clock: VirtualClock,
        route: str,
        engine: EngineSettings,
    ) -> None:
        super().__init__(workload, pool, manager, clock, None, int(workload.prompt_lengths.max()))
        self._route = route
        self._engine = engine
        self._index = PrefixIndex(range(pool.replicas))
        self._router = Router(self._index, route)
        self._replica = 0  # of the current request
        self._now = 0.0
        self._free_at = [0.0] * pool.replicas  # time at which a worker finishes its prompts
        self._ends: list[tuple[float, int]] = []  # heap of end times and requests
        self._computed = np.zeros(pool.replicas, np.int64)
        self._route_ns: list[int] = []

    def run(self, index: int, tokens: NDArray[np.int32]) -> None:
        """Route, admit and release one request."""
        self._now = max(self._now, float(self._workload.arrivals[index]))
        while self._ends and self._ends[0][0] <= self._now:
            self._router.finish(heappop(self._ends)[1])
        keys = page_keys(tokens, self._pool.page_size, seed=self._manager.fingerprint)
        started = perf_counter_ns()
        chosen = self._router.choose(index, keys)
        self._route_ns.append(perf_counter_ns() - started)
        assert isinstance(chosen, int)
        self._replica = chosen
        tally = self._tally
        cached, refused = tally.cached_tokens, tally.refused
        super().run(index, tokens)
        if tally.refused > refused:
            self._router.finish(index)
        else:
            self._count(index, len(tokens) - (tally.cached_tokens - cached))
        self._tell_router()

    def _choose_replica(self, context: TextGenerationContext) -> int:  # noqa: ARG002
        return self._replica

    def _count(self, index: int, computed: int) -> None:
        """Add the computed tokens of a request to its worker, and queue the end of the request."""
        self._computed[self._replica] += computed
        begins = max(self._now, self._free_at[self._replica])
        answered = begins + computed / self._engine.prefill_rate
        self._free_at[self._replica] = answered
        ends = answered + int(self._workload.output_lengths[index]) / self._engine.decode_rate
        heappush(self._ends, (ends, index))

    def _tell_router(self) -> None:
        for event in self._manager.take_events():
            if isinstance(event, PagesStored):
                self._index.store(event.replica, event.keys)
            elif isinstance(event, PagesRemoved):
                self._index.remove(event.replica, event.keys)
            else:  # events were lost: the events of all cached pages follow
                self._index.clear(event.replica)

    def routing(self, wall_seconds: float) -> RoutingReport:
        """Return the report."""
        tally, prompts = self._tally, int(self._workload.prompt_lengths.sum())
        total = int(self._computed.sum())
        p50, p99 = np.percentile(self._route_ns, (50, 99)) / 1e3
        return RoutingReport(
            route=self._route,
            replicas=self._pool.replicas,
            pages=self._pool.pages_per_replica,
            page_size=self._pool.page_size,
            page_bytes=self._pool.page_bytes,
            requests=tally.served,
            refused=tally.refused,
            prompt_tokens=prompts,
            cached_tokens=tally.cached_tokens,
            computed_tokens=total,
            token_hit_rate=tally.cached_tokens / prompts,
            imbalance=int(self._computed.max()) * self._pool.replicas / total if total else 1.0,
            idle_replicas=int((self._computed == 0).sum()),
            route_us_p50=float(p50),
            route_us_p99=float(p99),
            wall_seconds=wall_seconds,
            misses=self._manager.miss_metrics if self._pool.explain else None,
        )
