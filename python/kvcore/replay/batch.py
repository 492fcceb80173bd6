# SPDX-License-Identifier: Apache-2.0
"""Keep the rows of a running batch side by side with their counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore import TextGenerationContext


@dataclass(slots=True, eq=False)
class Job:
    """Follow one request through the engine.

    Attributes
    ----------
    index, rank : int
        Its number in the workload, and its place in the order of arrival.
    arrival, first_token : float
        Simulated seconds; `first_token` is negative until there is one.
    opened : TextGenerationContext, optional
        Its context, built for the first admission; survives a preemption.
    replica : int
        Where it runs.
    generated : int
        Output tokens the context has; kept current only while it is not in a `DecodeBatch`.
    written : int
        Tokens that had been written when it was last preempted.
    was_admitted : bool
        Whether it ever ran.
    manager_ns : int
        Time inside the manager for this request alone.
    """

    index: int
    rank: int
    arrival: float
    opened: TextGenerationContext | None = None
    replica: int = 0
    generated: int = 0
    written: int = 0
    was_admitted: bool = False
    first_token: float = -1.0
    manager_ns: int = 0

    @property
    def context(self) -> TextGenerationContext:
        """The context of a request that was tried at least once."""
        assert self.opened is not None
        return self.opened

    @property
    def left_to_write(self) -> int:
        """Tokens of the context that are not written yet."""
        context = self.context
        return int(context.end_idx - context.start_idx)


@dataclass(slots=True, frozen=True)
class Chunk:
    """Run the next `count` tokens of a prompt; `is_last` if that completes it."""

    job: Job
    count: int
    is_last: bool


# What one token changes in the counters of a row: cursor, left, room.
_ONE_TOKEN = np.array([[1], [-1], [-1]])


class DecodeBatch:
    """Hold the requests that generate, one row each.

    A hole is filled with the last row, so that all other rows keep their place and with it
    their rows of the manager's lookup table. Cost per step: a few numpy calls, whatever the
    number of rows.
    """

    def __init__(self, capacity: int, text: NDArray[np.int32], page_size: int) -> None:
        self._text = text
        self._page_size = page_size
        # Of each row: the place of its next token in the text, the tokens it still generates,
        # and the tokens its pages have room for.
        self._counters = np.zeros((3, capacity), np.int64)
        self._cursors, self._left, self._room = self._counters
        self._soonest = 0  # no row has fewer tokens left
        self.jobs: list[Job] = []
        self.contexts: list[TextGenerationContext] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job, *, cursor: int, left: int) -> None:
        """Append a row that has `left` tokens to generate, read from the text at `cursor`.

        It has the pages of its prompt and no more.
        """
        row = len(self.jobs)
        self._soonest = min(self._soonest, left) if row else left
        self._counters[:, row] = cursor, left, -job.context.start_idx % self._page_size
        self.jobs.append(job)
        self.contexts.append(job.context)

    def remove(self, row: int) -> Job:
        """Drop a row, fill its place with the last one and answer its request."""
        job = self.jobs[row]
        self._counters[:, row] = self._counters[:, len(self.jobs) - 1]
        self.jobs[row] = self.jobs[-1]
        self.contexts[row] = self.contexts[-1]
        self.jobs.pop()
        self.contexts.pop()
        return job

    def left(self, row: int) -> int:
        """Count the tokens that a row still generates."""
        return int(self._left[row])

    def short_of(self, steps: int) -> NDArray[np.intp]:
        """List the rows whose pages have no room for the next `steps` tokens."""
        return (self._room[: len(self.jobs)] < steps).nonzero()[0]

    def make_room(self, rows: NDArray[np.intp], steps: int) -> None:
        """Note that pages for the next `steps` tokens of some rows were reserved."""
        self._room[rows] = steps + (self._room[rows] - steps) % self._page_size

    def next_tokens(self) -> tuple[list[TextGenerationContext], NDArray[np.int32]]:
        """Move every unfinished row on by one token.

        Returns
        -------
        contexts : list of TextGenerationContext
            The unfinished rows; the batch's own list where that is all of them.
        tokens : numpy.ndarray
            int32 ``[len(contexts)]``, the token of each.
        """
        count = len(self.jobs)
        contexts = self.contexts
        rows: slice | NDArray[np.intp] = slice(count)
        if self._soonest <= 0:
            rows = (self._left[:count] > 0).nonzero()[0]
            contexts = [contexts[row] for row in rows.tolist()]
        tokens = self._text[self._cursors[rows]]
        self._counters[:, rows] += _ONE_TOKEN
        self._soonest -= 1
        return contexts, tokens

    def take_finished(self) -> list[Job]:
        """Drop the rows that are done and answer their requests."""
        if self._soonest > 0:
            return []
        # Last row first: each is replaced by one that stays.
        rows = (self._left[: len(self.jobs)] <= 0).nonzero()[0][::-1]
        done = [self.remove(row) for row in rows.tolist()]
        self._soonest = int(self._left[: len(self.jobs)].min()) if self.jobs else 0
        return done
