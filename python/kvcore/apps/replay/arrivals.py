# SPDX-License-Identifier: Apache-2.0
"""Order the arrivals of a workload in virtual time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ArrivalQueue:
    """Queue the requests by arrival time; a next turn enters after the previous turn is answered.

    Each method costs O(log n).

    Parameters
    ----------
    arrivals : array [n]
        Arrival time of each request; not used for a request that follows another request.
    next_turns : int array [n]
        Index of the request that follows the answer of this request; -1 for no next turn.
    think_times : array [n]
        Time from the previous answer to this request; used only for a next turn.
    """

    def __init__(
        self,
        arrivals: NDArray[np.float64],
        next_turns: NDArray[np.int64],
        think_times: NDArray[np.float64],
    ) -> None:
        self._next_turns: list[int] = next_turns.tolist()
        self._think_times: list[float] = think_times.tolist()
        follows = np.zeros(len(arrivals), np.bool_)
        follows[next_turns[next_turns >= 0]] = True
        times: list[float] = arrivals.tolist()
        self._heap = [(times[i], i) for i in np.flatnonzero(~follows).tolist()]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Arrival time of the next request; infinite if the queue is empty."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> tuple[float, int]:
        """Remove the next request; return its arrival time and its index."""
        return heapq.heappop(self._heap)

    def answered(self, index: int, now: float) -> None:
        """Queue the next turn of request `index`, if it exists, after its think time."""
        following = self._next_turns[index]
        if following >= 0:
            heapq.heappush(self._heap, (now + self._think_times[following], following))
