# SPDX-License-Identifier: Apache-2.0
"""Choose the requests of an engine's next step, and preempt requests if memory is short.

A step runs the next token of every sequence that generates. The remaining tokens of the step run
prompts that are not computed yet, in chunks, oldest first. Requests are admitted in order of
arrival; with quotas, in order of arrival for each tenant. If the next tokens do not fit, the
request that arrived last returns to the front of the queue and its pages are released; it resumes
later with the pages that are still cached.

With ``async_onload`` an admitted request whose pages are still loading from stores runs only after
they have arrived. Later requests are admitted and run meanwhile, so their loads overlap with its
loads and with steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcore.context import update_batch
from kvcore.errors import CapacityError, InsufficientBlocksError
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.layers.layer_map import column_tokens, has_windows
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.paged import PagedKVCacheManager
from kvcore.params import require_count
from kvcore.sizing import longest_sequence

__all__ = ["Batch", "Request", "Scheduler", "is_soon_cached"]

# ---- requests and batches ------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Follow one sequence from its prompt to its last token.

    Parameters
    ----------
    context : context, or callable that returns one
        Holds the prompt. A callable is called before the first attempt to admit the request, so a
        long queue holds no tokens; it needs `num_prompt`, the number of tokens of the prompt.
    left : int
        The most tokens that remain to be generated.
    stop_tokens : collection of int
        Each of these tokens ends the sequence.
    siblings : list of Request
        Sequences that continue the same prompt, each with its own context that holds the prompt.
        They are forked after the prompt is computed.
    owner : object
        Any object of the caller, returned unchanged.

    Attributes
    ----------
    rank, replica : int
        Position in the order of arrival, -1 before the request is added; the replica on which it
        runs or last ran.
    row : int
        Index in the scheduler's `decodes`, or -1.
    parent : Request or None
        For a sibling that waits for its prompt: the request that computes the prompt.
    cached_tokens : int
        Number of tokens that were cached when the request first ran, including loaded tokens; -1
        before. For a fork the whole prompt.
    written : int
        Number of tokens that were written when the request was last preempted.
    last_token : int
        The last generated token, -1 before the first.
    finish_reason : "length", "stop", "cancelled" or None
        Reason for the end of the request.
    """

    context: Any
    left: int
    stop_tokens: Collection[int] = frozenset()
    siblings: list[Request] = field(default_factory=list)
    num_prompt: int = 0
    owner: Any = None
    rank: int = field(default=-1, init=False)
    replica: int = field(default=0, init=False)
    row: int = field(default=-1, init=False)
    parent: Request | None = field(default=None, init=False)
    cached_tokens: int = field(default=-1, init=False)
    written: int = field(default=0, init=False)
    last_token: int = field(default=-1, init=False)
    finish_reason: Literal["length", "stop", "cancelled"] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or self.context.end_idx
        require_count(left=self.left, num_prompt=self.num_prompt)

    @property
    def unwritten(self) -> int:
        """Tokens of the context that the model has not run yet."""
        return int(self.context.end_idx - self.context.start_idx)


def tenant_of(request: Request, quotas: Collection[str]) -> str | None:
    """Return the tenant whose quota a request uses, or None if the tenant has no quota."""
    tenant = getattr(request.context, "tenant", None) if quotas else None
    return tenant if tenant in quotas else None


def most_tokens(manager: PagedKVCacheManager, request: Request, most_at_once: int) -> int:
    """Return the longest length of a request with no other; `most_at_once` tokens run per step."""
    pages, quotas = manager.total_num_pages, manager.quotas
    if quotas and not callable(request.context):
        tenant = tenant_of(request, quotas)
        pages -= sum(quota[0] for other, quota in quotas.items() if other != tenant)
        most = None if tenant is None else quotas[tenant][1]
        pages = pages if most is None else min(pages, most)
    return longest_sequence(manager.params, max(pages, 0), most_at_once)


def rivals(
    requests: Iterable[Request], short: Request, quotas: Collection[str]
) -> Iterator[Request]:
    """Yield the requests of the same replica and tenant, whose pages can serve a short request."""
    tenant = tenant_of(short, quotas)
    for request in requests:
        if request.replica == short.replica and tenant_of(request, quotas) == tenant:
            yield request


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Hold a step's work: B rows, of which S sequences get a token.

    Attributes
    ----------
    contexts : list of contexts [B]
        Contexts of the rows, replica after replica.
    inputs : list of RaggedKVCacheInputs
        Inputs of the kernels, one per device.
    requests : list of Request [S]
        The requests that get a token. A row whose prompt continues in a later step gets no entry. A
        row whose prompt ends gets an entry, followed by an entry for each sibling.
    rows : int64 [S]
        For each entry, the row whose last logits give its token.
    num_steps : int
        Number of tokens for each entry; more than 1 only if no prompt runs.
    completed : list of Request
        Requests whose prompt, including the tokens generated before a preemption, ends with this
        step.
    admitted, preempted : list of Request
        Requests that run from this step on, for the first time or again; requests that returned to
        the queue.
    copies : int32 [n, 4]
        For a manager without a pool, ``take_copies()``: do these copies before the kernels run, in
        this order. If a batch is not booked with `update`, the next batch repeats its copies.
    """

    contexts: list[Any]
    inputs: list[RaggedKVCacheInputs]
    requests: list[Request]
    rows: NDArray[np.int64]
    num_steps: int
    completed: list[Request]
    admitted: list[Request]
    preempted: list[Request]
    copies: NDArray[np.int32]


def hand_out(
    batch: Batch,
    tokens: NDArray[np.int32],
    update: Callable[[list[Any], NDArray[np.int32]], object],
) -> list[Request]:
    """Pass every row its tokens, step by step; return the requests that end."""
    contexts, requests = batch.contexts, batch.requests
    by_row = np.zeros((len(tokens), len(contexts)), np.int32)
    by_row[:, batch.rows[::-1]] = tokens[:, ::-1]  # reversed: the first of a family is written last
    ended: list[Request] = []
    for step in range(len(tokens)):
        update(contexts, by_row[step])  # drops the token of an unfinished prompt
        for request, token in zip(requests, tokens[step].tolist(), strict=True):
            request.last_token = token
            request.left -= 1
            is_stop = token in request.stop_tokens
            if is_stop or request.left == 0:
                request.finish_reason = "stop" if is_stop else "length"
                ended.append(request)
        if ended and step + 1 < len(tokens):  # the other requests continue, each with its own row
            going_on = [row for row, r in enumerate(requests) if r.finish_reason is None]
            requests = [requests[row] for row in going_on]
            contexts = [contexts[row] for row in going_on]
            tokens = by_row = tokens[:, going_on]
    return ended


# ---- prompts that others compute now -------------------------------------------------------------


def is_soon_cached(
    manager: PagedKVCacheManager, request: Request, prefills: Iterable[Request]
) -> bool:
    """Return whether a prompt that is being computed will save half of a request's other tokens.

    Compares whole pages with the tokens that are not cached yet. True means at least half of them.

    Parameters
    ----------
    manager : PagedKVCacheManager
    request : Request
        A waiting request. If its context is still a callable, the result is False.
    prefills : iterable of Request
        Requests whose prompts are being computed, as ``scheduler.prefills``.

    Notes
    -----
    Changes nothing. Matches the prompt once, and compares it with each of `prefills`.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> from kvcore.scheduler import Request, Scheduler, is_soon_cached
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4, enable_prefix_caching=True)
    >>> manager = PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16)
    >>> scheduler = Scheduler(
    ...     manager, hold=lambda request: is_soon_cached(manager, request, scheduler.prefills)
    ... )
    >>> for name in "ab":
    ...     scheduler.add(Request(TextGenerationContext(name, list(range(9))), 2))
    >>> len(scheduler.next_batch().contexts)  # the other one waits for the same tokens
    1
    """
    context = request.context
    if not manager.params.enable_prefix_caching or callable(context) or not prefills:
        return False
    page_size, tokens, names = column_tokens(manager.params), context.tokens, _names(context)
    known = manager.match_prefix(tokens, *names[:2], extra_keys=names[2])
    for other in prefills:
        seen = other.context.tokens[: len(tokens) - 1]
        if len(seen) < page_size or seen[0] != tokens[0] or _names(other.context) != names:
            continue
        differ = np.flatnonzero(seen != tokens[: len(seen)])
        shared = int(differ[0]) if len(differ) else len(seen)
        shared -= shared % page_size
        if shared > other.context.start_idx and 2 * (shared - known) >= len(tokens) - known:
            return True
    return False


def _names(context: Any) -> tuple[Any, Any, Any]:
    """Return the values that separate prefixes of contexts; other context classes may lack them."""
    extra_key, cache_salt = (getattr(context, name, None) for name in ("extra_key", "cache_salt"))
    return extra_key, cache_salt, getattr(context, "extra_keys", None)


# ---- scheduler -----------------------------------------------------------------------------------


_rank = attrgetter("rank")
_NO_COPIES = np.empty((0, 4), np.int32)


class Scheduler:
    """Batch requests continuously over one manager.

    Parameters
    ----------
    manager : PagedKVCacheManager
        A manager with or without a pool, with any number of replicas and tiers; other code may also
        use it.
    max_running : int, optional
        Largest number of sequences that run at a time; by default the manager's maximum.
    max_batch_tokens, max_prompt_tokens : int
        Largest numbers of tokens in a step, and of prompt tokens in a step; by default prompts may
        use all remaining tokens of the step.
    num_steps : int
        Tokens per sequence in a step that runs no prompt, or 1 if this number does not fit the
        pool.
    hold : callable(request) -> bool, optional
        Called before a request joins running requests. True leaves the request in the queue, and
        later requests may be admitted before it; see ``is_soon_cached``.
    update : callable(contexts, tokens)
        Called to append tokens to contexts.

    Attributes
    ----------
    waiting, loading, prefills, decodes : list of Request
        Read these lists only. `waiting`: requests in the queue, without pages. `loading`: admitted
        requests whose pages are loading from stores. `prefills`: requests whose prompt is not
        computed yet; their siblings are in no list. `decodes`: generating requests by row; the last
        row moves to the row of a request that ends.
    num_preemptions, recomputed_tokens : int
        Number of times that a request returned to the queue, and number of tokens that ran again
        after it.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> from kvcore.scheduler import Request, Scheduler
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> scheduler = Scheduler(PagedKVCacheManager(params, 2, max_seq_len=64, num_pages=16))
    >>> scheduler.add(Request(TextGenerationContext("a", [1, 2, 3]), 2))
    >>> while batch := scheduler.next_batch():
    ...     ended = scheduler.update(batch, [7] * len(batch.requests))
    >>> ended[0].context.tokens.tolist(), ended[0].finish_reason
    ([1, 2, 3, 7, 7], 'length')
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        *,
        max_running: int | None = None,
        max_batch_tokens: int = MAX_CHUNK_TOKENS,
        max_prompt_tokens: int | None = None,
        num_steps: int = 1,
        hold: Callable[[Request], bool] | None = None,
        update: Callable[[list[Any], NDArray[np.int32]], object] = update_batch,
    ) -> None:
        max_running = manager.max_batch_size if max_running is None else max_running
        max_prompts = max_batch_tokens if max_prompt_tokens is None else max_prompt_tokens
        require_count(max_running=max_running, max_batch_tokens=max_batch_tokens)
        require_count(max_prompt_tokens=max_prompts, num_steps=num_steps)
        self._manager = manager
        self._max_running = min(max_running, manager.max_batch_size, max_batch_tokens)
        self._budgets = max_batch_tokens, max_prompts
        self._num_steps = num_steps
        self._most_at_once = max(min(self._budgets), num_steps)
        self._has_windows = has_windows(manager.params)  # reserve only for tokens that run next
        self._hold = hold
        self._update = update
        self._live: dict[int, Request] = {}  # by rank
        self._ranks = count()
        self._may_admit = True  # pages were released after a request did not fit
        self._batch: Batch | None = None  # returned by next_batch, not booked yet
        self._copies = _NO_COPIES  # of batches that were not booked, maybe not done yet
        self._running: list[Request] = []  # the rows of the last batch
        self._contexts: list[Any] = []
        self._queue: list[Request] = []  # by rank, may contain requests that were cancelled later
        self._has_cancelled = False  # a request of the queue was cancelled
        self.loading: list[Request] = []
        self.prefills: list[Request] = []
        self.decodes: list[Request] = []
        self.num_preemptions = 0
        self.recomputed_tokens = 0

    def __len__(self) -> int:
        """Count the requests that have not ended."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self.loading) + len(self.prefills) + len(self.decodes)

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queue. O(1), or O(queue) once after a cancellation in the queue."""
        if self._has_cancelled:
            self._queue = [each for each in self._queue if each.finish_reason is None]
            self._has_cancelled = False
        return self._queue

    # -- requests come and go ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request, with its siblings, at the end of the queue.

        Raises
        ------
        CapacityError
            The request can never fit the pool, or exceeds the manager's ``max_seq_len``.
        ValueError
            The request was added before.
        """
        family = (request, *request.siblings)
        for each in family:
            self._check(each)
        for each in family:
            each.rank = next(self._ranks)
            self._live[each.rank] = each
        for sibling in request.siblings:
            sibling.parent = request
        self._queue.append(request)
        self._may_admit |= bool(self._manager.quotas)

    def _check(self, request: Request) -> None:
        if request.rank >= 0:
            raise ValueError(f"request {request.rank} was added before; it is served once")
        pool = most_tokens(self._manager, request, self._most_at_once)
        tokens = request.num_prompt + request.left - 1  # the last token is not written
        if tokens > pool or tokens + self._num_steps - 1 > self._manager.max_seq_len:
            raise CapacityError(
                f"a request comes to {tokens} tokens in steps of {self._num_steps}, the pool holds "
                f"{pool} and max_seq_len is {self._manager.max_seq_len}; ask for fewer tokens"
            )

    def cancel(self, request: Request) -> None:
        """End a request and the siblings that wait for its prompt; a batch in flight becomes void.

        Notes
        -----
        O(siblings) for a request that waits or generates; otherwise also O(prompts that run or
        load).
        """
        family = (request, *request.siblings)
        if request.parent is not None and request in request.parent.siblings:
            request.parent.siblings.remove(request)
        for each in family:
            if self._live.pop(each.rank, None) is None:
                continue
            each.finish_reason = "cancelled"
            self._batch = None
            if each.row >= 0 or each in self.prefills or each in self.loading:
                self._release(each)
            else:
                self._has_cancelled = True

    def close(self) -> None:
        """Cancel every request. O(requests)."""
        running = [*self.loading, *self.prefills, *self.decodes]
        self._batch, self._queue, self._has_cancelled = None, [], False
        self.loading, self.prefills, self.decodes = [], [], []
        for request in self._live.values():
            request.finish_reason, request.row = "cancelled", -1
        self._live.clear()
        for request in running:
            self._manager.release(request.context.request_id)

    # -- a step ------------------------------------------------------------------------------

    def next_batch(self, *, admit: bool = True) -> Batch | None:
        """Choose the requests of the next step and fetch them; return None without requests.

        Parameters
        ----------
        admit : bool
            Whether waiting requests may join running requests.

        Raises
        ------
        InsufficientBlocksError
            No request fits, because other users of the manager hold too many pages.
        """
        self._batch = None
        admitted, preempted = list[Request](), list[Request]()
        self._take_loaded(admitted)
        may_admit = admit and (self._may_admit or not self.num_running)
        is_admitting = may_admit and self.waiting and self.num_running < self._max_running
        num_steps = 1 if is_admitting else self._num_steps
        if is_admitting:
            self._make_room(preempted)  # for running requests, before new requests take pages
            if not preempted:
                self._admit(admitted)
        while self.num_running or (admit and self._admit(admitted)):
            if not self.prefills and not self.decodes:
                self._take_loaded(admitted, waits=True)
            self._batch = self._fetch(num_steps, admitted, preempted)
            if self._batch is not None:
                return self._batch
            num_steps = self._make_room(preempted, num_steps)
        if admit and self.waiting:
            raise InsufficientBlocksError(
                f"{self.waiting[0].context.end_idx} tokens do not fit into the "
                f"{self._manager.num_free_blocks} free pages of {self._manager.total_num_pages}; "
                f"release other holders of pages"
            )
        return None

    def update(self, batch: Batch, tokens: Any) -> list[Request]:
        """Book a step: append its tokens, commit its pages, release the requests that ended.

        Parameters
        ----------
        batch : Batch
            The last batch that ``next_batch`` returned.
        tokens : int [S], or [num_steps, S]
            Tokens for ``batch.requests``; tokens after the last token of a sequence are dropped.

        Returns
        -------
        list of Request
            The requests that ended.

        Raises
        ------
        ValueError
            The batch is not the last one, or the number of tokens is wrong; nothing has changed.
        """
        given = np.atleast_2d(np.asarray(tokens, np.int32))
        if batch is not self._batch or given.shape != (batch.num_steps, len(batch.requests)):
            raise ValueError(
                f"{given.shape} tokens for {batch.num_steps} steps of {len(batch.requests)} "
                f"requests; must be a token of each, for the batch that was handed out last"
            )
        self._batch, self._copies = None, _NO_COPIES
        ended = hand_out(batch, given, self._update)
        self._manager.step(batch.contexts)
        for request in batch.completed:
            self.prefills.remove(request)
            self._begin_decoding(request)
            for sibling in request.siblings:
                self._fork(request, sibling)
            request.siblings = []
        # Release the highest row first: then only a row that stays fills a hole. A sibling that
        # ends with its first token has no row.
        rows = [each.row for each in ended if each.row >= 0]
        for row in sorted(rows, reverse=True):
            self._release(self.decodes[row])
        for request in ended:
            del self._live[request.rank]
        return ended

    # -- memory ------------------------------------------------------------------------------

    def _make_room(self, preempted: list[Request], num_steps: int = 1) -> int:
        """Reserve one next token of each request, by preemption, or `num_steps` if they fit."""
        while True:
            if self._has_windows:
                for request in self.prefills[len(self._cut_chunks()) :]:
                    request.context.active_idx = request.context.start_idx + 1
            running = self.decodes + self.prefills
            contexts = [request.context for request in running]
            fitting = self._manager.maybe_reserve_batch(contexts)
            if fitting == len(contexts):
                break
            holders = running + self.loading
            request = max(rivals(holders, running[fitting], self._manager.quotas), key=_rank)
            if request not in self.loading:
                request.written = request.context.start_idx
            self._release(request, returns_in=0)
            insort(self.waiting, request, key=_rank)
            preempted.append(request)
            self.num_preemptions += 1
        if self.prefills and self._manager.params.state_groups:
            return 1  # a prompt that is cut for its state runs one step
        if num_steps > 1 and self._manager.maybe_reserve_batch(contexts, num_steps) < fitting:
            return 1
        return num_steps

    def _admit(self, admitted: list[Request]) -> bool:
        """Admit requests in order until the step, the batch or the pool is full."""
        budget = self._prompt_budget() - sum(request.unwritten for request in self.prefills)
        place, quotas, short = 0, self._manager.quotas, set[str | None]()
        while place < len(self.waiting) and budget > 0 and self.num_running < self._max_running:
            request = self.waiting[place]
            holds = self._hold is not None and self.num_running and self._hold(request)
            if holds or tenant_of(request, quotas) in short:
                place += 1
                continue
            self._may_admit = self._claim(request, budget)
            if self._may_admit:
                self.loading.append(self.waiting.pop(place))
                if self._manager.wait(request.context, 0):
                    self._begin_prompt(self.loading.pop(), admitted)
                    budget -= request.unwritten
            elif quotas:
                short.add(tenant_of(request, quotas))  # requests of other tenants may fit
            else:
                break
        return bool(self.num_running)

    def _take_loaded(self, admitted: list[Request], *, waits: bool = False) -> None:
        """Start the requests whose pages have arrived; `waits` waits for the oldest one."""
        wait = self._manager.wait
        loaded = [
            request
            for place, request in enumerate(self.loading)
            if wait(request.context, None if waits and place == 0 else 0)
        ]
        if loaded:
            gone = set(loaded)
            self.loading = [request for request in self.loading if request not in gone]
        for request in loaded:
            self._begin_prompt(request, admitted)

    def _begin_prompt(self, request: Request, admitted: list[Request]) -> None:
        """Start a request at the position of its context."""
        start = request.context.start_idx
        if request.cached_tokens < 0:
            request.cached_tokens = start
        self.recomputed_tokens += max(0, request.written - start)
        insort(self.prefills, request, key=_rank)
        admitted.append(request)

    def _begin_decoding(self, request: Request) -> None:
        request.row = len(self.decodes)
        self.decodes.append(request)

    def _claim(self, request: Request, budget: int) -> bool:
        """Claim and reserve on the replica with the best hit or, if it is full, on the emptiest."""
        if callable(request.context):
            request.context = request.context()
        if self._has_windows:  # with one token less, the lookup finds no hit
            request.context.start_idx = 0
            request.context.active_idx = min(request.context.end_idx, max(2, budget))
        if self._manager.num_replicas == 1:
            return self._claim_on(request, 0)
        best = self._manager.get_or_recommend_replica(request.context)
        return self._claim_on(request, best) or self._claim_on(request, "auto")

    def _claim_on(self, request: Request, replica: int | Literal["auto"]) -> bool:
        manager, context = self._manager, request.context
        try:
            manager.claim(context.request_id, replica)
        except CapacityError:  # other users have claimed the rest of the replica
            return False
        fits = False
        try:
            fits = manager.maybe_reserve(context)
        finally:
            if not fits:
                manager.release(context.request_id, returns_in=0)
        if fits:
            request.replica = manager.get_replica(context) if replica == "auto" else replica
        return fits

    def _fork(self, parent: Request, sibling: Request) -> None:
        """Fork a sibling from its prompt's pages; put it in the queue if there is no room now."""
        sibling.context.update(sibling.last_token)
        if sibling.finish_reason is None:
            try:
                if self.num_running == self._max_running:
                    raise CapacityError("all rows are taken")
                self._manager.fork(parent.context.request_id, sibling.context)
            except CapacityError:  # or other users have claimed the rest of the replica
                insort(self.waiting, sibling, key=_rank)
                return
            sibling.replica = parent.replica
            self._begin_decoding(sibling)
        sibling.cached_tokens = sibling.num_prompt

    def _release(self, request: Request, returns_in: float | None = None) -> None:
        if request.row >= 0:
            last = self.decodes.pop()
            if last is not request:
                self.decodes[request.row], last.row = last, request.row
            request.row = -1
        else:
            (self.prefills if request in self.prefills else self.loading).remove(request)
        self._manager.release(request.context.request_id, returns_in=returns_in)
        self._may_admit = True

    # -- rows and tokens ---------------------------------------------------------------------

    def _prompt_budget(self) -> int:
        return min(self._budgets[0] - len(self.decodes), self._budgets[1])

    def _cut_chunks(self) -> list[Request]:
        """Divide the step's tokens among the prompts, oldest first."""
        budget = self._prompt_budget()
        chunks = []
        for request in self.prefills:
            if budget <= 0:
                break
            length = min(budget, request.unwritten)
            request.context.active_idx = request.context.start_idx + length
            chunks.append(request)
            budget -= length
        return chunks

    def _fetch(self, num_steps: int, come: list[Request], gone: list[Request]) -> Batch | None:
        """Fetch the rows of this step; return None if their next tokens do not fit the pool."""
        manager, chunks = self._manager, self._cut_chunks()
        num_steps = 1 if chunks else num_steps
        running = self.decodes + chunks
        if manager.num_replicas > 1:
            running.sort(key=attrgetter("replica"))
        if running != self._running:  # fetch is faster with the same list
            self._running = running
            self._contexts = [request.context for request in running]
        try:
            inputs = manager.fetch(self._contexts, num_steps)
        except InsufficientBlocksError:
            return None
        requests, rows = running, np.arange(len(running))
        completed = [r for r in chunks if r.context.active_idx == r.context.end_idx]
        if chunks:
            # If layers keep a state, a chunk that is cut may precede a chunk that is not cut.
            going_on = [r for r in chunks if r.context.active_idx < r.context.end_idx]
            families = [() if r in going_on else (r, *r.siblings) for r in running]
            requests = [request for family in families for request in family]
            rows = np.repeat(rows, [len(family) for family in families])
        if inputs[0].blocks is None:
            owed = manager.take_copies()
            self._copies = np.concatenate((self._copies, owed)) if len(self._copies) else owed
        batch = self._contexts, inputs, requests, rows, num_steps, completed
        return Batch(*batch, come, gone, self._copies)
