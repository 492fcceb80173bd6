# SPDX-License-Identifier: Apache-2.0
"""Hints for the policy ``hinted``: when the session of each request of a workload returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from kvcore.policies import Hinted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvcore.apps.replay.workload import Workload

__all__ = ["HINTED", "HINTS", "Hint", "VirtualClock", "has_hints", "hint_lines", "return_hints"]

#: Name of the policy that uses hints.
HINTED = Hinted.name
HINTS = ("class", "exact", "closed", "none")
_SOON, _LATER = 60.0, 600.0
_MOST_SECONDS = 8e9  # the bound of a manager's clock is a little higher

Hint: TypeAlias = float | Literal["soon", "later", "never"] | None


class VirtualClock:
    """A clock that a replay sets, in seconds since the first arrival."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time, at most the latest time that a manager takes."""
        return min(max(self.now, 0.0), _MOST_SECONDS)


def has_hints(workload: Workload) -> bool:
    """Return whether some request has a session, which gives it a hint."""
    return workload.sessions is None or bool((workload.sessions >= 0).any())


def hint_lines(workload: Workload, policies: Sequence[str]) -> tuple[str, ...]:
    """Return at most one line for a report: the policy that uses hints gets no hint."""
    if HINTED not in policies or has_hints(workload):
        return ()
    return (f"no request has a session: the policy {HINTED} gets no hints",)


def return_hints(workload: Workload, kind: str) -> list[Hint]:
    """Return ``returns_in`` for the context of each request.

    Parameters
    ----------
    workload : Workload
        The requests. A request without a session, and without a next turn in a workload without
        sessions, gets no hint.
    kind : str
        A name from `HINTS`. "exact": the seconds until the session's next arrival, and "never" for
        its last request; "class": "soon" or "later" in place of the seconds, and no hint for more
        than ten minutes; "closed": only the "never" of last requests; "none": no hint.

    Returns
    -------
    list
        Seconds, a word, or None.
    """
    if kind == "none":
        return [None] * len(workload)
    gaps = _gaps(workload).tolist()
    return [None if gap != gap else _hint(gap, kind) for gap in gaps]


def _hint(gap: float, kind: str) -> Hint:
    if gap == np.inf:
        return "never"
    if kind == "exact":
        return min(gap, _MOST_SECONDS)
    if kind == "closed":
        return None
    if gap <= _SOON:
        return "soon"
    return "later" if gap <= _LATER else None


def _gaps(workload: Workload) -> NDArray[np.float64]:
    """Return the seconds to the session's next arrival; inf for the last, NaN without a session."""
    following = _following(workload)
    gaps = np.full(len(workload), np.inf)
    has_next = following >= 0
    gaps[has_next] = workload.arrivals[following[has_next]] - workload.arrivals[has_next]
    if workload.sessions is not None:
        gaps[workload.sessions < 0] = np.nan
    np.maximum(gaps, 0.0, out=gaps)
    return gaps


def _following(workload: Workload) -> NDArray[np.int64]:
    """Return the next request of each request's session in the order of arrival; -1 for none."""
    if workload.sessions is None:
        return workload.next_turns
    following = np.full(len(workload), -1, np.int64)
    order = np.lexsort((workload.arrivals, workload.sessions))
    here, then = order[:-1], order[1:]
    same = workload.sessions[here] == workload.sessions[then]
    following[here[same]] = then[same]
    return following
