# SPDX-License-Identifier: Apache-2.0
"""Which requests run in the next step of an engine, and what becomes of memory that is short.

A step runs the next token of every sequence that generates and, in what is left of its tokens, the
prompts that are not computed yet, in chunks, oldest first. Requests are admitted as they came, with
quotas those of each tenant. When the next tokens do not fit, the request that came last goes back
to the front of the queue and its pages go; it comes back with what is still cached.

With ``async_onload`` an admitted request whose pages are on their way from stores does not run
before they have arrived. Requests behind it are admitted and run meanwhile, so that their loads
overlap with its own and with steps.
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
        Holds the prompt. A callable is called when the request is first tried, so that a long queue
        holds no tokens; `num_prompt`, the tokens of the prompt, is then needed.
    left : int
        Tokens still to generate, at most.
    stop_tokens : collection of int
        Each of them ends the sequence.
    siblings : list of Request
        Sequences that go on from the same prompt, each with a context of its own that holds it:
        they are forked when the prompt is computed.
    owner : object
        Whatever the caller wants to find again.

    Attributes
    ----------
    rank, replica : int
        Place in the order of arrival, -1 before it was added; where it runs, or ran last.
    row : int
        Index among the scheduler's `decodes`, -1 elsewhere.
    parent : Request or None
        The request whose prompt it waits for, as one of its siblings.
    cached_tokens : int
        Tokens that were cached when it first ran, loaded ones included, -1 before; of a fork the
        whole prompt.
    written : int
        Tokens that were written when it was last preempted.
    last_token : int
        The token generated last, -1 before the first.
    finish_reason : "length", "stop", "cancelled" or None
        Why it has ended.
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
    """Return whose pages a request takes, where that one has a quota."""
    tenant = getattr(request.context, "tenant", None) if quotas else None
    return tenant if tenant in quotas else None


def most_tokens(manager: PagedKVCacheManager, request: Request, most_at_once: int) -> int:
    """Return the tokens that a request could have, were it alone; so many run in one step."""
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
    """Yield those whose pages would serve one that is short: of its replica and tenant."""
    tenant = tenant_of(short, quotas)
    for request in requests:
        if request.replica == short.replica and tenant_of(request, quotas) == tenant:
            yield request


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Say what a step runs: B rows, of which S sequences get a token.

    Attributes
    ----------
    contexts : list of contexts [B]
        The rows, replica after replica.
    inputs : list of RaggedKVCacheInputs
        What the kernels need, one per device.
    requests : list of Request [S]
        Who gets a token. A row whose prompt goes on in a later step gets none, one whose prompt
        ends gets one more for each sibling, directly behind its own.
    rows : int64 [S]
        The row whose last logits tell each of them.
    num_steps : int
        Tokens for each of them; more than 1 only where no prompt runs.
    completed : list of Request
        Those whose prompt, with what they had generated before a preemption, ends with this step.
    admitted, preempted : list of Request
        Those that run from this step on, for the first time or again; those that were sent back to
        the queue.
    copies : int32 [n, 4]
        For a manager without a pool, ``take_copies()``: to be done before the kernels run, in this
        order. A batch that was not booked leaves its own to the next one.
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
    """Give every row its tokens, step by step; return the requests that end."""
    contexts, requests = batch.contexts, batch.requests
    by_row = np.zeros((len(tokens), len(contexts)), np.int32)
    by_row[:, batch.rows[::-1]] = tokens[:, ::-1]  # of a family the first, which comes last
    ended: list[Request] = []
    for step in range(len(tokens)):
        update(contexts, by_row[step])  # drops the token of a prompt that goes on
        for request, token in zip(requests, tokens[step].tolist(), strict=True):
            request.last_token = token
            request.left -= 1
            is_stop = token in request.stop_tokens
            if is_stop or request.left == 0:
                request.finish_reason = "stop" if is_stop else "length"
                ended.append(request)
        if ended and step + 1 < len(tokens):  # the rest goes on, a row each
            going_on = [row for row, r in enumerate(requests) if r.finish_reason is None]
            requests = [requests[row] for row in going_on]
            contexts = [contexts[row] for row in going_on]
            tokens = by_row = tokens[:, going_on]
    return ended


# ---- prompts that others compute now -------------------------------------------------------------


def is_soon_cached(
    manager: PagedKVCacheManager, request: Request, prefills: Iterable[Request]
) -> bool:
    """Tell whether a prompt being computed now will save another one half of its tokens.

    Parameters
    ----------
    manager : PagedKVCacheManager
    request : Request
        One that waits. Where its context is still a callable the answer is False.
    prefills : iterable of Request
        Those whose prompts are being computed, as ``scheduler.prefills``.

    Notes
    -----
    Changes nothing. Costs a match, and comparing the prompt with each of `prefills`.

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
    """Return what keeps the prefixes of contexts apart; contexts of other classes may have none."""
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
        With or without a pool, with any number of replicas and tiers; others may use it as well.
    max_running : int, optional
        Sequences that run at a time; by default as many as the manager takes.
    max_batch_tokens, max_prompt_tokens : int
        Tokens of a step, and of these those of prompts; by default whatever is left.
    num_steps : int
        Tokens per sequence in a step that runs no prompt, or 1 where so many do not fit the pool.
    hold : callable(request) -> bool, optional
        Asked before a request joins others: True leaves it in the queue, and others may go first;
        see ``is_soon_cached``.
    update : callable(contexts, tokens)
        Hands contexts their tokens.

    Attributes
    ----------
    waiting, loading, prefills, decodes : list of Request
        To be read only: in the queue, without pages; admitted, with pages on their way from stores;
        with a prompt that is not computed, whose siblings are nowhere yet; generating, in rows of
        which the last one fills a hole.
    num_preemptions, recomputed_tokens : int
        How often a request was sent back to the queue, and the tokens run again for that.

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
        self._has_windows = has_windows(manager.params)  # which get pages for what runs next
        self._hold = hold
        self._update = update
        self._live: dict[int, Request] = {}  # by rank
        self._ranks = count()
        self._may_admit = True  # something was released since a request did not fit
        self._batch: Batch | None = None  # handed out, not booked yet
        self._copies = _NO_COPIES  # of batches that were not booked: nobody may have done them
        self._running: list[Request] = []  # the rows of the last one
        self._contexts: list[Any] = []
        self._queue: list[Request] = []  # by rank, with requests that were cancelled since
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
        """Requests in the queue. O(1), or O(queue) once after requests of it were cancelled."""
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
            It can never fit the pool, or the manager's ``max_seq_len``.
        ValueError
            It was added before.
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
        tokens = request.num_prompt + request.left - 1  # the last one is not written
        if tokens > pool or tokens + self._num_steps - 1 > self._manager.max_seq_len:
            raise CapacityError(
                f"a request comes to {tokens} tokens in steps of {self._num_steps}, the pool holds "
                f"{pool} and max_seq_len is {self._manager.max_seq_len}; ask for fewer tokens"
            )

    def cancel(self, request: Request) -> None:
        """End a request, and the siblings that wait for its prompt; a batch that is out is void.

        Notes
        -----
        O(siblings) for a request that waits or generates; else also O(prompts that run or load).
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
        """Choose what runs next and fetch it; None when there is nothing.

        Parameters
        ----------
        admit : bool
            Whether requests that wait may join those that run.

        Raises
        ------
        InsufficientBlocksError
            Others hold so many pages that not one request fits.
        """
        self._batch = None
        admitted, preempted = list[Request](), list[Request]()
        self._take_loaded(admitted)
        may_admit = admit and (self._may_admit or not self.num_running)
        is_admitting = may_admit and self.waiting and self.num_running < self._max_running
        num_steps = 1 if is_admitting else self._num_steps
        if is_admitting:
            self._make_room(preempted)  # for those that run, before anybody else takes it
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
                f"release what else holds pages"
            )
        return None

    def update(self, batch: Batch, tokens: Any) -> list[Request]:
        """Book a step: hand out its tokens, commit its pages, release what has ended.

        Parameters
        ----------
        batch : Batch
            What ``next_batch`` handed out last.
        tokens : int [S], or [num_steps, S]
            For ``batch.requests``; those behind the last one of a sequence are dropped.

        Returns
        -------
        list of Request
            Those that have ended.

        Raises
        ------
        ValueError
            Another batch, or another number of tokens; nothing has changed.
        """
        given = np.atleast_2d(np.asarray(tokens, np.int32))
        if batch is not self._batch or given.shape != (batch.num_steps, len(batch.requests)):
            raise ValueError(
                f"{given.shape} tokens for {batch.num_steps} steps of {len(batch.requests)} "
                f"requests; expected a token of each, of the batch that was handed out last"
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
        # The last row first: holes are filled with one that stays. A sibling may have none.
        rows = [each.row for each in ended if each.row >= 0]
        for row in sorted(rows, reverse=True):
            self._release(self.decodes[row])
        for request in ended:
            del self._live[request.rank]
        return ended

    # -- memory ------------------------------------------------------------------------------

    def _make_room(self, preempted: list[Request], num_steps: int = 1) -> int:
        """Reserve the next tokens of all that run: one by preemption, `num_steps` if they fit."""
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
            self._release(request)
            insort(self.waiting, request, key=_rank)
            preempted.append(request)
            self.num_preemptions += 1
        if self.prefills and self._manager.params.state_groups:
            return 1  # a prompt that is cut for its state runs one step
        if num_steps > 1 and self._manager.maybe_reserve_batch(contexts, num_steps) < fitting:
            return 1
        return num_steps

    def _admit(self, admitted: list[Request]) -> bool:
        """Admit in order while there is room in the step, the batch and the pool."""
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
                short.add(tenant_of(request, quotas))  # others may fit
            else:
                break
        return bool(self.num_running)

    def _take_loaded(self, admitted: list[Request], *, waits: bool = False) -> None:
        """Have requests run whose pages have arrived; with `waits` at least the oldest one."""
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
        """Have a request run from where its context stands."""
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
        """Claim and reserve on the replica with the best hit or, when it is full, the emptiest."""
        if callable(request.context):
            request.context = request.context()
        if self._has_windows:  # one token less than that finds no hit
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
        except CapacityError:  # others have claimed the rest of the replica
            return False
        fits = False
        try:
            fits = manager.maybe_reserve(context)
        finally:
            if not fits:
                manager.release(context.request_id)
        if fits:
            request.replica = manager.get_replica(context) if replica == "auto" else replica
        return fits

    def _fork(self, parent: Request, sibling: Request) -> None:
        """Start a sibling on the pages of its prompt, later where there is no room now."""
        sibling.context.update(sibling.last_token)
        if sibling.finish_reason is None:
            try:
                if self.num_running == self._max_running:
                    raise CapacityError("all rows are taken")
                self._manager.fork(parent.context.request_id, sibling.context)
            except CapacityError:  # or others have claimed the rest of the replica
                insort(self.waiting, sibling, key=_rank)
                return
            sibling.replica = parent.replica
            self._begin_decoding(sibling)
        sibling.cached_tokens = sibling.num_prompt

    def _release(self, request: Request) -> None:
        if request.row >= 0:
            last = self.decodes.pop()
            if last is not request:
                self.decodes[request.row], last.row = last, request.row
            request.row = -1
        else:
            (self.prefills if request in self.prefills else self.loading).remove(request)
        self._manager.release(request.context.request_id)
        self._may_admit = True

    # -- rows and tokens ---------------------------------------------------------------------

    def _prompt_budget(self) -> int:
        return min(self._budgets[0] - len(self.decodes), self._budgets[1])

    def _cut_chunks(self) -> list[Request]:
        """Share the step's tokens among the prompts, oldest first."""
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
        """Fetch all that runs in this step; None where its next tokens do not fit the pool."""
        manager, chunks = self._manager, self._cut_chunks()
        num_steps = 1 if chunks else num_steps
        running = self.decodes + chunks
        if manager.num_replicas > 1:
            running.sort(key=attrgetter("replica"))
        if running != self._running:  # the manager knows a list again
            self._running = running
            self._contexts = [request.context for request in running]
        try:
            inputs = manager.fetch(self._contexts, num_steps)
        except InsufficientBlocksError:
            return None
        requests, rows = running, np.arange(len(running))
        completed = [r for r in chunks if r.context.active_idx == r.context.end_idx]
        if chunks:
            # Where layers keep a state a chunk may be cut in front of one that is not.
            going_on = [r for r in chunks if r.context.active_idx < r.context.end_idx]
            families = [() if r in going_on else (r, *r.siblings) for r in running]
            requests = [request for family in families for request in family]
            rows = np.repeat(rows, [len(family) for family in families])
        if inputs[0].blocks is None:
            owed = manager.take_copies()
            self._copies = np.concatenate((self._copies, owed)) if len(self._copies) else owed
        batch = self._contexts, inputs, requests, rows, num_steps, completed
        return Batch(*batch, come, gone, self._copies)
