# SPDX-License-Identifier: Apache-2.0
"""Runtime check that ``update`` and ``step`` follow each run of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

__all__ = ["StepOrder"]

_MOST_RUNS = 2  # runs that wait for their step: the last run, and one more if steps overlap


#: Slot and generation of a claim, the request id, and start, active and end.
Row: TypeAlias = tuple[int, int, Any, tuple[int, int, int]]


class _Runs(NamedTuple):
    """Hold the runs of a claim since its last ``step``, or since its first ``fetch``."""

    generation: int
    before: tuple[int, int, int]  # start, active and end when these runs began
    start: int  # of the last fetch
    fetches: int  # number of fetches, each with a higher start than the fetch before


class StepOrder:
    """Detect a missing ``update`` before a ``step``, and a missing ``step`` before a ``fetch``.

    These calls are legal: a second ``fetch`` of a request that did not run, or whose run failed;
    chunks and multi-step runs; a ``rewind``; a ``step`` that is one ``fetch`` late; a ``step`` of a
    request that was not fetched.

    Parameters
    ----------
    is_caching : bool
        True if pages are cached; without caching, the caller may omit ``step``.
    """

    def __init__(self, *, is_caching: bool) -> None:
        self._is_caching = is_caching
        self._runs: dict[int, _Runs] = {}  # by slot of the sequence

    def before_fetch(self, rows: Iterable[Row]) -> None:
        """Check each row; raise ValueError for a missing ``step``."""
        for slot, generation, request_id, place in rows:
            runs = self._found(slot, generation)
            if runs and runs.fetches >= _MOST_RUNS and place[0] > runs.start and self._is_caching:
                raise ValueError(
                    f"request {request_id!r} has start_idx {place[0]} and was "
                    f"fetched {runs.fetches} times without a step: no page since token "
                    f"{runs.before[0]} is cached; call step(batch) after each update"
                )

    def fetched(self, rows: Iterable[Row]) -> None:
        """Record the position of each row after its ``fetch``, which may apply a prefix hit."""
        for slot, generation, _, place in rows:
            runs, start = self._found(slot, generation), place[0]
            before, fetches = place, 1
            if runs is not None:
                fetches = runs.fetches + 1 if start > runs.start else max(runs.fetches, 1)
                # A higher start means an update; the same or a lower start may mean a rewind.
                before = runs.before if start > runs.before[0] else place
            self._runs[slot] = _Runs(generation, before, start, fetches)

    def before_step(self, rows: Iterable[Row]) -> None:
        """Check each row; raise ValueError for a missing ``update``."""
        for slot, generation, request_id, place in rows:
            runs = self._found(slot, generation)
            if runs and runs.fetches and runs.before == place:
                raise ValueError(
                    f"request {request_id!r} has start_idx {place[0]}, as when it "
                    f"was fetched: no token of that run counts as written, and the same tokens "
                    f"would run again; call update_batch(batch, tokens) before step, or leave out "
                    f"a request whose run failed"
                )

    def stepped(self, rows: Iterable[Row]) -> None:
        """Record that the written pages of each row are cached."""
        for slot, generation, _, place in rows:
            self._runs[slot] = _Runs(generation, place, place[0], 0)

    def _found(self, slot: int, generation: int) -> _Runs | None:
        """Return the runs of a claim; None if the slot has no runs, or runs of an earlier claim."""
        runs = self._runs.get(slot)
        return runs if runs is not None and runs.generation == generation else None
