# SPDX-License-Identifier: Apache-2.0
"""Count what a store was asked for and what came of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from threading import Lock
from typing import Any, Literal

from kvcore.metrics import TierMetrics

__all__ = ["StoreCounters"]

_LATENCIES = 512


class StoreCounters:
    """Count for one store; any number of threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = {
            kind: deque(maxlen=_LATENCIES) for kind in ("read", "write")
        }
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to counters that `TierMetrics` has."""
        with self._lock:
            self._counts.update(counts)

    def took(self, kind: Literal["read", "write"], seconds: float) -> None:
        """Note how long a batch took."""
        with self._lock:
            self._times[kind].append(seconds)

    def metrics(
        self, breaker: Literal["closed", "open", "half-open"] = "closed", waiting: int = 0
    ) -> TierMetrics:
        """Return a copy."""
        with self._lock:
            counts = dict(self._counts)
            times = {kind: sorted(each) for kind, each in self._times.items()}
        latencies = {
            f"{kind}_p{percent}": _percentile(each, percent)
            for kind, each in times.items()
            for percent in (50, 99)
        }
        fields: dict[str, Any] = {**counts, **latencies}
        return TierMetrics(**fields, breaker=breaker, pages_waiting=waiting)


def _percentile(ordered: Iterable[float], percent: int) -> float:
    values = list(ordered)
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0
