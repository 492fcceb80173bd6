# SPDX-License-Identifier: Apache-2.0
"""The reference with a host tier: its stored pages, and the time of each copy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import reference_forks
from foreign_context import Context
from reference_claims import Admission, Claim, Key


@dataclasses.dataclass
class Flight:
    """Pages of a claim that one step stores."""

    claim: Claim
    ahead: list[Key]  # keys that earlier flights store
    own: list[Key]


class Manager(reference_forks.Manager):
    """The reference whose `host` holds for each stored page the time of its last use.

    With a `threshold` a page is stored after this number of uses.
    """

    def __init__(
        self, *args: Any, host_pages: int = 0, threshold: int | None = None, **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self.host_pages = host_pages
        self.threshold = threshold
        self.host: list[dict[Key, int]] = [{} for _ in self.cache]

    # -- queries ---------------------------------------------------------------------------------
    def stored(self, ctx: Context, replica: int, limit: int) -> list[Key]:
        ends = range(self.page_size, limit + 1, self.page_size)
        keys = (self.key(ctx, end // self.page_size) for end in ends)
        return list(itertools.takewhile(self.host[replica].__contains__, keys))

    def hit_of(self, ctx: Context, replica: int) -> int:
        return max(super().hit_of(ctx, replica), len(self.stored(ctx, replica, ctx.end_idx)))

    def kept(self, replica: int) -> set[Key]:
        return {key for claim in self.claims_of(replica) for key in claim.host or ()}

    def room(self, replica: int, flights: list[Flight]) -> int:
        """Return the pages that can be taken: all except pages in use and in flight."""
        away = sum(len(f.own) for f in flights if f.claim.replica == replica)
        return self.host_pages - len(self.kept(replica)) - away

    # -- uses ------------------------------------------------------------------------------------
    def walk(self, claim: Claim, ctx: Context, path: list[Key]) -> None:
        for key in path:
            self.cache[claim.replica][key].uses += 1

    def forget(self, replica: int, gone: list[Key]) -> None:
        for key in gone:
            self.cache[replica][key].uses = 0
        super().forget(replica, gone)

    def is_due(self, replica: int, key: Key) -> bool:
        return self.threshold is None or self.cache[replica][key].uses >= self.threshold

    # -- loads -----------------------------------------------------------------------------------
    def pages_below(self, ctx: Context, replica: int, hit: int) -> int:
        """Return the pages of the hit in the tier if it is longer than `hit` tokens, else 0."""
        pages = len(self.stored(ctx, replica, self.limit(ctx)))
        return pages if pages * self.page_size > hit else 0

    def load(self, row: Admission, claim: Claim) -> None:
        claim.is_due |= self.threshold is not None and row.has_hit
        if row.below:
            self.metrics["h2d_blocks_copied"] += row.below - len(row.path)
            self.use(claim.replica, [self.key(row.ctx, n + 1) for n in range(row.below)])

    def use(self, replica: int, path: list[Key]) -> None:
        self.clock += 1
        self.host[replica].update(dict.fromkeys(path, self.clock))

    # -- stores ----------------------------------------------------------------------------------
    def store(self, claim: Claim, flights: list[Flight]) -> None:
        """Store the pages of a claim that committed pages, as far as the tier has room."""
        claim.is_due = False
        if not self.host_pages:
            return
        if claim.host is None:
            claim.host = []
            self.advance(claim, len(claim.path))
        known = len(claim.host)
        behind = claim.path[known : known + self.room(claim.replica, flights)]
        due = itertools.takewhile(lambda key: self.is_due(claim.replica, key), behind)
        end = known + len(list(due))
        self.advance(claim, end)
        rest = claim.path[len(claim.host) : end]
        away = {k for f in flights if f.claim.replica == claim.replica for k in f.own}
        ahead = list(itertools.takewhile(away.__contains__, rest))
        own = list(itertools.takewhile(lambda key: key not in away, rest[len(ahead) :]))
        own = own[: self.room(claim.replica, flights)]
        if own:
            flights.append(Flight(claim, ahead, own))
            self.make_room(claim.replica, flights)

    def advance(self, claim: Claim, end: int) -> None:
        assert claim.host is not None
        behind = claim.path[len(claim.host) : end]
        claim.host += itertools.takewhile(self.host[claim.replica].__contains__, behind)

    def make_room(self, replica: int, flights: list[Flight]) -> None:
        host, kept = self.host[replica], self.kept(replica)
        away = sum(len(f.own) for f in flights if f.claim.replica == replica)
        while len(host) + away > self.host_pages:
            parents = {(ns, tokens[: -self.page_size]) for ns, tokens in host}
            leaves = [key for key in host if key not in parents and key not in kept]
            del host[min(leaves, key=host.__getitem__)]

    def publish(self, flights: list[Flight]) -> None:
        for flight in flights:
            claim = flight.claim
            assert claim.host is not None
            self.metrics["d2h_blocks_copied"] += len(flight.own)
            self.host[claim.replica].update(dict.fromkeys(flight.own, self.clock))
            claim.host += flight.ahead + flight.own

    # -- releases --------------------------------------------------------------------------------
    def leave_host(self, claim: Claim, columns: int) -> None:
        if claim.host is not None and len(claim.host) > columns:
            self.use(claim.replica, claim.host)
            del claim.host[max(0, columns) :]

    def reset(self) -> None:
        super().reset()
        for replica, host in enumerate(self.host):
            for key in host.keys() - self.kept(replica):
                del host[key]
