# SPDX-License-Identifier: Apache-2.0
"""Compute what no eviction policy can exceed: Belady's optimum on pages."""

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
    """Return the most that a cache of one size can find.

    Attributes
    ----------
    pages, replicas : int
        Pages per replica, replicas.
    requests, refused : int
        Requests served, and requests that are larger than a replica.
    prompt_tokens, served_prompt_tokens : int
        Prompt tokens of all requests, and of those served.
    cached_tokens : int
        Most prompt tokens that any policy finds, partial pages included.
    prompt_pages, cached_pages : int
        Pages of all prompts, and the most whole pages of them that any policy finds.
    evicted_pages : int
        Pages that are given up on the way there.
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


def optimum(uses: PageUses, pages: int, *, replicas: int = 1) -> Optimum:
    """Compute the optimum for requests that are served one after the other.

    Parameters
    ----------
    uses : PageUses
        Which prompts use which pages.
    pages : int
        Pages per replica.
    replicas : int
        All of them are taken for one pool, which is what the best routing could reach at most.

    Returns
    -------
    Optimum

    Notes
    -----
    While a request is served, all pages of its prompt are held, the partial last one included; a
    prompt of more pages than a replica has is refused. What has to go is a page of no prompt that
    is being served, and among these the one whose next use lies farthest ahead. A use is one that
    hits: the page with a prompt's last token is computed in any case. A page is used no later
    than those behind it, so that of the farthest ones a page with no cached page behind it can
    always go first: the tree stays one.

    This is exact for whole pages: no order of evictions finds more of them. Holding a prompt is
    reading its pages over and over, for which going by the farthest next use is optimal. One case
    makes it a bound that may be out of reach: a prompt ends with a page, and a later one goes on
    behind it. The page may go before it is computed anew, though cached pages lie behind it.

    Tokens are the optimum's whole pages, and for each request the most tokens that it could have
    copied out of a partly equal page, whether or not that page would be cached; and never more
    than are found where nothing is evicted. With no partial hits this is exact too, else a bound.

    Pages whose next use is that of one request are equal to the algorithm, so that they are
    counted, not listed: O(r log r) for r requests that meet other prompts at few places, once the
    next uses are sorted in O(m log m).
    """
    needed = -(-uses.lengths // uses.page_size)
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
    """Neighbouring pages of a prompt with the same next use: whose they are, when, how many."""

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
    """Return the next request that hits each page; `never` if none does before it is computed."""
    order = uses.order
    if not served.all():
        order = order[served[uses.requests[order]]]
    here, then = order[:-1], order[1:]
    follows = (uses.nodes[here] == uses.nodes[then]) & uses.can_hit[then]
    found = np.full(len(uses.nodes), never, np.int64)
    found[here[follows]] = uses.requests[then[follows]]
    return found


def _simulate(runs: _Runs, needed: _Ints, served: NDArray[np.bool_], pages: int) -> tuple[int, int]:
    """Serve the requests; return whole pages hit and pages evicted."""
    waiting = [0] * (len(needed) + 1)  # cached pages by their next use
    farthest: list[int] = []  # the next uses, negative, for the heap is of the least
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
