# SPDX-License-Identifier: Apache-2.0
"""Order the arrivals of a workload in virtual time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ArrivalQueue:
    """Hold the requests still to be sent; a next turn joins once the one before is answered.

    Cost of each verb: O(log n).

    Parameters
    ----------
    arrivals : array [n]
        When each request comes; of one that follows another it is not read.
    next_turns : int array [n]
        The request that comes after the answer of this one, -1 for none.
    think_times : array [n]
        Time from the answer before it to this request, where there is one.
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
        """Time at which the next request arrives; infinite if none will."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> tuple[float, int]:
        """Take the next request: its time of arrival and its number."""
        return heapq.heappop(self._heap)

    def answered(self, index: int, now: float) -> None:
        """Let the user of request `index` think and then send the next turn, if there is one."""
        following = self._next_turns[index]
        if following >= 0:
            heapq.heappush(self._heap, (now + self._think_times[following], following))
