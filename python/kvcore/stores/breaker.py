# SPDX-License-Identifier: Apache-2.0
"""Leave a store alone that fails, and find out when it works again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Count failures in a row; after so many nothing is tried for some time.

    Then one call at a time is let through. One that succeeds ends it; one that fails begins the
    time again.

    Parameters
    ----------
    failures : int
        In a row.
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
        """Whether calls are let through: all, none, or one at a time."""
        if self._failures < self._most:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    def admits(self) -> bool:
        """Ask to make a call, whose end is told to `succeeded` or `failed`."""
        if self._failures < self._most:
            return True
        with self._lock:
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def succeeded(self) -> None:
        """Tell that a call went well."""
        if self._failures:
            with self._lock:
                self._failures, self._trying = 0, False

    def failed(self, *, is_dead: bool = False) -> None:
        """Tell that a call failed; one that has taken too long is enough to open it."""
        with self._lock:
            self._failures = self._most if is_dead else self._failures + 1
            self._trying = False
            if self._failures >= self._most:
                self._until = self._clock() + self._seconds
