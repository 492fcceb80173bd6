# SPDX-License-Identifier: Apache-2.0
"""Stop calls to a store that fails, and detect when it works again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Admit no call for `seconds` after `failures` consecutive failures.

    After this time the breaker admits one call at a time. A call that succeeds closes the breaker;
    a call that fails starts the time again.

    Parameters
    ----------
    failures : int
        Number of consecutive failures that open the breaker.
    seconds : float
    clock : callable
        Returns seconds.
    """

    def __init__(
        self, failures: int, seconds: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._most, self._seconds, self._clock = failures, seconds, clock
        self._failures = 0
        self._until = 0.0
        self._trying = False
        self._lock = Lock()

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        """The state: "closed" admits all calls, "open" no call, "half-open" one call at a time."""
        if self._failures < self._most:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    def admits(self) -> bool:
        """Return whether a call may start; report its end with `succeeded` or `failed`."""
        if self._failures < self._most:
            return True
        with self._lock:
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """Report that a call succeeded."""
        if self._failures:
            with self._lock:
                self._failures, self._trying = 0, False

    def failed(self, *, is_dead: bool = False) -> None:
        """Report that a call failed; a time-out (`is_dead`) opens the breaker at once."""
        with self._lock:
            self._failures = self._most if is_dead else self._failures + 1
            self._trying = False
            if self._failures >= self._most:
                self._until = self._clock() + self._seconds
