# SPDX-License-Identifier: Apache-2.0
"""A check of a plan against its reservation, and against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvcore

if TYPE_CHECKING:
    from lockstep import Lockstep
    from paired_request import Request


class Planned:
    """A plan, and the state of the manager at that time."""

    def __init__(self, pair: Lockstep, request: Request, num_steps: int, **options: Any) -> None:
        self.pair, self.request, self.options = pair, request, options
        self.plan: kvcore.ReservePlan = pair.core.plan(request.core, num_steps, **options)
        expected = pair.model.plan(request.model, num_steps, **options)
        assert self.plan.fits is (expected is not None), f"{self.plan}, expected {expected}"
        if expected is not None:
            assert (self.plan.new_pages, self.plan.evictable_hit_pages) == expected, self.plan
        self.before, self.free = pair.core.metrics, pair.core.num_free_blocks
        claim = pair.model.claims.get(request.request_id)
        self.is_claimed = claim is not None
        self.has_none = claim is not None and not claim.pages

    def check(self, answer: bool | None) -> None:
        """Check the plan against the reservation's `answer`; None if the reservation raised."""
        if not self.is_claimed:
            return
        plan, after = self.plan, self.pair.core.metrics
        assert plan.fits is bool(answer), f"{plan}, but maybe_reserve answered {answer}"
        if not plan.fits:
            assert after == self.before
            assert self.pair.core.num_free_blocks == self.free
            return
        resumed = after.resumed_tokens - self.before.resumed_tokens
        assert plan.hit_tokens == after.cache_tokens - self.before.cache_tokens + resumed, plan
        assert plan.evicted_pages == after.evicted_pages - self.before.evicted_pages, plan
        assert plan.copied_tokens == after.copied_tokens - self.before.copied_tokens, plan
        if self.has_none:
            taken = plan.new_pages + plan.evictable_hit_pages
            assert self.pair.core.num_free_blocks == self.free - taken, plan
        claim = self.pair.model.claims[self.request.request_id]
        free = self.pair.model.num_free(claim.replica)
        assert free >= self.options.get("keep_free", 0), (free, self.options)
