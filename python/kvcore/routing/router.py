# SPDX-License-Identifier: Apache-2.0
"""Choose the worker that runs a request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcore.arguments import number
from kvcore.routing.index import Keys, PrefixIndex

__all__ = ["POLICIES", "Router"]

#: What each policy makes small: of pages that each worker would have to compute [workers], and
#: pages of the requests that it runs [workers].
_Cost = Callable[[NDArray[np.int64], NDArray[np.int64], float], NDArray[Any]]

_COSTS: Final[dict[str, _Cost]] = {
    "prefix": lambda new, load, weight: new + load / float(1 + load.sum()),  # noqa: ARG005
    "least-loaded": lambda new, load, weight: load.astype(np.float64),  # noqa: ARG005
    "prefix+load": lambda new, load, weight: weight * new + load,
}

#: Names of policies.
POLICIES: Final = ("prefix", "least-loaded", "round-robin", "prefix+load")


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
        self._load: dict[Hashable, int] = {}
        self._chosen_at: dict[Hashable, int] = {}
        self._times = 0
        self._lock = Lock()

    def choose(self, request_id: Hashable, keys: Keys) -> Hashable:
        """Return the worker that is to run a request, whose load it is until `finish`.

        Parameters
        ----------
        request_id : hashable
        keys : uint64 [n], or sequence of bytes and int
            Of its prompt's full pages, in order.

        Raises
        ------
        ValueError
            There is no worker, or the request runs already.
        """
        with self._lock:
            if request_id in self._running:
                raise ValueError(f"request {request_id!r} runs already; finish it first")
            if self._policy in ("prefix", "prefix+load"):
                workers, held = self._index.lookup(keys)
            else:
                workers = self._index.workers
                held = np.zeros(len(workers), np.int32)
            if not workers:
                raise ValueError("there is no worker; add one to the index")
            worker = workers[self._place(workers, len(keys) - held.astype(np.int64))]
            self._times += 1
            self._chosen_at[worker] = self._times
            self._load[worker] = self._load.get(worker, 0) + len(keys)
            self._running[request_id] = worker, len(keys)
            return worker

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
            self._load[worker] -= pages

    def load_of(self, worker: Hashable) -> int:
        """Return the pages of the prompts that a worker runs."""
        with self._lock:
            return self._load.get(worker, 0)

    def _place(self, workers: list[Hashable], new: NDArray[np.int64]) -> int:
        ages = np.array([self._chosen_at.get(worker, 0) for worker in workers])
        if self._policy == "round-robin":
            return int(ages.argmin())
        load = np.array([self._load.get(worker, 0) for worker in workers], np.int64)
        cost = _COSTS[self._policy](new, load, self._weight)
        equal = np.flatnonzero(cost == cost.min())
        return int(equal[ages[equal].argmin()])
