# SPDX-License-Identifier: Apache-2.0
"""Choose the worker that runs a request."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.prefix_index import hashes_of
from kvcore.routing.index import Keys, PrefixIndex
from kvcore.support.arguments import number

__all__ = ["POLICIES", "Router"]

#: Names of policies.
POLICIES: Final = ("prefix", "least-loaded", "round-robin", "prefix+load")

_BY_PREFIX = ("prefix", "prefix+load")


class Router:
    """Choose workers for requests, and know which run where.

    Parameters
    ----------
    index : PrefixIndex
        Its workers are chosen from.
    policy : str
        - ``"prefix+load"``: least ``prefix_weight * n + m``, of n pages of the prompt that a worker
          has not, and m pages of prompts that it runs; the cost function of NVIDIA Dynamo's router
          (https://docs.nvidia.com/dynamo/, "KV cache routing").
        - ``"prefix"``: least n; of those with as many, least m.
        - ``"least-loaded"``: least m.
        - ``"round-robin"``: one after the other.
    prefix_weight : float
        Of ``"prefix+load"``: how many pages of load a page to compute is worth.

    Notes
    -----
    Of several equal workers the one that was chosen longest ago. Any number of threads. O(workers),
    and what `PrefixIndex.match` takes.

    Examples
    --------
    >>> from kvcore.keys import page_keys
    >>> from kvcore.routing import PrefixIndex, Router
    >>> index = PrefixIndex(["a", "b"])
    >>> router = Router(index)
    >>> keys = page_keys(list(range(64)), 16)
    >>> index.store("b", keys[:3])
    >>> router.choose("request-1", keys), router.choose("request-2", keys)
    ('b', 'a')
    >>> router.finish("request-1")
    """

    def __init__(
        self, index: PrefixIndex, policy: str = "prefix+load", *, prefix_weight: float = 1.0
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}, must be one of {', '.join(POLICIES)}")
        self._index, self._policy = index, policy
        self._weight = number("prefix_weight", prefix_weight)
        if not 0 <= self._weight < float("inf"):
            raise ValueError(f"prefix_weight is {self._weight}, must be 0 or more, and finite")
        self._running: dict[Hashable, tuple[Hashable, int]] = {}
        self._workers: tuple[Hashable, ...] = ()
        self._places: dict[Hashable, int] = {}  # of workers in the arrays
        self._loads = np.zeros(0, np.int64)  # pages of the prompts that each runs
        self._chosen_at = np.zeros(0, np.int64)
        self._times = 0  # that a worker was chosen
        self._lock = Lock()

    def choose(self, request_id: Hashable, keys: Keys) -> Hashable:
        """Return the worker that is to run a request, whose load it is until `finish`.

        Parameters
        ----------
        request_id : hashable
        keys : uint64 [n], or sequence of bytes and int
            Of its prompt's full pages, in order; policies that ask for no prefix count them.

        Raises
        ------
        ValueError
            There is no worker, or the request runs already.
        """
        hashes = hashes_of(keys) if self._policy in _BY_PREFIX else None
        pages = len(keys)  # of both the code may run, and ask this router
        with self._lock:
            if request_id in self._running:
                raise ValueError(f"request {request_id!r} runs already; finish it first")
            if hashes is None:
                workers, held = self._index.workers, None
            else:
                workers, held = self._index.lookup(hashes)
            if not workers:
                raise ValueError("there is no worker; add one to the index")
            self._follow(workers)
            place = _least(self._costs(pages, held))
            self._times += 1
            self._chosen_at[place] = self._times
            self._loads[place] += pages
            self._running[request_id] = workers[place], pages
            return workers[place]

    def finish(self, request_id: Hashable) -> None:
        """Note that a request has ended.

        Raises
        ------
        ValueError
            It does not run.
        """
        with self._lock:
            try:
                worker, pages = self._running.pop(request_id)
            except KeyError:
                raise ValueError(f"request {request_id!r} does not run") from None
            place = self._places.get(worker)
            if place is not None:
                self._loads[place] -= pages

    def load_of(self, worker: Hashable) -> int:
        """Return the pages of the prompts that a worker runs.

        O(1); O(requests that run) for one that has gone, or came since the last choice.
        """
        with self._lock:
            place = self._places.get(worker)
            if place is not None:
                return int(self._loads[place])
            return sum(pages for runs_on, pages in self._running.values() if runs_on == worker)

    def _follow(self, workers: tuple[Hashable, ...]) -> None:
        """Keep arrays in the order of the index's workers, some of which may be new or gone."""
        if workers is self._workers:
            return
        chosen_at = dict(zip(self._workers, self._chosen_at.tolist(), strict=True))
        self._workers = workers
        self._places = {worker: place for place, worker in enumerate(workers)}
        self._chosen_at = np.array([chosen_at.get(worker, 0) for worker in workers], np.int64)
        self._loads = np.zeros(len(workers), np.int64)
        for worker, pages in self._running.values():
            if worker in self._places:
                self._loads[self._places[worker]] += pages

    def _costs(self, pages: int, held: NDArray[Any] | None) -> list[NDArray[Any]]:
        """Return what is to be small [workers], first things first; `held` are pages of each."""
        if self._policy == "round-robin":
            return [self._chosen_at]
        if held is None:
            return [self._loads, self._chosen_at]
        new = pages - held.astype(np.int64)
        if self._policy == "prefix":
            return [new, self._loads, self._chosen_at]
        return [self._weight * new + self._loads, self._chosen_at]


def _least(costs: list[NDArray[Any]]) -> int:
    """Return the place of the least cost [workers], by the next one where several are equal."""
    among = np.arange(len(costs[0]))
    for cost in costs:
        of_these = cost[among]
        among = among[of_these == of_these.min()]
    return int(among[0])
