# SPDX-License-Identifier: Apache-2.0
"""The reference's requests with a common prefix: fork, truncate, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import reference
from foreign_context import Context, Refused
from reference_claims import Claim

Group = tuple[int, tuple[int, ...]]  # replica, rows of its part of a batch


class Manager(reference.Manager):
    """The reference with every verb."""

    def fork(self, parent: Context, children: Sequence[Context]) -> None:
        names = [child.request_id for child in children]
        if len(set(names)) < len(names):
            raise Refused("ValueError")
        source = self.find(parent.request_id)
        if any(name in self.claims for name in names):
            raise Refused("AlreadyClaimedError")
        n = min(source.written, parent.start_idx)
        for child in children:
            keys = [(c.extra_key, c.cache_salt) for c in (parent, child)]
            if child.end_idx <= n or child.ids[:n] != parent.ids[:n] or keys[0] != keys[1]:
                raise Refused("ValueError")
        if len(self.claims_of(source.replica)) + len(children) > self.per_replica:
            raise Refused("CapacityError")
        for child in children:
            self.adopt(source, child, n)

    def adopt(self, source: Claim, child: Context, n: int) -> None:
        """Claim one fork that shares `n` tokens."""
        pages = -(-n // self.page_size)
        claim = Claim(source.replica, source.pages[:pages], source.path[:pages], frozen=pages)
        claim.written = claim.counted = n
        claim.prompt = n if 0 < n == child.end_idx - 1 else child.end_idx
        claim.ctx = child
        claim.started = n > 0
        source.started |= n > 0
        source.frozen = max(source.frozen, pages)
        self.claims[child.request_id] = claim
        child.start_idx = n
        if child.active_idx <= n:
            child.active_idx = child.end_idx

    def has_written(self, ctx: Context) -> bool:
        """Return true if a claim has written tokens; before, it has no namespace."""
        return ctx.request_id in self.claims and self.claims[ctx.request_id].written > 0

    def truncate(self, ctx: Context, n: int) -> None:
        claim = self.find(ctx.request_id)
        most = max(claim.counted, claim.written) if claim.started else 0
        if not 0 <= n <= most:
            raise Refused("ValueError")
        pages = -(-n // self.page_size)
        if pages < len(claim.pages):
            del claim.pages[pages:]
            self.leave_cache(claim, pages)
            claim.frozen = min(claim.frozen, pages)
        claim.written = min(claim.written, n)

    def shared_prefixes(self, batch: Sequence[Context]) -> dict[Group, int]:
        """Return the common tokens of each largest set of rows."""
        rows = [(self.find(ctx.request_id), ctx.start_idx) for ctx in batch]
        found: dict[Group, int] = {}
        for replica in range(len(self.cache)):
            mine = [(c, min(c.written, start)) for c, start in rows if c.replica == replica]
            longest = max((written for _, written in mine), default=0)
            ends = {written for _, written in mine} | {*range(0, longest, self.page_size)}
            for end in sorted(ends - {0}):
                alike: dict[object, list[int]] = {}
                for row, (claim, written) in enumerate(mine):
                    if written >= end:
                        alike.setdefault(self.leading(claim, end), []).append(row)
                for same in alike.values():
                    found[replica, tuple(same)] = end
        return {group: end for group, end in found.items() if len(group[1]) > 1}

    def leading(self, claim: Claim, tokens: int) -> object:
        """Return an identity of the first pages of a row."""
        return tuple(map(id, claim.pages[: -(-tokens // self.page_size)]))
