# SPDX-License-Identifier: Apache-2.0
"""Record samples during a replay, for curves over time."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Timeline", "TimelineBins"]

_NS_PER_US = 1e3


@dataclass(frozen=True, kw_only=True)
class TimelineBins:
    """A timeline in parts of equal length; NaN for a part without samples.

    Attributes
    ----------
    ends : list of float
        End of each part, in requests or seconds.
    hit_rates : list of float
        Fraction of the prompt tokens found in the cache.
    step_us_p50, step_us_p99 : list of float
        Microseconds in the manager per step; in admission mode per request.
    used_pages, cached_pages : list of float
        Mean number of pages that requests held, and of pages in the prefix cache.
    """

    ends: list[float]
    hit_rates: list[float]
    step_us_p50: list[float]
    step_us_p99: list[float]
    used_pages: list[float]
    cached_pages: list[float]

    def to_dict(self) -> dict[str, list[float | None]]:
        """List every series by name, ready for JSON: None for a part without samples."""
        return {
            name: [None if math.isnan(each) else each for each in values]
            for name, values in vars(self).items()
        }


class Timeline:
    """Collect samples of requests, steps and pages, each with its time.

    Examples
    --------
    >>> from kvcore.replay import Timeline
    >>> timeline = Timeline()
    >>> for now in range(4):
    ...     timeline.add_request(now, prompt_tokens=10, cached_tokens=2 * now)
    ...     timeline.add_step(now, 1_000 * now)
    ...     timeline.add_pages(now, used=1, cached=now)
    >>> bins = timeline.binned(2)
    >>> bins.hit_rates, bins.step_us_p50, bins.cached_pages
    ([0.1, 0.5], [0.5, 2.5], [0.5, 2.5])
    """

    def __init__(self) -> None:
        self._request_times = array("d")
        self._prompts = array("q")
        self._hits = array("q")
        self._step_times = array("d")
        self._step_ns = array("q")
        self._page_times = array("d")
        self._used = array("q")
        self._cached = array("q")

    def add_request(self, now: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Add a request with its prompt tokens and its cached tokens."""
        self._request_times.append(now)
        self._prompts.append(prompt_tokens)
        self._hits.append(cached_tokens)

    def add_step(self, now: float, spent_ns: int) -> None:
        """Add a step with its nanoseconds in the manager."""
        self._step_times.append(now)
        self._step_ns.append(spent_ns)

    def add_pages(self, now: float, used: int, cached: int) -> None:
        """Add the number of pages that requests hold, and of cached pages."""
        self._page_times.append(now)
        self._used.append(used)
        self._cached.append(cached)

    def binned(self, parts: int) -> TimelineBins:
        """Divide the samples into parts of equal length.

        Parameters
        ----------
        parts : int
            Maximum number of parts; with fewer samples there are fewer parts.

        Returns
        -------
        TimelineBins
            The parts; it has no parts without samples.
        """
        series = (self._request_times, self._step_times, self._page_times)
        times = [np.array(each, np.float64) for each in series]
        parts = min(parts, max(map(len, times)))
        ends = _ends(times, parts)
        requests, steps, pages = (np.searchsorted(ends[:-1], each) for each in times)
        prompts = np.bincount(requests, self._prompts, parts)
        return TimelineBins(
            ends=ends.tolist(),
            hit_rates=_ratio(np.bincount(requests, self._hits, parts), prompts),
            step_us_p50=_percentiles(steps, self._step_ns, parts, 50),
            step_us_p99=_percentiles(steps, self._step_ns, parts, 99),
            used_pages=_means(pages, self._used, parts),
            cached_pages=_means(pages, self._cached, parts),
        )


def _ends(times: list[NDArray[np.float64]], parts: int) -> NDArray[np.float64]:
    filled = [each for each in times if len(each)]
    if not filled:
        return np.empty(0)
    first = min(float(each.min()) for each in filled)
    last = max(float(each.max()) for each in filled)
    return np.linspace(first, last, parts + 1)[1:]


def _ratio(values: NDArray[Any], counts: NDArray[Any]) -> list[float]:
    with np.errstate(invalid="ignore"):
        found: list[float] = (values / counts).tolist()
    return found


def _means(places: NDArray[np.int64], values: array[int], parts: int) -> list[float]:
    counts = np.bincount(places, minlength=parts)
    return _ratio(np.bincount(places, values, parts), counts)


def _percentiles(
    places: NDArray[np.int64], values: array[int], parts: int, percent: float
) -> list[float]:
    order = np.argsort(places, kind="stable")
    spent = np.array(values, np.float64)[order] / _NS_PER_US
    edges = np.searchsorted(places[order], np.arange(1, parts))
    groups = np.split(spent, edges) if parts else []
    return [float(np.percentile(each, percent)) if len(each) else np.nan for each in groups]
