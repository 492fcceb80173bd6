# SPDX-License-Identifier: Apache-2.0
"""Whether each run of a request is followed by ``update`` and ``step``, for runtime checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

__all__ = ["StepOrder"]

_MOST_RUNS = 2  # that wait for their step: the last one, and one more where steps overlap


#: Slot and generation of a claim, the request id, and start, active and end.
Row: TypeAlias = tuple[int, int, Any, tuple[int, int, int]]


class _Runs(NamedTuple):
    """What is known of a claim since its last ``step``, or its first ``fetch``."""

    generation: int
    before: tuple[int, int, int]  # start, active and end when these runs began
    start: int  # of the last fetch
    fetches: int  # each further on than the one before


class StepOrder:
    """Find contexts that nobody updates, and runs after which nobody calls ``step``.

    Legal are: a second ``fetch`` of what did not run, or failed; chunks and multi-step runs; a
    ``rewind``; a ``step`` that comes one ``fetch`` late; a ``step`` of what was not fetched.

    Parameters
    ----------
    is_caching : bool
        Whether pages are cached: without that a ``step`` may be left out.
    """

    def __init__(self, *, is_caching: bool) -> None:
        self._is_caching = is_caching
        self._runs: dict[int, _Runs] = {}  # by slot of the sequence

    def before_fetch(self, rows: Iterable[Row]) -> None:
        """Look at each row; ValueError for a missing ``step``."""
        for slot, generation, request_id, place in rows:
            runs = self._found(slot, generation)
            if runs and runs.fetches >= _MOST_RUNS and place[0] > runs.start and self._is_caching:
                raise ValueError(
                    f"request {request_id!r} has start_idx {place[0]} and was "
                    f"fetched {runs.fetches} times without a step: none of its pages since token "
                    f"{runs.before[0]} is cached; call step(batch) after each update"
                )

    def fetched(self, rows: Iterable[Row]) -> None:
        """Note where each row stands after its ``fetch``, which may have moved it to a hit."""
        for slot, generation, _, place in rows:
            runs, start = self._found(slot, generation), place[0]
            before, fetches = place, 1
            if runs is not None:
                fetches = runs.fetches + 1 if start > runs.start else max(runs.fetches, 1)
                # Further on than before, it was updated; back there it may have been rewound.
                before = runs.before if start > runs.before[0] else place
            self._runs[slot] = _Runs(generation, before, start, fetches)

    def before_step(self, rows: Iterable[Row]) -> None:
        """Look at each row; ValueError for a missing ``update``."""
        for slot, generation, request_id, place in rows:
            runs = self._found(slot, generation)
            if runs and runs.fetches and runs.before == place:
                raise ValueError(
                    f"request {request_id!r} has start_idx {place[0]}, as when it "
                    f"was fetched: no token of that run counts as written, and the same would run "
                    f"again; call update_batch(batch, tokens) before step, or leave out a request "
                    f"whose run failed"
                )

    def stepped(self, rows: Iterable[Row]) -> None:
        """Note that the pages of each row are cached as far as they are written."""
        for slot, generation, _, place in rows:
            self._runs[slot] = _Runs(generation, place, place[0], 0)

    def _found(self, slot: int, generation: int) -> _Runs | None:
        """Return what is known of a claim; not of an earlier one of its slot."""
        runs = self._runs.get(slot)
        return runs if runs is not None and runs.generation == generation else None
