# SPDX-License-Identifier: Apache-2.0
"""Measure the time of the calls of a manager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from time import perf_counter_ns
from typing import Any

__all__ = ["CallTimer", "TimedManager"]

# Calls for one request: the first argument is its id or its context.
_OF_ONE = frozenset(
    {"claim", "release", "maybe_reserve", "get_or_recommend_replica", "get_replica"}
)


class CallTimer:
    """Add up the time spent in calls.

    Attributes
    ----------
    spent_ns : int
        Nanoseconds in all calls.
    of_request : dict of int
        Nanoseconds in the calls for one request, by the id of the request.

    Examples
    --------
    >>> from kvcore.apps.replay.timing import CallTimer
    >>> timer = CallTimer()
    >>> timer.timed(len)([1, 2, 3]), 0 < timer.spent_ns < 10**9
    (3, True)
    """

    def __init__(self) -> None:
        self.spent_ns = 0
        self.of_request: defaultdict[Hashable, int] = defaultdict(int)

    def timed(self, call: Callable[..., Any], *, of_one: bool = False) -> Callable[..., Any]:
        """Return a wrapper that times a call; `of_one` if its first argument is a request."""

        def wrapped(*args: Any, **named: Any) -> Any:
            started = perf_counter_ns()
            try:
                return call(*args, **named)
            finally:
                spent = perf_counter_ns() - started
                self.spent_ns += spent
                if of_one:
                    self.of_request[getattr(args[0], "request_id", args[0])] += spent

        return wrapped


class TimedManager:
    """A proxy of a manager that times the manager's calls."""

    def __init__(self, manager: Any, timer: CallTimer) -> None:
        self._manager = manager
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._manager, name)
        if callable(found):
            found = self._timer.timed(found, of_one=name in _OF_ONE)
            setattr(self, name, found)
        return found
