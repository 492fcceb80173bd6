# SPDX-License-Identifier: Apache-2.0
"""Call a store that kvcore knows nothing of: time and errors are bounded, calls are counted."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any, Literal

from kvcore.errors import KVCacheError
from kvcore.metrics import TierMetrics
from kvcore.stores.breaker import Breaker
from kvcore.stores.tiers.workers import Workers

__all__ = ["FAILED", "StoreCalls", "StoreCounters", "StoreLimits"]

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


log = logging.getLogger("kvcore")

#: What a call returns that did not succeed.
FAILED: Any = object()


@dataclass(frozen=True)
class StoreLimits:
    """What a store may cost.

    Parameters
    ----------
    seconds : float
        That a call may take.
    breaker_failures : int
        In a row, after which the store is not asked for `breaker_seconds`.
    breaker_seconds : float
    calls : int
        At a time, those that have taken too long included.
    """

    seconds: float = 5.0
    breaker_failures: int = 5
    breaker_seconds: float = 10.0
    calls: int = 40  # those of `Onload` and of who writes


class StoreCalls:
    """Make the calls of one store; one that fails returns `FAILED` and counts.

    Parameters
    ----------
    name : str
    counters : StoreCounters
    limits : StoreLimits
    in_threads : bool
        Whether calls may hang, and are made where nobody waits for ever.
    """

    def __init__(
        self, name: str, counters: StoreCounters, limits: StoreLimits, *, in_threads: bool
    ) -> None:
        self._name, self._counters, self._limits = name, counters, limits
        self.breaker = Breaker(limits.breaker_failures, limits.breaker_seconds)
        self._workers = Workers(f"kvcore {name}", limits.calls) if in_threads else None

    def make(self, work: Callable[[], Any], timed: Literal["read", "write"] | None = None) -> Any:
        """Make a call, which holds all memory that the store gets, and return its result.

        A call that takes too long goes on; what it holds is nobody else's until it is over.
        """
        if not self.breaker.admits():
            return FAILED
        began = perf_counter()
        try:
            result = work() if self._workers is None else self._wait_for(work)
        except Exception as error:  # noqa: BLE001 - whatever a store raises is a miss
            self._fail(error)
            return FAILED
        except BaseException:  # of the caller's own
            self.breaker.failed()
            raise
        if result is FAILED:  # one time-out, not one for each page
            self.breaker.failed(is_dead=True)
            return FAILED
        self.breaker.succeeded()
        if timed is not None:
            self._counters.took(timed, perf_counter() - began)
        return result

    def close(self, timeout: float | None) -> bool:
        """End the threads; return whether they have ended."""
        return self._workers is None or self._workers.close(timeout)

    def _wait_for(self, work: Callable[[], Any]) -> Any:
        assert self._workers is not None
        job = self._workers.start(work)
        if job is not None and job.wait(self._limits.seconds):
            try:
                return job.result()
            except Exception:
                raise
            except BaseException as error:  # of the store's, such as SystemExit
                raise KVCacheError("a store tried to end the program") from error
        self._counters.add(timeouts=1)
        return FAILED

    def _fail(self, error: Exception) -> None:
        if self.breaker.state == "closed":
            log.warning("the tier %s failed, which is a miss: %r", self._name, error)
        self._counters.add(errors=1)
        self.breaker.failed()
