# SPDX-License-Identifier: Apache-2.0
"""Order the arrivals of a workload in virtual time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_WAITS = np.empty((0, 2), np.int64)


class ArrivalQueue:
    """Queue the requests by arrival time; a next turn enters after the turns before are answered.

    Each method costs O(log n).

    Parameters
    ----------
    arrivals : array [n]
        Arrival time of each request; not used for a request that follows another request.
    next_turns : int array [n]
        Index of the request that follows the answer of this request; -1 for no next turn.
    think_times : array [n]
        Time from the last answer before to this request; used only for a request that follows.
    waits : int array [m, 2], optional
        Pairs: the first request also follows the answer of the second request.
    """

    def __init__(
        self,
        arrivals: NDArray[np.float64],
        next_turns: NDArray[np.int64],
        think_times: NDArray[np.float64],
        waits: NDArray[np.int64] = _NO_WAITS,
    ) -> None:
        self._next_turns: list[int] = next_turns.tolist()
        self._think_times: list[float] = think_times.tolist()
        follows = np.zeros(len(arrivals), np.bool_)
        follows[next_turns[next_turns >= 0]] = True
        self._also: defaultdict[int, list[int]] = defaultdict(list)
        self._missing = Counter(waits[:, 0].tolist())  # answers, without the turn before
        for request in self._missing:
            self._missing[request] += int(follows[request])
        for request, other in waits.tolist():
            self._also[other].append(request)
            follows[request] = True
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
        """Queue each request for which request `index` was the last answer, after its think time.

        Costs O(requests that follow), and O(log n) for each of them.
        """
        if self._next_turns[index] >= 0:
            self._follow(self._next_turns[index], now)
        for request in self._also.pop(index, ()):
            self._follow(request, now)

    def _follow(self, request: int, now: float) -> None:
        self._missing[request] -= 1
        if self._missing[request] <= 0:
            heapq.heappush(self._heap, (now + self._think_times[request], request))
