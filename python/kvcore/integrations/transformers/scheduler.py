# SPDX-License-Identifier: Apache-2.0
"""Which requests run in the next forward, and what becomes of memory that is short."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvcore import CapacityError, InsufficientBlocksError, PagedKVCacheManager, update_batch
from kvcore.integrations.transformers.requests import Request

__all__ = ["Scheduler"]


class Scheduler:
    """Batch requests continuously over one manager.

    A step runs one token of every request that generates and, in what is left of its tokens, the
    prompts that are not computed yet, in chunks, oldest first. When the next tokens do not fit the
    pool, the newest request goes back to the queue and its pages go.

    A request is in exactly one place: `_waiting` (a heap by rank, not claimed), `_prefills`
    (claimed, oldest first) or `_decodes`.

    Parameters
    ----------
    manager : PagedKVCacheManager
    requests : iterable of Request
    max_batch_tokens : int
        Tokens of a step.
    """

    def __init__(
        self, manager: PagedKVCacheManager, requests: Iterable[Request], max_batch_tokens: int
    ) -> None:
        self._manager = manager
        self._budget = max_batch_tokens
        self._slots = min(manager.max_batch_size, max_batch_tokens)
        self._waiting = [(request.rank, request) for request in requests]
        self._all = [each for _, r in self._waiting for each in (r, *r.siblings)]
        heapq.heapify(self._waiting)
        self._prefills: list[Request] = []
        self._decodes: list[Request] = []
        self._may_admit = True
        self.preemptions = 0

    def __bool__(self) -> bool:
        """Tell whether any request is left."""
        return bool(self._waiting or self._prefills or self._decodes)

    def next_batch(self) -> list[Request]:
        """Answer the requests of the next step, with pages for all their tokens.

        Raises
        ------
        InsufficientBlocksError
            Others hold so many pages that not one request fits.
        """
        self._keep_decodes()
        if self._may_admit or not (self._prefills or self._decodes):
            self._admit()
        batch = self._decodes + self._cut_chunks()
        if not batch:
            raise InsufficientBlocksError(
                f"the prompt of {self._waiting[0][1].context.end_idx} tokens does not fit into the "
                f"{self._manager.num_free_blocks} free pages of "
                f"{self._manager.total_num_pages}; release what else holds pages"
            )
        return batch

    def advance(self, batch: list[Request], tokens: NDArray[np.int32], whole: int) -> None:
        """Book a step.

        Parameters
        ----------
        batch : list of Request
            What ``next_batch`` answered.
        tokens : int32 [B]
            What follows each row; dropped behind an unfinished prompt.
        whole : int
            Rows without an unfinished prompt, which come first.
        """
        contexts = [request.context for request in batch]
        update_batch(contexts, tokens)
        self._manager.step(contexts)
        for request in batch[len(self._decodes) : whole]:
            self._prefills.remove(request)
            self._decodes.append(request)

    def fork(self, request: Request, sibling: Request) -> None:
        """Start a sibling on the pages of a request, later where there is no room now.

        Its prompt is that of the request, its first token the one it took.
        """
        sibling.context.extend([sibling.last])
        if sibling.reason is not None:
            sibling.cached = sibling.num_prompt
        elif not self._forked(request, sibling):
            heapq.heappush(self._waiting, (sibling.rank, sibling))

    def _forked(self, request: Request, sibling: Request) -> bool:
        if not self._has_slot():
            return False
        try:
            self._manager.fork(request.context.request_id, sibling.context)
        except CapacityError:  # others have claimed the rest of the manager
            return False
        sibling.cached = sibling.num_prompt
        self._decodes.append(sibling)
        return True

    def retire(self, request: Request) -> None:
        """Release a request that has ended; a sibling may have ended before it was claimed."""
        if request not in self._decodes:
            return
        row = self._decodes.index(request)
        # The last one fills the hole: so only one row of the page table changes.
        self._decodes[row] = self._decodes[-1]
        self._decodes.pop()
        self._manager.release(request.context.request_id)
        self._may_admit = True

    def close(self) -> None:
        """Release every request."""
        for request in self._all:  # a call may have been cut short between a claim and the books
            if self._manager.contains(request.context.request_id):
                self._manager.release(request.context.request_id)
        self._waiting.clear()
        self._prefills.clear()
        self._decodes.clear()

    # -- memory ------------------------------------------------------------------------------

    def _keep_decodes(self) -> None:
        """Reserve the next token of every request that generates, by preemption where needed."""
        contexts = [request.context for request in self._decodes]
        while self._manager.maybe_reserve_batch(contexts) < len(contexts):
            self._preempt(max(self._prefills + self._decodes, key=lambda r: r.rank))
            contexts = [request.context for request in self._decodes]

    def _preempt(self, request: Request) -> None:
        (self._prefills if request in self._prefills else self._decodes).remove(request)
        self._manager.release(request.context.request_id)
        heapq.heappush(self._waiting, (request.rank, request))
        # Until a request ends: a prompt that takes the pages again would be the next to go.
        self._may_admit = False
        self.preemptions += 1

    def _admit(self) -> None:
        """Claim pages for requests in order while there is room in the step and the pool."""
        passed = []
        budget = self._budget - len(self._decodes) - self._unwritten()
        while self._waiting and budget > 0 and self._has_slot():
            rank, request = heapq.heappop(self._waiting)
            if self._soon_cached(request):
                passed.append((rank, request))
            elif self._claim(request):
                self._prefills.append(request)
                budget -= request.context.active_length
            else:
                passed.append((rank, request))
                break
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _has_slot(self) -> bool:
        return len(self._prefills) + len(self._decodes) < self._slots

    def _unwritten(self) -> int:
        return sum(r.context.end_idx - r.context.start_idx for r in self._prefills)

    def _claim(self, request: Request) -> bool:
        context, manager = request.context, self._manager
        try:
            manager.claim(context.request_id)
        except CapacityError:  # others have claimed the rest of the manager
            return False
        try:
            fits = manager.maybe_reserve(context)
        except BaseException:
            manager.release(context.request_id)
            raise
        if not fits:
            manager.release(context.request_id)
        elif request.cached < 0:
            request.cached = context.start_idx
        return fits

    def _soon_cached(self, request: Request) -> bool:
        """Tell whether a prompt being computed now will save this one half of its tokens."""
        params = self._manager.params
        if not params.enable_prefix_caching or not self._prefills:
            return False
        tokens = request.context.tokens
        known = self._manager.match_prefix(tokens)
        for other in self._prefills:
            seen = other.context.tokens[: len(tokens) - 1]
            if len(seen) < params.page_size or seen[0] != tokens[0]:
                continue
            differ = np.flatnonzero(seen != tokens[: len(seen)])
            shared = int(differ[0]) if len(differ) else len(seen)
            shared -= shared % params.page_size
            gain = shared - max(known, 0)
            if shared > other.context.start_idx and 2 * gain >= len(tokens) - known:
                return True
        return False

    def _cut_chunks(self) -> list[Request]:
        """Share what is left of the step's tokens among the prompts, oldest first."""
        budget = self._budget - len(self._decodes)
        running = []
        for request in self._prefills:
            if budget <= 0:
                break
            context = request.context
            count = min(budget, context.end_idx - context.start_idx)
            context.active_idx = context.start_idx + count
            running.append(request)
            budget -= count
        return running
