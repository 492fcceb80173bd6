# SPDX-License-Identifier: Apache-2.0
"""The options of a reservation, in the reference."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from foreign_context import Context, Refused
from no_tier import NoTier
from reference_claims import Claim, Leavers


@dataclasses.dataclass(frozen=True)
class Options:
    max_hit: int | None = None
    keep_free: int = 0
    must_fit: int | None = None


class Bounded(NoTier):
    """The limits of the present reservation, and the pages that it must leave free."""

    options = Options()

    @contextlib.contextmanager
    def bounded(self, **options: Any) -> Iterator[None]:
        self.options = Options(**options)
        try:
            yield
        finally:
            self.options = Options()

    def limit(self, ctx: Context) -> int:
        """Return the longest allowed hit: at least one token is left to run."""
        last = ctx.end_idx - 1
        return last if self.options.max_hit is None else min(last, self.options.max_hit)

    def check_fit(self) -> None:
        this: Any = self
        if (self.options.must_fit or 0) > min(this.num_pages * this.page_size, this.max_seq_len):
            raise Refused("CapacityError")

    def leaves_enough(self, row: Any) -> bool:
        """Return true if a row leaves enough pages: free pages, less its pool and cached pages."""
        if not self.options.keep_free and not self.options.must_fit:
            return True
        this: Any = self
        claim = this.claims[row.ctx.request_id]
        free = this.num_free(claim.replica) - row.new + row.given_back - self.adopted(row)
        is_cut = claim.frozen > row.needed
        held = row.needed if is_cut else max(len(claim.pages), len(row.path), row.needed)
        ahead = max(0, -(-(self.options.must_fit or 0) // this.page_size) - held)
        return bool(free >= self.options.keep_free + ahead)

    def adopted(self, row: Any) -> int:
        """Return the number of pages in the hit that no request protects yet."""
        this: Any = self
        claim = this.claims[row.ctx.request_id]
        return len(set(row.path) - this.protected(claim.replica))

    def plan(self, ctx: Context, num_steps: int = 1, **options: Any) -> tuple[int, int] | None:
        """Return the pages that `reserve` would take now from the pool and from the cache, or None.

        None means that the request does not fit. A request that is not claimed counts on its
        recommended replica for the duration of the call.
        """
        this: Any = self
        is_claimed = ctx.request_id in this.claims
        if not is_claimed:
            this.claims[ctx.request_id] = Claim(this.recommend(ctx))
        try:
            with self.bounded(**options):
                this.check([ctx], num_steps)
                row = this.search(ctx, num_steps, Leavers())
                fits = this.settle([row], None, dropped=False) is not None
                return (row.new, self.adopted(row)) if fits else None
        except Refused:
            return None
        finally:
            if not is_claimed:
                del this.claims[ctx.request_id]
