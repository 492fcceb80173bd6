# SPDX-License-Identifier: Apache-2.0
"""Compare a manager's advice with exact replays of other pool sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.apps.replay.admission import replay_admission
from kvcore.apps.replay.belady import optimum
from kvcore.apps.replay.pool import PoolError
from kvcore.apps.replay.report import gib
from kvcore.apps.replay.uses import page_uses

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcore.apps.replay.pool import PoolSettings
    from kvcore.apps.replay.report import ReplayReport
    from kvcore.apps.replay.workload import Workload
    from kvcore.metrics import Advice, AdviceRow

__all__ = ["ADVICE_REPLAYS", "AdviceCheck", "CheckedRate", "check_advice"]

#: Replays of `check_advice`: with advice, LRU at each size, the optimum.
ADVICE_REPLAYS = 6
_LRU = "lru"
_MOST_RECORDS = 100_000  # of sampled pages; a manager keeps up to 122,880 for each replica
_RECORDS_PER_USE = 2  # a use and a release


@dataclass(frozen=True, kw_only=True)
class CheckedRate:
    """A token hit rate that the advice estimates, and the exact rate.

    Attributes
    ----------
    policy : str
        "lru" or "optimum".
    factor : float
        Pages divided by the pages of the replay with advice.
    pages : int
        Pages per replica.
    page_bytes : int
        Bytes of a page; 0 if unknown.
    estimate, exact : float
        Fraction of all prompt tokens, from 0 to 1.
    """

    policy: str
    factor: float
    pages: int
    page_bytes: int
    estimate: float
    exact: float

    @property
    def error_points(self) -> float:
        """The estimate minus the exact rate, in percentage points."""
        return 100 * (self.estimate - self.exact)

    def to_dict(self) -> dict[str, Any]:
        """List every field by name, ready for JSON; GiB if the page has known bytes."""
        told = vars(self) | {"error_points": self.error_points}
        size = told.pop("page_bytes")
        return told | ({"memory_gib": gib(self.pages * size)} if size else {})


@dataclass(frozen=True, kw_only=True)
class AdviceCheck:
    """The advice of a manager after a replay, with the exact rates.

    Attributes
    ----------
    report : ReplayReport
        The replay of the manager with advice.
    advice : kvcore.metrics.Advice
        Its advice at the end.
    rates : tuple of CheckedRate
        LRU at each factor of the advice, and last the optimum.
    """

    report: ReplayReport
    advice: Advice
    rates: tuple[CheckedRate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts of the sample and the rates, ready for JSON."""
        names = ("sample", "admissions", "sampled_uses", "lost_uses")
        told = {name: getattr(self.advice, name) for name in names}
        return told | {"rates": [each.to_dict() for each in self.rates]}


def check_advice(
    workload: Workload,
    pool: PoolSettings,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> AdviceCheck:
    """Replay a workload with advice, and replay LRU exactly at each size of the advice.

    Parameters
    ----------
    workload : Workload
        The requests, which run in admission mode.
    pool : PoolSettings
        The pool, with a sample in `advice`, without tiers and groups. If the record of a manager is
        too short for the workload, fewer pages are sampled.
    on_progress : callable, optional
        Called from time to time with the number of finished requests in all replays; the optimum
        counts as a replay. There are `ADVICE_REPLAYS` replays.

    Returns
    -------
    AdviceCheck

    Raises
    ------
    PoolError
        The manager refuses the pool, or the pool has tiers or groups.
    PageUsesError
        The prompts have too many pages for the optimum.

    Notes
    -----
    Costs one replay for each size, and the optimum.
    """
    if pool.host_pages or pool.model is not None:
        raise PoolError(
            "advice describes pages of all layers on the device; expected a pool without tiers, "
            "and a model whose layers all keep every token"
        )
    done = 0

    def progress() -> Callable[[int], None] | None:
        nonlocal done
        before, done = done, done + len(workload)
        return None if on_progress is None else lambda now: on_progress(before + now)

    uses = page_uses(workload, pool.page_size, on_progress=progress())
    sample = _fitting(pool.advice, len(uses.nodes))
    report = replay_admission(workload, replace(pool, advice=sample), on_progress=progress())
    advice = report.advice
    assert advice is not None
    share = advice.prompt_tokens / report.prompt_tokens

    def checked(policy: str, row: AdviceRow, exact: float) -> CheckedRate:
        return CheckedRate(
            policy=policy,
            factor=row.factor,
            pages=row.pages,
            page_bytes=pool.page_bytes,
            estimate=share * row.hit_rate,
            exact=exact,
        )

    rates = []
    for row in advice.rows:
        size = replace(pool, policy=_LRU, pages=max(1, row.pages), advice=0, explain=False)
        found = replay_admission(workload, size, on_progress=progress())
        rates.append(checked(_LRU, row, found.token_hit_rate))
    best = optimum(uses, pool.pages_per_replica, replicas=pool.replicas)
    rates.append(checked("optimum", advice.optimum, best.token_hit_rate))
    return AdviceCheck(report=report, advice=advice, rates=tuple(rates))


def _fitting(sample: int, uses: int) -> int:
    """Return the sample, or a larger one whose records fit."""
    while _RECORDS_PER_USE * uses > _MOST_RECORDS * sample:
        sample *= 2
    return sample
