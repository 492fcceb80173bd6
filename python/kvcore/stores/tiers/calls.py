# SPDX-License-Identifier: Apache-2.0
"""Call a store with a time limit; count its calls, and stop calling a store that fails."""

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
    """Counters of one store; any number of threads may use them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = {
            kind: deque(maxlen=_LATENCIES) for kind in ("read", "write")
        }
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to counters; their names are fields of `TierMetrics`."""
        with self._lock:
            self._counts.update(counts)

    def took(self, kind: Literal["read", "write"], seconds: float) -> None:
        """Record the time of a batch."""
        with self._lock:
            self._times[kind].append(seconds)

    def metrics(
        self, breaker: Literal["closed", "open", "half-open"] = "closed", waiting: int = 0
    ) -> TierMetrics:
        """Return the counters."""
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

#: The result of a call that failed.
FAILED: Any = object()


@dataclass(frozen=True)
class StoreLimits:
    """Limits of the calls of a store.

    Parameters
    ----------
    seconds : float
        Time limit of a call.
    breaker_failures : int
        After this number of consecutive failures, no call starts for `breaker_seconds`.
    breaker_seconds : float
    calls : int
        The most calls at a time, including calls that exceeded the time limit.
    """

    seconds: float = 5.0
    breaker_failures: int = 5
    breaker_seconds: float = 10.0
    calls: int = 40  # for the threads of `Onload` and the writer


class StoreCalls:
    """Make the calls of one store. A call that fails returns `FAILED`, and is counted.

    Parameters
    ----------
    name : str
    counters : StoreCounters
    limits : StoreLimits
    in_threads : bool
        Whether to make calls in threads, because a call of this store may never return.
    """

    def __init__(
        self, name: str, counters: StoreCounters, limits: StoreLimits, *, in_threads: bool
    ) -> None:
        self._name, self._counters, self._limits = name, counters, limits
        self.breaker = Breaker(limits.breaker_failures, limits.breaker_seconds)
        self._workers = Workers(f"kvcore {name}", limits.calls) if in_threads else None

    def make(self, work: Callable[[], Any], timed: Literal["read", "write"] | None = None) -> Any:
        """Make a call and return its result; return `FAILED` if it fails.

        A call that exceeds the time limit continues. `work` must hold all memory that the store
        uses, because the store may use it until the call is over.
        """
        if not self.breaker.admits():
            return FAILED
        began = perf_counter()
        try:
            result = work() if self._workers is None else self._wait_for(work)
        except Exception as error:  # noqa: BLE001 - whatever a store raises is a miss
            self._fail(error)
            return FAILED
        except BaseException:  # such as an interrupt of the caller
            self.breaker.failed()
            raise
        if result is FAILED:  # a time-out opens the breaker at once, or each page would wait
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
            except BaseException as error:  # raised by the store, such as SystemExit
                raise KVCacheError("a store tried to end the program") from error
        self._counters.add(timeouts=1)
        return FAILED

    def _fail(self, error: Exception) -> None:
        if self.breaker.state == "closed":
            log.warning("the tier %s failed, which counts as a miss: %r", self._name, error)
        self._counters.add(errors=1)
        self.breaker.failed()
