# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from typing import TypeAlias

from kvcore._hot.contexts import TextGenerationContext
from kvcore._hot.parts import EngineParts
from kvcore.context import ContextLike
from kvcore.results import ReservePlan

_Context: TypeAlias = TextGenerationContext | ContextLike

class ReservingEngine(EngineParts):
    """Reserve pages for requests, and tell what that would do."""

    def maybe_reserve(
        self,
        data: _Context,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> bool:
        """Reuse the cached prefix of a request and allocate the pages that its next steps need.

        Parameters
        ----------
        data : context
            Its ``start_idx`` moves to the end of the prefix found, ``active_idx`` behind it.
        num_steps : int
            Steps to run before the next reservation.
        max_hit : int, optional
            Tokens of the cache that the request has afterwards, copied ones included, at most: a
            hit is cut to what may end there. 0 leaves the cache alone. A longer hit that it has
            already stays.
        keep_free : int
            Pages of its replica that are free or evictable afterwards, at least.
        must_fit : int, optional
            Tokens, such as the whole prompt or all that it may become: there has to be room for the
            request with so many, beside `keep_free`, though it gets no page by that. For managers
            with ``reserve_chunks``, and for windows: no later chunk is taken to be longer.

        Returns
        -------
        bool
            False when the pages do not fit; then nothing has changed, and nothing is evicted.

        Raises
        ------
        CapacityError
            The request, or what must fit, can never fit: larger than the pool, than a quota or than
            ``max_seq_len``.
        RequestNotFoundError, ValueError

        Notes
        -----
        Costs the comparison of the prompt with the cache plus O(pages added). Idempotent. The ids
        of the pages added are ``get_req_blocks(request_id, first=n)`` where it had `n`. The options
        are those of this call: another one, or a ``fetch`` that finds pages missing, may take a
        longer hit.
        """

    def reserve(
        self,
        data: _Context,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> bool:
        """Reuse the cached prefix of a request and allocate the pages that its next steps need.

        Parameters
        ----------
        data : context
            Its ``start_idx`` moves to the end of the prefix found, ``active_idx`` behind it.
        num_steps : int
            Steps to run before the next reservation.
        max_hit : int, optional
            Tokens of the cache that the request has afterwards, copied ones included, at most: a
            hit is cut to what may end there. 0 leaves the cache alone. A longer hit that it has
            already stays.
        keep_free : int
            Pages of its replica that are free or evictable afterwards, at least.
        must_fit : int, optional
            Tokens, such as the whole prompt or all that it may become: there has to be room for the
            request with so many, beside `keep_free`, though it gets no page by that. For managers
            with ``reserve_chunks``, and for windows: no later chunk is taken to be longer.

        Returns
        -------
        bool
            False when the pages do not fit; then nothing has changed, and nothing is evicted.

        Raises
        ------
        CapacityError
            The request, or what must fit, can never fit: larger than the pool, than a quota or than
            ``max_seq_len``.
        RequestNotFoundError, ValueError

        Notes
        -----
        Costs the comparison of the prompt with the cache plus O(pages added). Idempotent. The ids
        of the pages added are ``get_req_blocks(request_id, first=n)`` where it had `n`. The options
        are those of this call: another one, or a ``fetch`` that finds pages missing, may take a
        longer hit.
        """

    def _stand_back(self, ctx: _Context, start: int, active: int) -> None: ...
    def maybe_reserve_batch(self, batch: Iterable[_Context], num_steps: int = 1) -> int:
        """Reserve contexts in order up to the first that does not fit; return how many.

        Every error is raised before anything is reserved.
        """

    def plan(
        self,
        ctx: _Context,
        num_steps: int = 1,
        *,
        replica_idx: int | None = None,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> ReservePlan:
        """Tell what ``maybe_reserve`` would do now; changes nothing, not even recency.

        Parameters
        ----------
        ctx : context
            It need not be claimed: then of a claim that is new.
        num_steps : int
        replica_idx : int, optional
            Of a request that is not claimed; left out, ``get_or_recommend_replica(ctx)``.
        max_hit, keep_free, must_fit
            As of ``maybe_reserve``.

        Returns
        -------
        ReservePlan
            ``fits=False`` also for a request that can never fit.

        Raises
        ------
        IndexError, ValueError
            The request is claimed on another replica than `replica_idx`.

        Notes
        -----
        Costs finding the hit. Whether a replica takes one more claim is not asked.
        """
