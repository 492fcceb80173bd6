# SPDX-License-Identifier: Apache-2.0
"""Replay one workload with several eviction policies and pool sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from kvcore.apps.replay.admission import replay_admission
from kvcore.apps.replay.belady import Optimum, optimum
from kvcore.apps.replay.decision import Decision, decide
from kvcore.apps.replay.online import replay_online
from kvcore.apps.replay.pool import PoolError, PoolSettings, flat_page_bytes
from kvcore.apps.replay.report import gib
from kvcore.apps.replay.timeline import Timeline, TimelineBins
from kvcore.apps.replay.uses import PageUses, page_uses
from kvcore.support.byte_sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvcore import KVCacheParams
    from kvcore.apps.replay.online import EngineSettings
    from kvcore.apps.replay.report import ReplayReport
    from kvcore.apps.replay.workload import Workload

__all__ = ["Comparison", "ComparisonRun", "TierSizes", "compare"]

_TIMELINE_PARTS = 100


class TierSizes(NamedTuple):
    """Pages of each replica's host tier, and of the disk, and slots of states; 0 without a tier."""

    host_pages: int
    disk_pages: int
    host_state_slots: int = 0

    def name(self, page_bytes: int, slot_bytes: int = 0) -> str:
        """Write the sizes for the name of a curve, in GiB if the bytes of a page are known."""
        names = {name: self.size(name, page_bytes, slot_bytes) for name in ("host", "disk")}
        return " + ".join(f"{size} {name}" for name, size in names.items() if size) or "device only"

    def size(self, tier: Literal["host", "disk"], page_bytes: int, slot_bytes: int = 0) -> str:
        """Write the bytes of a tier, or its pages if the bytes of a page are unknown."""
        pages, slots = self.disk_pages, 0
        if tier == "host":
            pages, slots = self.host_pages, self.host_state_slots
        if not pages:
            return ""
        return format_size(pages * page_bytes + slots * slot_bytes) if page_bytes else f"{pages:,}"


@dataclass(frozen=True, kw_only=True)
class ComparisonRun:
    """One replay: its report and its timeline."""

    report: ReplayReport
    timeline: TimelineBins


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of each policy in each pool.

    With a `model`, the manager serves the model's groups. If `has_flat`, each policy also has a
    curve of the flat cache, whose pages have all layers, in the same number of bytes. With several
    `tiers`, each policy has a curve for each of them.

    Attributes
    ----------
    mode, workload : str
        As in `ReplayReport`.
    page_size, replicas : int
        Tokens per page, replicas.
    page_bytes : int
        Bytes of the pages that `pages` counts; 0 if unknown.
    state_slots : tuple of int
        State slots of each pool's replica; zeros without states.
    tiers : tuple of TierSizes
        The tiers below the device, rising; without tiers one entry of zeros.
    policies : tuple of str
        Names of the eviction policies.
    pages : tuple of int
        Pages per replica, rising. A page has all layers, unless there is a `model` and no flat
        cache: in this case pages are counted as in `ReplayReport`.
    runs : tuple of ComparisonRun
        The runs, curve by curve, each curve in the order of `pages`.
    optima : tuple of Optimum
        Optima of the flat cache on the device, in the order of `pages`. With a model and no flat
        cache, the optima of its full-attention layers, which are bounds for the model. Empty in
        online mode: the order of the requests depends on the policy, so there is no single optimum.
    model : KVCacheParams or None
        Model with the replayed groups.
    has_flat : bool
        Whether a model's groups are compared with the flat cache.
    prompt_lengths : numpy.ndarray
        int64 ``[n]``, as in `Workload`.
    most_cached_tokens : int or None
        Prompt tokens that a cache without evictions finds; None in online mode. With a model and no
        flat cache, None unless a replay had no evictions and refused no request.
    assumptions : tuple of str
        As in `Workload`.
    optimum_seconds, wall_seconds : float
        Time for the optimum; time of the whole comparison.
    """

    mode: str
    workload: str
    page_size: int
    replicas: int
    policies: tuple[str, ...]
    pages: tuple[int, ...]
    page_bytes: int
    state_slots: tuple[int, ...]
    tiers: tuple[TierSizes, ...]
    runs: tuple[ComparisonRun, ...]
    optima: tuple[Optimum, ...]
    model: KVCacheParams | None
    has_flat: bool
    prompt_lengths: NDArray[np.int64] = field(repr=False, compare=False)
    most_cached_tokens: int | None
    assumptions: tuple[str, ...]
    optimum_seconds: float
    wall_seconds: float

    @property
    def curves(self) -> tuple[str, ...]:
        """Names of the curves: a curve per policy, and per pair of tiers, or two with groups."""
        if not self.has_flat and len(self.tiers) == 1:
            return self.policies
        kinds = ["flat", "groups"]
        if not self.has_flat:
            kinds = [each.name(self.page_bytes, self.state_slot_bytes) for each in self.tiers]
        return tuple(f"{each} {kind}" for each in self.policies for kind in kinds)

    @property
    def host_pages(self) -> int:
        """Pages of each replica's host tier, the largest of `tiers`; 0 without a tier."""
        return max(each.host_pages for each in self.tiers)

    @property
    def disk_pages(self) -> int:
        """Pages of the disk, the largest of `tiers`; 0 without a disk."""
        return max(each.disk_pages for each in self.tiers)

    @property
    def optimum_name(self) -> str:
        """Name of the curve of `optima`; the optimum does not include groups and tiers."""
        if self.host_pages:
            return "device optimum" if self.model is None else "device bound"
        if self.has_flat:
            return "flat optimum"
        return "optimum" if self.model is None else "bound"

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each pool's replica with its state slots; empty if unknown."""
        if not self.page_bytes:
            return ()
        slot = self.state_slot_bytes
        sizes = zip(self.pages, self.state_slots, strict=True)
        return tuple(pages * self.page_bytes + slots * slot for pages, slots in sizes)

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of a state slot; 0 without states."""
        return 0 if self.model is None else self.model.bytes_per_state_slot

    @cached_property
    def decision(self) -> Decision:
        """The least memory for 95 % of the best hit rate, and more: see `Decision`."""
        return decide(self)

    def of(self, curve: str) -> tuple[ComparisonRun, ...]:
        """Return the runs of a curve, in the order of `pages`."""
        first = self.curves.index(curve) * len(self.pages)
        return self.runs[first : first + len(self.pages)]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, ready for JSON."""
        names = ("mode", "workload", "page_size", "replicas", "policies", "pages")
        told = {name: getattr(self, name) for name in names}
        told["replays"] = len(self.runs)
        if self.page_bytes:
            told["memory"] = self.memory
        if self.page_bytes and (self.model is None or self.has_flat):
            told["flat_page_bytes"] = self.page_bytes
        if self.model is not None:
            told["group_page_bytes"] = self.model.bytes_per_page
            if self.model.state_groups:
                told["state_slots"] = self.state_slots
                told["state_slot_bytes"] = self.state_slot_bytes
        if self.host_pages:
            told |= {"host_pages": self.host_pages, "disk_pages": self.disk_pages}
            told["tiers"] = [each._asdict() for each in self.tiers]
        named = self.curves != self.policies
        rows = [(curve, run) for curve in self.curves for run in self.of(curve)]
        told["results"] = [
            run.report.to_dict() | ({"curve": curve} if named else {}) for curve, run in rows
        ]
        told["optimum_name"] = self.optimum_name
        told["optimum"] = [self._optimum_row(*each) for each in enumerate(self.optima)]
        told["timelines"] = [
            {"curve": curve, "pages": run.report.pages} | run.timeline.to_dict()
            for curve, run in rows
        ]
        told["most_cached_tokens"] = self.most_cached_tokens
        told["decision"] = self.decision.to_dict()
        seconds = ("optimum_seconds", "wall_seconds")
        return told | {name: getattr(self, name) for name in seconds}

    def _optimum_row(self, index: int, best: Optimum) -> dict[str, Any]:
        size = {"memory_gib": gib(self.memory[index])} if self.memory else {}
        return best.to_dict() | size


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

    With a `model`, each replay runs twice: with pages of all layers, and with the model's groups in
    the same number of bytes. Pools that have a model serve only its groups.

    Parameters
    ----------
    workload : Workload
        The requests.
    pools : sequence of PoolSettings
        At least one pool; the pools may differ only in their number of pages and in their tiers,
        and each number of pages is there with the same tiers. Their `policy` is not used.
    policies : sequence of str
        Names of eviction policies, at least one.
    engine : EngineSettings, optional
        Replay online with these settings. None: admission mode, in which each request is released
        before the next request claims.
    model : KVCacheParams, optional
        Model with windows or chunks, and the page size of the pools, to compare with the flat
        cache; the pools have no model in this case.
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
        The manager refuses a pool; the model has no windows or has a state; a pool has tiers or a
        model and there is a model; a number of pages lacks a pair of tiers.
    PageUsesError
        The prompts have too many pages for the optimum; the comparison ends before any replay.
    """
    started = perf_counter()
    if model is not None:
        if any(pool.model is not None for pool in pools):
            raise PoolError(
                "the pools have a model, and another model is given; expected the model in the "
                "pools, or a model to compare with flat pools"
            )
        pools = [replace(pool, page_bytes=flat_page_bytes(model)) for pool in pools]
    by_tiers = _by_tiers(pools)
    tiers, kinds = tuple(by_tiers), list(by_tiers.values())
    pools = kinds[0]
    if model is not None:
        kinds += [[pool.with_groups(model) for pool in kind] for kind in kinds]
    progress = _Progress(on_progress, len(workload))
    optima, most = ((), None) if engine is not None else _optima(workload, pools, chunk, progress)
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
    if pools[0].model is not None:
        most = _unlimited(runs) if engine is None else None
    return Comparison(
        mode=runs[0].report.mode,
        workload=workload.name,
        page_size=pools[0].page_size,
        replicas=pools[0].replicas,
        policies=tuple(policies),
        pages=tuple(pool.pages_per_replica for pool in pools),
        page_bytes=pools[0].page_bytes,
        state_slots=tuple(
            0 if run.report.states is None else run.report.states.slots
            for run in runs[: len(pools)]
        ),
        tiers=tiers,
        runs=runs,
        optima=optima,
        model=model or pools[0].model,
        has_flat=model is not None,
        prompt_lengths=workload.prompt_lengths,
        most_cached_tokens=most,
        assumptions=workload.assumptions,
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


def _by_tiers(pools: Sequence[PoolSettings]) -> dict[TierSizes, list[PoolSettings]]:
    """Sort the pools by tiers and pages; PoolError if the tiers have different pages."""
    found: dict[TierSizes, list[PoolSettings]] = {}
    for pool in sorted(pools, key=lambda p: (p.host_pages, p.disk_pages, p.memory, p.total_pages)):
        tiers = TierSizes(pool.host_pages, pool.disk_pages, pool.host_state_slots)
        found.setdefault(tiers, []).append(pool)
    sizes = [[pool.pages_per_replica for pool in each] for each in found.values()]
    if any(each != sizes[0] for each in sizes):
        raise PoolError(
            f"the tiers {', '.join(each.name(0) for each in found)} have pools of {sizes} pages; "
            f"expected the same pages for all tiers"
        )
    return found


def _optima(
    workload: Workload, pools: Sequence[PoolSettings], chunk: int | None, progress: _Progress
) -> tuple[tuple[Optimum, ...], int]:
    """Return the optimum of each pool, and the tokens that a flat cache finds without evictions."""
    uses = page_uses(workload, pools[0].hit_tokens, on_progress=progress.current)
    progress.finish()
    best = tuple(_optimum(uses, pool, chunk or int(uses.lengths.max())) for pool in pools)
    return best, int(uses.best_hits.sum())


def _optimum(uses: PageUses, pool: PoolSettings, chunk: int) -> Optimum:
    """Return the optimum of a flat pool, or the bound of a model's pool.

    Every hit of a model is a hit in the pages of its full-attention layers: windows and checkpoints
    only shorten hits. So the optimum of a cache with only these layers, in all pages of the pool,
    is a bound. It serves the same requests as the model. Its number of whole pages is computed from
    its tokens, because its runs of tokens may be longer than a page.
    """
    if pool.model is None:
        return optimum(uses, pool.pages_per_replica, replicas=pool.replicas)
    most = pool.pages_per_replica
    served = np.array([pool.most_pages(n, chunk) <= most for n in uses.lengths.tolist()], np.bool_)
    found = optimum(uses, pool.full_columns, replicas=pool.replicas, served=served)
    page, lengths = pool.page_size, uses.lengths
    counts = {"prompt_pages": int((-(-lengths // page)).sum())}
    return replace(found, pages=most, cached_pages=found.cached_tokens // page, **counts)


def _unlimited(runs: Sequence[ComparisonRun]) -> int | None:
    """Return the tokens that a replay with enough memory found; None if memory was short in all."""
    found = [run.report.cached_tokens for run in runs if run.report.is_unlimited]
    return max(found, default=None)


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
