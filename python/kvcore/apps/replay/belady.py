# SPDX-License-Identifier: Apache-2.0
"""Compute Belady's optimum on pages, the bound of all eviction policies."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.rates import HIT_RATES, HitRates

if TYPE_CHECKING:
    from kvcore.apps.replay.uses import PageUses

__all__ = ["Optimum", "optimum"]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Optimum(HitRates):
    """The maximum hits of a cache of one size.

    Attributes
    ----------
    pages, replicas : int
        Pages per replica, replicas.
    requests, refused : int
        Served requests, and refused requests, which are larger than a replica.
    prompt_tokens, served_prompt_tokens : int
        Prompt tokens of all requests, and of served requests.
    cached_tokens : int
        Maximum number of prompt tokens that a policy finds, including partial pages.
    prompt_pages, cached_pages : int
        Pages of all prompts, and the maximum number of whole pages that a policy finds.
    evicted_pages : int
        Pages that the optimum evicts.
    """

    pages: int
    replicas: int
    requests: int
    refused: int
    prompt_tokens: int
    served_prompt_tokens: int
    cached_tokens: int
    prompt_pages: int
    cached_pages: int
    evicted_pages: int

    def to_dict(self) -> dict[str, Any]:
        """List every field and rate by name, ready for JSON."""
        return vars(self) | {name: getattr(self, name) for name in HIT_RATES}


def optimum(
    uses: PageUses, pages: int, *, replicas: int = 1, served: NDArray[np.bool_] | None = None
) -> Optimum:
    """Compute the optimum for requests that are served one after another.

    Parameters
    ----------
    uses : PageUses
        The pages that each prompt uses.
    pages : int
        Pages per replica.
    replicas : int
        Number of replicas. They count as one pool, which bounds the hits of any routing.
    served : numpy.ndarray, optional
        Bool ``[n]``, false for the requests that are refused. By default the requests whose prompt
        has more pages than a replica.

    Returns
    -------
    Optimum

    Notes
    -----
    During a request, all pages of its prompt are held, including the partial last page. If the pool
    is full, the optimum evicts, among the pages that are not held, the page whose next use is
    farthest in the future. Only a hit is a use: the page with the last token of a prompt is always
    computed. The next use of a page is never later than the next use of its descendants. So among
    the pages with the farthest next use, the optimum can always evict a leaf, and the cached pages
    remain a prefix tree.

    This is exact for whole pages: no order of evictions finds more. Holding a prompt is the same as
    reading its pages again and again, and for this order of uses the farthest next use is optimal.
    In one case the result is a bound that a policy may not reach: a prompt ends exactly at the end
    of a page, and a later prompt continues after this page. The optimum may evict the page before
    it is computed again, even if its descendants are cached.

    The cached tokens are the whole pages of the optimum, plus for each request the maximum tokens
    that it could copy from a partly equal page, even if that page is not cached. They never exceed
    the tokens that are found without any eviction. They are exact without partial hits, and a bound
    with partial hits.

    The algorithm counts pages by the request of their next use and does not list them. After a sort
    of the next uses in O(m log m), it costs O(r log r) for r requests if each prompt has only a few
    runs of pages with the same next use.
    """
    needed = -(-uses.lengths // uses.page_size)
    if served is None:
        served = needed <= pages
    runs = _runs(uses, served)
    cached_pages, evicted = _simulate(runs, needed, served, pages * replicas)
    tokens = cached_pages * uses.page_size + int(uses.partial_hits[served].sum())
    return Optimum(
        pages=pages,
        replicas=replicas,
        requests=int(served.sum()),
        refused=int((~served).sum()),
        prompt_tokens=int(uses.lengths.sum()),
        served_prompt_tokens=int(uses.lengths[served].sum()),
        cached_tokens=min(tokens, int(uses.best_hits[served].sum())),
        prompt_pages=int(needed.sum()),
        cached_pages=cached_pages,
        evicted_pages=evicted,
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of adjacent pages of a prompt with the same next use: starts, next uses, counts."""

    starts: list[int]
    next_uses: list[int]
    counts: list[int]


def _runs(uses: PageUses, served: NDArray[np.bool_]) -> _Runs:
    requests = uses.requests
    never = len(uses.lengths)
    next_uses = _next_uses(uses, served, never)
    changes = np.ones(len(requests), np.bool_)
    changes[1:] = (requests[1:] != requests[:-1]) | (next_uses[1:] != next_uses[:-1])
    first = np.flatnonzero(changes)
    starts = np.searchsorted(requests[first], np.arange(never + 1))
    counts = np.diff(np.append(first, len(requests)))
    return _Runs(starts.tolist(), next_uses[first].tolist(), counts.tolist())


def _next_uses(uses: PageUses, served: NDArray[np.bool_], never: int) -> _Ints:
    """Return the next request that hits each page; `never` without a hit before it is computed."""
    order = uses.order
    if not served.all():
        order = order[served[uses.requests[order]]]
    here, then = order[:-1], order[1:]
    follows = (uses.nodes[here] == uses.nodes[then]) & uses.can_hit[then]
    found = np.full(len(uses.nodes), never, np.int64)
    found[here[follows]] = uses.requests[then[follows]]
    return found


def _simulate(runs: _Runs, needed: _Ints, served: NDArray[np.bool_], pages: int) -> tuple[int, int]:
    """Serve the requests; return the number of whole pages hit and of evicted pages."""
    waiting = [0] * (len(needed) + 1)  # cached pages by their next use
    farthest: list[int] = []  # negative next uses, because heapq is a min-heap
    cached = hits = evicted = 0
    rooms: list[int] = (pages - needed).tolist()
    for now in np.flatnonzero(served).tolist():
        hits += waiting[now]
        cached -= waiting[now]
        waiting[now] = 0
        while cached > rooms[now]:
            next_use = -farthest[0]
            gone = min(waiting[next_use], cached - rooms[now])
            waiting[next_use] -= gone
            cached -= gone
            evicted += gone
            if not waiting[next_use]:
                heapq.heappop(farthest)
        for run in range(runs.starts[now], runs.starts[now + 1]):
            next_use, count = runs.next_uses[run], runs.counts[run]
            if not waiting[next_use]:
                heapq.heappush(farthest, -next_use)
            waiting[next_use] += count
            cached += count
    return hits, evicted
