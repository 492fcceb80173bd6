# SPDX-License-Identifier: Apache-2.0
"""Make the report of a replay."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.apps.replay.rates import HIT_RATES, HitRates
from kvcore.apps.replay.states import StateReport, state_report

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore import PagedKVCacheManager
    from kvcore.apps.replay.groups import GroupReport
    from kvcore.apps.replay.pool import PoolSettings
    from kvcore.apps.replay.tiers import TierHits, TierReport
    from kvcore.apps.replay.workload import Workload
    from kvcore.metrics import Advice, MissMetrics


@dataclass(frozen=True)
class HitTokens:
    """Prompt tokens found for a request: the mean, the median and the 95th percentile."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> HitTokens:
        """Summarize the tokens of each request; zeros without requests."""
        if not len(tokens):
            return cls(0.0, 0.0, 0.0)
        p50, p95 = np.percentile(tokens, (50, 95)).tolist()
        return cls(float(tokens.mean()), p50, p95)


def gib(size: float) -> float:
    """Return bytes as GiB, for JSON."""
    return size / 2**30


@dataclass(frozen=True, kw_only=True)
class ReplayReport(HitRates):
    """The results of a replay.

    With groups of layers, a page is a page of the pool: it has the tokens of up to
    `KVCacheParams.layers_per_page` layers of one group, as in a manager and in ``kvcore plan``.

    Attributes
    ----------
    mode : str
        "admission" or "online".
    workload : str
        Name of the workload.
    policy : str
        Name of the eviction policy.
    page_size, pages, replicas : int
        Tokens per page, pages per replica, replicas.
    page_bytes : int
        Bytes of a page of the served model; 0 if unknown.
    requests, refused : int
        Served requests, and refused requests, which are larger than the pool.
    leaked_pages : int
        Pages neither free nor evictable after every request was released; 0 unless the manager
        is broken.
    prompt_tokens, output_tokens : int
        Prompt tokens of all requests, including refused requests; generated tokens.
    served_prompt_tokens : int
        Prompt tokens of the served requests.
    cached_tokens : int
        Prompt tokens found in the cache when a request was first admitted.
    prompt_pages, cached_pages : int
        Pages of all prompts, including partial last pages and refused requests; whole pages of
        prompts found in the cache.
    request_hits : array of int
        Prompt tokens found for each request, in the order of the workload; -1 for a refused
        request.
    recomputed_tokens : int
        Tokens computed again after a preemption.
    evicted_pages, preemptions : int
        Cached pages evicted for new pages; requests sent back to the queue.
    peak_used_pages, mean_used_pages : int, float
        Maximum and mean number of pages that requests held, over all replicas. The mean is over
        virtual time (online) or over requests whose prompt is computed (admission).
    concurrency : float
        Online: mean number of running requests over virtual time. Admission mode: the number of
        requests that would fit, ``total_pages / mean_used_pages``, and with states at most half of
        the state slots.
    groups : tuple of GroupReport
        Results of each group of layers; empty without groups.
    tiers : TierReport or None
        Hits of each tier; None without tiers.
    states : StateReport or None
        State slots and checkpoints; None without layers that keep a state.
    misses : MissMetrics or None
        Tokens that admissions missed, by reason; None unless the pool has `explain`.
    advice : Advice or None
        The manager's advice after the last request; None unless the pool has `advice`.
    steps : int
        Engine steps; in admission mode one step per request.
    manager_seconds, wall_seconds, virtual_seconds : float
        Time inside the manager and its contexts; time of the whole replay, with token expansion
        and without reading the trace; simulated time.
    step_us_p50, step_us_p99 : float
        Microseconds in the manager per engine step.
    request_us_p50, request_us_p99 : float
        Microseconds in the manager per request without the calls for the whole batch: context,
        claim, reserve, release. In admission mode all calls count.
    first_token_s_p50, first_token_s_p99 : float
        Simulated seconds from a request's arrival to its first token; 0 in admission mode.
    """

    mode: str
    workload: str
    policy: str
    page_size: int
    pages: int
    replicas: int
    page_bytes: int
    requests: int
    refused: int
    leaked_pages: int
    prompt_tokens: int
    served_prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prompt_pages: int
    cached_pages: int
    request_hits: array[int]
    recomputed_tokens: int
    evicted_pages: int
    preemptions: int
    peak_used_pages: int
    mean_used_pages: float
    concurrency: float
    groups: tuple[GroupReport, ...]
    tiers: TierReport | None
    states: StateReport | None = None
    misses: MissMetrics | None = None
    advice: Advice | None = None
    steps: int
    manager_seconds: float
    wall_seconds: float
    virtual_seconds: float
    step_us_p50: float
    step_us_p99: float
    request_us_p50: float
    request_us_p99: float
    first_token_s_p50: float
    first_token_s_p99: float

    @property
    def total_pages(self) -> int:
        """Pages of all replicas."""
        return self.pages * self.replicas

    @property
    def memory(self) -> int:
        """Bytes of the pages and the state slots of one replica; 0 if unknown."""
        return self.pages * self.page_bytes + (self.states.memory if self.states else 0)

    @property
    def host_memory(self) -> int:
        """Bytes of the pages and the state slots of a replica's host tier; 0 if unknown."""
        if self.tiers is None:
            return 0
        slot = self.states.slot_bytes if self.states else 0
        return self.tiers.host_pages * self.page_bytes + self.tiers.host_state_slots * slot

    @property
    def is_unlimited(self) -> bool:
        """Whether memory was never short: no request refused, no page or checkpoint evicted.

        In admission mode, where a request runs only after the last one. A checkpoint without a free
        slot is not made, so there has to be a free slot at the end.
        """
        if self.refused or self.evicted_pages:
            return False
        found = self.states
        return found is None or (
            not found.evicted_checkpoints and found.checkpoints < found.slots - 1
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of served requests per second inside the manager."""
        tokens = self.served_prompt_tokens + self.output_tokens
        return tokens / self.manager_seconds if self.manager_seconds else 0.0

    @property
    def hit_tokens(self) -> HitTokens:
        """Prompt tokens found for a served request: the mean and two percentiles."""
        found = np.array(self.request_hits, np.int64)
        return HitTokens.of(found[found >= 0])

    def to_dict(self) -> dict[str, Any]:
        """List every field and rate by name, ready for JSON; GiB if the page has known bytes."""
        rates = ("total_pages", *HIT_RATES, "tokens_per_second")
        tiers = None if self.tiers is None else self.tiers.to_dict()
        sizes = {}
        if self.page_bytes:
            sizes = {f"{name}_gib": gib(pages * self.page_bytes) for name, pages in self._sizes}
            sizes["memory_gib"] = gib(self.memory)
            if self.tiers is not None and tiers is not None:
                tiers["host_gib"] = gib(self.host_memory)
                tiers["disk_gib"] = gib(self.tiers.disk_pages * self.page_bytes)
        parts = {
            "hit_tokens": vars(self.hit_tokens),
            "groups": [each.to_dict() for each in self.groups],
            "tiers": tiers,
            "states": None if self.states is None else self.states.to_dict(),
            "misses": None if self.misses is None else asdict(self.misses),
            "advice": None if self.advice is None else asdict(self.advice),
        }
        fields = {name: value for name, value in vars(self).items() if name != "request_hits"}
        return fields | parts | {name: getattr(self, name) for name in rates} | sizes

    @property
    def _sizes(self) -> tuple[tuple[str, float], ...]:
        return (
            ("evicted", self.evicted_pages),
            ("peak_used", self.peak_used_pages),
            ("mean_used", self.mean_used_pages),
        )


REFUSED = -1  # in place of the hit tokens of a refused request


@dataclass
class Tally:
    """The counts that both modes collect during a replay."""

    served: int = 0
    refused: int = 0
    served_prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cached_pages: int = 0
    request_hits: array[int] = field(default_factory=lambda: array("q"))
    recomputed_tokens: int = 0
    preemptions: int = 0
    manager_ns: int = 0
    step_ns: array[int] = field(default_factory=lambda: array("q"))
    request_ns: array[int] = field(default_factory=lambda: array("q"))
    first_token_s: array[float] = field(default_factory=lambda: array("d"))


def summarize(
    mode: str,
    workload: Workload,
    pool: PoolSettings,
    manager: PagedKVCacheManager,
    tally: Tally,
    *,
    mean_used_pages: float,
    concurrency: float,
    groups: tuple[GroupReport, ...],
    tiers: TierHits | None,
    wall_seconds: float,
    virtual_seconds: float,
) -> ReplayReport:
    """Make the report of a finished replay from its counts."""
    metrics = manager.metrics
    prompt_tokens = int(workload.prompt_lengths.sum())
    found = None
    if tiers is not None:
        found = tiers.report(
            prompt_tokens=prompt_tokens,
            served_tokens=tally.served_prompt_tokens,
            cached_tokens=tally.cached_tokens,
        )
    # In admission mode a request is one engine step, so both distributions are equal.
    request_ns = tally.request_ns if mode == "online" else tally.step_ns
    return ReplayReport(
        mode=mode,
        workload=workload.name,
        policy=pool.policy,
        page_size=pool.page_size,
        pages=pool.pages_per_replica,
        replicas=pool.replicas,
        page_bytes=pool.page_bytes,
        requests=tally.served,
        refused=tally.refused,
        leaked_pages=pool.total_pages - manager.num_free_blocks,
        prompt_tokens=prompt_tokens,
        served_prompt_tokens=tally.served_prompt_tokens,
        output_tokens=tally.output_tokens,
        cached_tokens=tally.cached_tokens,
        prompt_pages=int((-(-workload.prompt_lengths // pool.page_size)).sum()),
        cached_pages=tally.cached_pages,
        request_hits=tally.request_hits,
        recomputed_tokens=tally.recomputed_tokens,
        evicted_pages=metrics.evicted_pages,
        preemptions=tally.preemptions,
        peak_used_pages=metrics.peak_used_pages,
        mean_used_pages=mean_used_pages,
        concurrency=concurrency,
        groups=groups,
        tiers=found,
        states=state_report(manager, pool.model),
        misses=manager.miss_metrics if pool.explain else None,
        advice=manager.advice() if pool.advice else None,
        steps=len(tally.step_ns),
        manager_seconds=tally.manager_ns / 1e9,
        wall_seconds=wall_seconds,
        virtual_seconds=virtual_seconds,
        step_us_p50=percentile(tally.step_ns, 50, 1e-3),
        step_us_p99=percentile(tally.step_ns, 99, 1e-3),
        request_us_p50=percentile(request_ns, 50, 1e-3),
        request_us_p99=percentile(request_ns, 99, 1e-3),
        first_token_s_p50=percentile(tally.first_token_s, 50),
        first_token_s_p99=percentile(tally.first_token_s, 99),
    )


def percentile(values: array[int] | array[float], percent: float, scale: float = 1.0) -> float:
    """Return a percentile of the samples; 0.0 without samples."""
    return float(np.percentile(values, percent)) * scale if len(values) else 0.0
