# SPDX-License-Identifier: Apache-2.0
"""Replay one workload with several eviction policies and pool sizes."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvcore.apps.replay.admission import replay_admission
from kvcore.apps.replay.belady import Optimum, optimum
from kvcore.apps.replay.online import replay_online
from kvcore.apps.replay.pool import PoolSettings, flat_page_bytes
from kvcore.apps.replay.timeline import Timeline, TimelineBins
from kvcore.apps.replay.uses import page_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcore import KVCacheParams
    from kvcore.apps.replay.online import EngineSettings
    from kvcore.apps.replay.report import ReplayReport
    from kvcore.apps.replay.workload import Workload

__all__ = ["Comparison", "ComparisonRun", "compare"]

_TIMELINE_PARTS = 100


@dataclass(frozen=True, kw_only=True)
class ComparisonRun:
    """One replay: its report and its timeline."""

    report: ReplayReport
    timeline: TimelineBins


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of each policy in each pool.

    With a `model`, each policy has two curves: the curve of the flat cache, whose pages have all
    layers, and the curve of the model's groups in the same number of bytes.

    Attributes
    ----------
    mode, workload : str
        As in `ReplayReport`.
    page_size, replicas : int
        Tokens per page, replicas.
    host_pages, disk_pages : int
        Pages of each replica's host tier, and of the disk; 0 without a tier.
    policies : tuple of str
        Names of the eviction policies.
    pages : tuple of int
        Pages per replica, rising.
    runs : tuple of ComparisonRun
        The runs, curve by curve, each curve in the order of `pages`.
    optima : tuple of Optimum
        Optima of the flat cache on the device, in the order of `pages`. Empty in online mode: the
        order of the requests depends on the policy, so there is no single optimum.
    model : KVCacheParams or None
        Model with the replayed groups; `pages` still counts pages of the flat cache.
    optimum_seconds, wall_seconds : float
        Time for the optimum; time of the whole comparison.
    """

    mode: str
    workload: str
    page_size: int
    replicas: int
    policies: tuple[str, ...]
    pages: tuple[int, ...]
    host_pages: int
    disk_pages: int
    runs: tuple[ComparisonRun, ...]
    optima: tuple[Optimum, ...]
    model: KVCacheParams | None
    optimum_seconds: float
    wall_seconds: float

    @property
    def curves(self) -> tuple[str, ...]:
        """Names of the curves: one curve per policy, with groups two curves per policy."""
        if self.model is None:
            return self.policies
        return tuple(f"{each} {kind}" for each in self.policies for kind in ("flat", "groups"))

    @property
    def optimum_name(self) -> str:
        """Name of the curve of `optima`; the optimum does not include groups and tiers."""
        if self.host_pages:
            return "device optimum"
        return "optimum" if self.model is None else "flat optimum"

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each pool's replica, in the order of `pages`; empty without a model."""
        if self.model is None:
            return ()
        return tuple(pages * flat_page_bytes(self.model) for pages in self.pages)

    def of(self, curve: str) -> tuple[ComparisonRun, ...]:
        """Return the runs of a curve, in the order of `pages`."""
        first = self.curves.index(curve) * len(self.pages)
        return self.runs[first : first + len(self.pages)]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields without the timelines by name, ready for JSON."""
        names = ("mode", "workload", "page_size", "replicas", "policies", "pages")
        told = {name: getattr(self, name) for name in names}
        if self.model is not None:
            told["memory"] = self.memory
            told["flat_page_bytes"] = flat_page_bytes(self.model)
            told["group_page_bytes"] = self.model.bytes_per_page
        if self.host_pages:
            told |= {"host_pages": self.host_pages, "disk_pages": self.disk_pages}
        told["results"] = [
            run.report.to_dict() | ({} if self.model is None else {"curve": curve})
            for curve in self.curves
            for run in self.of(curve)
        ]
        told["optimum"] = [each.to_dict() for each in self.optima]
        seconds = ("optimum_seconds", "wall_seconds")
        return told | {name: getattr(self, name) for name in seconds}


def compare(
    workload: Workload,
    pools: Sequence[PoolSettings],
    policies: Sequence[str],
    *,
    engine: EngineSettings | None = None,
    model: KVCacheParams | None = None,
    chunk: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Replay a workload once for each policy and pool, one manager at a time.

    With a model, each replay runs twice: with pages of all layers, and with the model's groups in
    the same number of bytes.

    Parameters
    ----------
    workload : Workload
        The requests.
    pools : sequence of PoolSettings
        At least one pool; the pools may differ only in their number of pages. Their `policy` is
        not used.
    policies : sequence of str
        Names of eviction policies, at least one.
    engine : EngineSettings, optional
        Replay online with these settings. None: admission mode, in which each request is released
        before the next request claims.
    model : KVCacheParams, optional
        Model with windows or chunks, and the page size of the pools.
    chunk : int, optional
        As in `replay_admission`; an engine has its own chunk.
    on_progress : callable, optional
        Called from time to time with the number of finished requests in all replays; the optimum
        counts as a replay.

    Returns
    -------
    Comparison

    Raises
    ------
    PoolError
        The manager refuses a pool; the model has no windows or has a state; a pool has tiers and
        there is a model.
    PageUsesError
        The prompts have too many pages for the optimum; the comparison ends before any replay.
    """
    started = perf_counter()
    pools = sorted(pools, key=lambda pool: pool.total_pages)
    kinds = [pools] if model is None else [pools, [pool.with_groups(model) for pool in pools]]
    progress = _Progress(on_progress, len(workload))
    optima = () if engine is not None else _optima(workload, pools, progress)
    optimum_seconds = perf_counter() - started

    def run(pool: PoolSettings) -> ComparisonRun:
        return _run(workload, pool, engine, chunk, progress)

    # The largest pool runs first, so a lack of memory ends the comparison early.
    runs = tuple(
        found
        for policy in policies
        for kind in kinds
        for found in reversed([run(pool.with_policy(policy)) for pool in kind[::-1]])
    )
    return Comparison(
        mode=runs[0].report.mode,
        workload=workload.name,
        page_size=pools[0].page_size,
        replicas=pools[0].replicas,
        policies=tuple(policies),
        pages=tuple(pool.pages_per_replica for pool in pools),
        host_pages=pools[0].host_pages,
        disk_pages=pools[0].disk_pages,
        runs=runs,
        optima=optima,
        model=model,
        optimum_seconds=optimum_seconds,
        wall_seconds=perf_counter() - started,
    )


class _Progress:
    """Count the finished requests of all replays."""

    def __init__(self, on_progress: Callable[[int], None] | None, requests: int) -> None:
        self._tell = on_progress
        self._requests = requests
        self._before = 0

    @property
    def current(self) -> Callable[[int], None] | None:
        """Callback for the finished requests of the current replay; None without a callback."""
        tell, before = self._tell, self._before
        return None if tell is None else lambda done: tell(before + done)

    def finish(self) -> None:
        """Start the next replay."""
        self._before += self._requests


def _optima(
    workload: Workload, pools: Sequence[PoolSettings], progress: _Progress
) -> tuple[Optimum, ...]:
    uses = page_uses(workload, pools[0].page_size, on_progress=progress.current)
    progress.finish()
    return tuple(optimum(uses, pool.pages_per_replica, replicas=pool.replicas) for pool in pools)


def _run(
    workload: Workload,
    pool: PoolSettings,
    engine: EngineSettings | None,
    chunk: int | None,
    progress: _Progress,
) -> ComparisonRun:
    timeline = Timeline()
    tell = progress.current
    if engine is None:
        report = replay_admission(workload, pool, timeline=timeline, chunk=chunk, on_progress=tell)
    else:
        report = replay_online(workload, pool, engine, timeline=timeline, on_progress=tell)
    progress.finish()
    return ComparisonRun(report=report, timeline=timeline.binned(_TIMELINE_PARTS))
