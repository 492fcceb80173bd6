# SPDX-License-Identifier: Apache-2.0
"""Decide from a comparison how much memory to buy; claim only the results of replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvcore.apps.replay.noise import least_lead
from kvcore.apps.replay.report import gib
from kvcore.support.byte_sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvcore.apps.replay.report import ReplayReport

__all__ = ["ENOUGH", "SAME", "Decision", "decide"]

#: Share of the best hit rate for which a decision names the least memory.
ENOUGH = 0.95
#: Share of a hit rate that counts as the same hit rate, when a tier replaces device memory.
SAME = 0.99


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a comparison shows about memory, policies and tiers.

    Attributes
    ----------
    best_hit_rate : float
        The best token hit rate that a cache could have on this workload.
    best_of : str
        Its source: "no evictions" (all memory that the workload could use) in admission mode, or
        "these replays" if only the best of the replays is known.
    enough : float
        Share of the best hit rate that is enough.
    pages : int or None
        Least replayed pages of a replica from which a policy finds enough at all larger replayed
        sizes; None if no size is enough.
    page_bytes : int
        Bytes of a page; 0 if unknown.
    memory : int or None
        Bytes of `pages` with the state slots of a replica; None if unknown.
    curve, hit_rate : str, float
        The curve that needs the fewest pages, and its hit rate with these pages. If no size is
        enough: the curve and the hit rate of the best replay.
    below_pages, below_hit_rate : int or None, float or None
        The next smaller replayed size of this curve and its hit rate, which is not enough.
    best_policy : str or None
        The policy that is best at this size by more than the noise.
    lead : float or None
        Least lead of `best_policy` over the next policy: the lower end of the interval of 95 %.
    tied : tuple of str
        Policies that the best policy does not exceed by more than the noise, and the best policy
        itself; empty with one policy.
    tier : dict or None
        With several tiers, the largest device up to `pages` that a smaller device with a larger
        tier replaces, with at least `SAME` of its hit rate: `policy`, `device_pages`,
        `host_pages`, `disk_pages`, `hit_rate`, and of the replaced device `instead_of_pages`,
        `instead_of_host_pages`, `instead_of_disk_pages` (its smallest tiers) and
        `instead_of_hit_rate`.
    text : str
        The decision as one line.
    """

    best_hit_rate: float
    best_of: str
    enough: float
    pages: int | None
    page_bytes: int
    memory: int | None
    curve: str
    hit_rate: float
    below_pages: int | None
    below_hit_rate: float | None
    best_policy: str | None
    lead: float | None
    tied: tuple[str, ...]
    tier: dict[str, Any] | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """List every field by name, ready for JSON; `memory_gib` if the page has known bytes."""
        told = dict(vars(self))
        if self.memory is not None:
            told["memory_gib"] = gib(self.memory)
        return told


class TierPages(Protocol):
    """The tiers of a curve; named as in `TierSizes`."""

    def _asdict(self) -> dict[str, Any]: ...
    def size(self, tier: Literal["host", "disk"], page_bytes: int, slot_bytes: int = 0) -> str: ...


class Run(Protocol):
    """A replay of a comparison."""

    @property
    def report(self) -> ReplayReport: ...


class Results(Protocol):
    """The results that a decision reads: the attributes of `Comparison`."""

    @property
    def policies(self) -> Sequence[str]: ...
    @property
    def curves(self) -> Sequence[str]: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def memory(self) -> Sequence[int]: ...
    @property
    def state_slot_bytes(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def tiers(self) -> Sequence[TierPages]: ...
    @property
    def prompt_lengths(self) -> NDArray[np.int64]: ...
    @property
    def most_cached_tokens(self) -> int | None: ...

    def of(self, curve: str) -> Sequence[Run]: ...


def decide(comparison: Results) -> Decision:
    """Decide from the results of a comparison.

    Parameters
    ----------
    comparison : Results

    Returns
    -------
    Decision

    Notes
    -----
    Sizes are replayed sizes: nothing is interpolated between them. A size is enough if the curve
    has `ENOUGH` of the best hit rate there and at every larger replayed size. With several tiers,
    the size is that of the smallest tiers with which a size is enough. A policy is best only if it
    leads each other policy by more than the noise (`least_lead`). Policies that find the same
    tokens in every request count as one policy.
    """
    return _Decider(comparison).decide()


@dataclass(frozen=True)
class _Column:
    """The hit rates of one curve over the pages."""

    curve: str
    policy: str
    tier: int
    reports: Sequence[ReplayReport]

    @property
    def rates(self) -> list[float]:
        return [each.token_hit_rate for each in self.reports]

    def enough_from(self, target: float) -> int | None:
        """Return the index of the first size from which all sizes reach the target."""
        rates = self.rates
        short = [i for i, rate in enumerate(rates) if rate < target]
        first = short[-1] + 1 if short else 0
        return first if first < len(rates) else None


class _Decider:
    """Make the parts of a decision."""

    def __init__(self, comparison: Results) -> None:
        self._comparison = comparison
        kinds = len(comparison.curves) // len(comparison.policies)
        self._columns = [
            _Column(
                curve,
                comparison.policies[i // kinds],
                i % kinds,
                [run.report for run in comparison.of(curve)],
            )
            for i, curve in enumerate(comparison.curves)
        ]
        self._kinds = kinds
        prompts = self._columns[0].reports[0].prompt_tokens
        measured = max(rate for column in self._columns for rate in column.rates)
        most = comparison.most_cached_tokens
        unlimited = most / prompts if most is not None and prompts else 0.0
        self._best, self._best_of = (
            (unlimited, "no evictions") if unlimited >= measured else (measured, "these replays")
        )

    def decide(self) -> Decision:
        place, column = self._choose()
        index = len(column.rates) - 1 if place is None else place
        if place is None:
            index = column.rates.index(max(column.rates))
        best, lead, tied = self._best_policy(column.tier, index)
        pages, memory = self._comparison.pages, self._comparison.memory
        below = None if place in (None, 0) else index - 1
        tier = self._tier()
        lines = [
            self._size_text(place, index, column),
            self._policy_text(best, lead, tied, index),
            self._tier_text(tier),
            self._states_text(column, index),
        ]
        return Decision(
            best_hit_rate=self._best,
            best_of=self._best_of,
            enough=ENOUGH,
            pages=None if place is None else pages[place],
            page_bytes=self._comparison.page_bytes,
            memory=None if place is None or not memory else memory[place],
            curve=column.curve,
            hit_rate=column.rates[index],
            below_pages=None if below is None else pages[below],
            below_hit_rate=None if below is None else column.rates[below],
            best_policy=best,
            lead=lead,
            tied=tied,
            tier=tier,
            text=" ".join(filter(None, lines)),
        )

    def _choose(self) -> tuple[int | None, _Column]:
        """Return the least size that is enough, and its curve; or None and the best curve."""
        # Tiers follow from the smallest to the largest; groups compete with the flat cache.
        kinds = [[i] for i in range(self._kinds)] if self._has_tiers else [[*range(self._kinds)]]
        for kind in kinds:
            place, column = self._choose_in([each for each in self._columns if each.tier in kind])
            if place is not None:
                return place, column
        return None, max(self._columns, key=lambda column: max(column.rates))

    def _choose_in(self, columns: Sequence[_Column]) -> tuple[int | None, _Column]:
        """Return the least size of these curves that is enough, or None and the best of them."""
        found = []
        for i, column in enumerate(columns):
            first = column.enough_from(ENOUGH * self._best)
            if first is not None:
                found.append((first, -column.rates[first], i))
        if found:
            place, _, i = min(found)
            return place, columns[i]
        return None, max(columns, key=lambda column: max(column.rates))

    @property
    def _has_tiers(self) -> bool:
        return len(self._comparison.tiers) > 1

    def _best_policy(
        self, tier: int, index: int
    ) -> tuple[str | None, float | None, tuple[str, ...]]:
        """Return the policy that leads by more than the noise, its lead, and the tied policies."""
        rivals = [column for column in self._columns if column.tier == tier]
        if len(rivals) == 1:
            return None, None, ()
        best = max(rivals, key=lambda column: column.rates[index])
        hits = best.reports[index].request_hits
        same = [each for each in rivals if each.reports[index].request_hits == hits]
        leads = {
            each.policy: least_lead(hits, each.reports[index].request_hits, self._prompts)
            for each in rivals
            if each not in same
        }
        tied = [name for name, lead in leads.items() if lead <= 0]
        if leads and not tied:
            return best.policy, min(leads.values()), tuple(each.policy for each in same)
        return None, None, (*(each.policy for each in same), *tied)

    @property
    def _prompts(self) -> NDArray[np.int64]:
        return self._comparison.prompt_lengths

    def _tier(self) -> dict[str, Any] | None:
        """Find the largest device that a smaller device and a larger tier replace."""
        comparison = self._comparison
        if not self._has_tiers:
            return None
        place, base = self._choose_in([each for each in self._columns if each.tier == 0])
        most = base.rates.index(max(base.rates)) if place is None else place
        rivals = [each for each in self._columns if each.policy == base.policy and each.tier > 0]
        smallest = comparison.tiers[0]._asdict()
        for index in range(most, 0, -1):
            rate = base.rates[index]
            found = [
                (smaller, each.tier, each.rates[smaller])
                for each in rivals
                for smaller in range(index)
                if each.rates[smaller] >= SAME * rate > base.rates[smaller]
            ]
            if found:
                smaller, kind, with_tier = min(found)
                return {
                    "policy": base.policy,
                    "device_pages": comparison.pages[smaller],
                    **comparison.tiers[kind]._asdict(),
                    "hit_rate": with_tier,
                    "instead_of_pages": comparison.pages[index],
                    "instead_of_host_pages": smallest["host_pages"],
                    "instead_of_disk_pages": smallest["disk_pages"],
                    "instead_of_hit_rate": rate,
                }
        return None

    def _size_text(self, place: int | None, index: int, column: _Column) -> str:
        share = f"{ENOUGH:.0%} of the best hit rate ({self._best:.2%} with {self._best_of})"
        if self._best_of == "these replays":
            share = f"{ENOUGH:.0%} of the best hit rate of these replays ({self._best:.2%})"
        rate = f"{column.rates[index]:.2%}"
        if place is None:
            return (
                f"No replayed size finds {share}: the most is {rate}, with {column.curve} in "
                f"{self._size(index)}."
            )
        below = "; no smaller size was replayed"
        if index:
            below = f"; {self._size(index - 1)} find {column.rates[index - 1]:.2%}"
        return f"{share} from {self._size(index)} on, with {column.curve}: {rate}{below}."

    def _policy_text(
        self, best: str | None, lead: float | None, tied: tuple[str, ...], index: int
    ) -> str:
        size = self._size(index)
        if best is not None and lead is not None:
            also = f" ({', '.join(tied[1:])}: the same hits)" if len(tied) > 1 else ""
            return (
                f"In {size}, {best}{also} is best by more than the noise: by at least "
                f"{lead * 100:.2f} points."
            )
        if len(tied) > 1:
            return f"In {size}, no policy is best by more than the noise: {', '.join(tied)}."
        return ""

    def _tier_text(self, tier: dict[str, Any] | None) -> str:
        if tier is None:
            return "In these replays, no tier replaces device memory." * self._has_tiers
        tiers = self._comparison.tiers
        below = next(each for each in tiers if each._asdict().items() <= tier.items())
        return (
            f"With {tier['policy']}, {self._levels(tier['device_pages'], below)} find as much as "
            f"{self._levels(tier['instead_of_pages'], tiers[0])}: {tier['hit_rate']:.2%} and "
            f"{tier['instead_of_hit_rate']:.2%}."
        )

    def _levels(self, pages: int, below: TierPages) -> str:
        """Write the memory of a device with these pages and of the tiers below."""
        bytes_of = self._comparison.page_bytes, self._comparison.state_slot_bytes
        sizes = {
            "a host tier": below.size("host", *bytes_of),
            "a disk": below.size("disk", *bytes_of),
        }
        unit = "" if self._comparison.page_bytes else " pages"
        names = [f"{name} of {size}{unit}" for name, size in sizes.items() if size]
        return " and ".join([f"{self._device(pages)} of device memory", *names])

    def _states_text(self, column: _Column, index: int) -> str:
        """Write whether state slots or pages were short in the pool of the decision."""
        report = column.reports[index]
        found = report.states
        if found is None:
            return ""
        size, slots = self._size(index), f"{found.slots:,} state slots"
        if 2 * found.evicted_checkpoints > found.checkpoints_made:
            return (
                f"In {size}, {found.evicted_checkpoints:,} of {found.checkpoints_made:,} "
                f"checkpoints were evicted from {slots}: more slots may find more."
            )
        free = found.slots * report.replicas - found.checkpoints
        if report.evicted_pages and not found.evicted_checkpoints and 2 * free > found.slots:
            return (
                f"In {size}, no checkpoint was evicted from {slots}, and {report.evicted_pages:,} "
                f"pages were evicted: fewer slots leave more pages."
            )
        return ""

    def _size(self, index: int) -> str:
        each = " on each replica" if self._comparison.replicas > 1 else ""
        return f"{self._device(self._comparison.pages[index])}{each}"

    def _device(self, pages: int) -> str:
        """Write the memory of the pool with these pages, or the pages."""
        comparison = self._comparison
        if comparison.memory:
            return format_size(comparison.memory[comparison.pages.index(pages)])
        return f"{pages:,} pages"
