# SPDX-License-Identifier: Apache-2.0
"""The smallest paged manager with kvcore's results: slow, obvious, without page ids.

The whole state of a replica is one dictionary of cached pages. The key is the namespace and *all*
tokens up to the end of the page, so the key defines the contents of the page. Each call derives
everything else (free pages, protection, the next victim) from this dictionary and the claims.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foreign_context import Context, Refused
from reference_claims import Admission, Claim, Ended, Key, Leavers, Namespace, Page
from reference_options import Bounded


class Manager(Bounded):
    """The reference: the same verbs and answers as kvcore, without its speed."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        max_batch_size: int,
        max_seq_len: int,
        *,
        replicas: int = 1,
        caching: bool = True,
        dedup: bool = True,
        partial: bool = True,
        copies_at_once: bool = True,
    ) -> None:
        self.page_size, self.num_pages, self.max_seq_len = page_size, num_pages, max_seq_len
        self.per_replica = -(-max_batch_size // replicas)
        self.caching, self.dedup, self.partial = caching, dedup, partial
        self.cache: list[dict[Key, Page]] = [{} for _ in range(replicas)]
        self.pins: list[list[list[Key]]] = [[] for _ in range(replicas)]
        self.claims: dict[Any, Claim] = {}
        self.ended: dict[int, Ended] = {}
        self.metrics: Counter[str] = Counter()
        self.copies: list[int] = []  # tokens of each page copy that is due
        self.copies_at_once = copies_at_once
        self.read = Leavers()  # by the copies of the present call
        self.clock = 0

    def find(self, request_id: Any) -> Claim:
        if request_id not in self.claims:
            raise Refused("RequestNotFoundError")
        return self.claims[request_id]

    # -- queries ---------------------------------------------------------------------------------
    def key(self, ctx: Context, pages: int) -> Key:
        return (ctx.extra_key, ctx.cache_salt), tuple(ctx.ids[: pages * self.page_size])

    def key_behind(self, path: list[Key], ctx: Context, column: int) -> Key:
        """Return the key of a claim's next page; the cached pages before it stay as written.

        A context that went back without ``truncate`` may have other tokens before that page.
        """
        space, tokens = self.key(ctx, column + 1)
        return space, (path[-1][1] if path else ()) + tokens[column * self.page_size :]

    def match(self, replica: int, tokens: Sequence[int], ns: Namespace, limit: int) -> list[Key]:
        found: list[Key] = []
        while len(found) < min(limit, len(tokens) // self.page_size):
            key = ns, tuple(tokens[: (len(found) + 1) * self.page_size])
            if key not in self.cache[replica]:
                break
            found.append(key)
        return found

    def claims_of(self, replica: int) -> list[Claim]:
        return [claim for claim in self.claims.values() if claim.replica == replica]

    def protected(self, replica: int) -> set[Key]:
        paths = [claim.path for claim in self.claims_of(replica)] + self.pins[replica]
        return {key for path in paths for key in path}

    def is_sole(self, page: Page, kept: int, leaving: Leavers) -> bool:
        """Return true if neither the cache nor another request holds a page.

        Forks that are about to release the page do not count, if their copies read at most its
        first `kept` tokens.
        """
        holders = sum(any(p is page for p in claim.pages) for claim in self.claims.values())
        reach = max(leaving.reach(page), self.read.reach(page))
        return not page.cached and holders - leaving.count(page) == 1 and reach <= kept

    def unused(self, replica: int) -> int:
        owned = {id(p) for c in self.claims_of(replica) for p in c.pages if not p.cached}
        return self.num_pages - len(self.cache[replica]) - len(owned)

    def num_free(self, replica: int) -> int:
        return self.unused(replica) + len(self.cache[replica]) - len(self.protected(replica))

    def loads(self) -> list[tuple[int, int]]:
        """Return the load of each replica; among equal hits the least load is first."""
        return [(-self.num_free(n), len(self.claims_of(n))) for n in range(len(self.cache))]

    def recommend(self, ctx: Context, loads: list[tuple[int, int]] | None = None) -> int:
        """Return the best replica; `loads` are the loads of the present state, if known."""
        if ctx.request_id in self.claims:
            return self.find(ctx.request_id).replica
        loads = self.loads() if loads is None else loads

        def rank(replica: int) -> tuple[int, tuple[int, int]]:
            return -self.hit_of(ctx, replica), loads[replica]

        return min(range(len(self.cache)), key=rank)

    def hit_of(self, ctx: Context, replica: int) -> int:
        return len(self.match(replica, ctx.ids, (ctx.extra_key, ctx.cache_salt), ctx.end_idx))

    # -- reserving -------------------------------------------------------------------------------
    def needed(self, ctx: Context, num_steps: int) -> int:
        return -(-(ctx.end_idx + num_steps - 1) // self.page_size)

    def check(self, batch: list[Context], num_steps: int) -> list[Claim]:
        claims = [self.find(ctx.request_id) for ctx in batch]
        for claim, ctx in zip(claims, batch, strict=True):
            claim.past = self.past_of(claim, ctx) if claim.past is None else claim.past
        self.check_fit()
        for ctx in batch:
            too_long = ctx.end_idx + num_steps - 1 > self.max_seq_len
            if too_long or self.needed(ctx, 1) > self.num_pages:
                raise Refused("CapacityError")
        return claims

    def search(self, ctx: Context, num_steps: int, leaving: Leavers) -> Admission:
        claim, size = self.claims[ctx.request_id], self.page_size
        start, active = ctx.start_idx if claim.pages else 0, ctx.active_idx
        needed = self.needed(ctx, num_steps)
        row = Admission(ctx, start, active, needed, claim.path, 0, [], claim.hit)
        may_hit = self.caching and not claim.started and start == claim.hit
        if may_hit and active - start > 1:
            ns = (ctx.extra_key, ctx.cache_salt)
            found = self.match(claim.replica, ctx.ids, ns, self.limit(ctx) // size)
            tokens, pages = self.best_sources(ctx, claim.replica, len(found))
            if claim.has_declined and len(found) <= len(claim.path):
                tokens, pages = 0, []
            below = self.pages_below(ctx, claim.replica, len(found) * size + tokens)
            tokens, pages = (0, []) if below else (tokens, pages)
            if max(len(found), below) * size + tokens > claim.hit:
                row.path, row.partial, row.sources, row.below = found, tokens, pages, below
                self.stand(row, claim)
        held, shared = len(claim.pages), len(row.path)
        row.new = max(needed, held, shared) - max(held, shared)
        row.given_back = min(held, shared) - len(claim.path)
        if row.start < claim.frozen * size:  # it went back into pages that others may read
            row.given_back = 0
            behind = held if claim.frozen > needed else claim.frozen
            for column in range(row.start // size, behind):
                page, kept = claim.pages[column], max(0, row.start - column * size)
                sole = self.is_sole(page, kept, leaving)
                row.new += not sole and column < needed
                row.given_back += sole and column >= needed
                if not sole:
                    leaving.add(page, kept if self.copies_at_once else 0)
        return row

    def stand(self, row: Admission, claim: Claim) -> None:
        """Set the position of a request after its hit."""
        start = row.ctx.start_idx if claim.pages else 0
        row.total = max(claim.hit, max(len(row.path), row.below) * self.page_size + row.partial)
        row.start = row.total if row.total > claim.hit else start
        row.active = row.ctx.active_idx
        if row.start >= row.active:
            row.active = min(row.ctx.end_idx, row.start + row.active - start)

    def best_sources(self, ctx: Context, replica: int, whole: int) -> tuple[int, list[Key]]:
        ns, done = self.key(ctx, whole)
        limit = min(self.limit(ctx) - len(done), self.page_size - 1) if self.partial else 0
        rest = ctx.ids[len(done) : len(done) + limit]
        best: dict[int, list[Key]] = {}
        for key in self.cache[replica]:
            if (key[0], key[1][: -self.page_size]) == (ns, done):
                page = key[1][len(done) :]
                same = [a == b for a, b in zip(rest, page, strict=False)]
                best.setdefault((*same, False).index(False), []).append(key)
        longest = max(best, default=0)
        return longest, best[longest] if longest else []

    def settle(
        self, rows: list[Admission], source: Key | None, *, dropped: bool
    ) -> dict[int, list[Key]] | None:
        """Decide about partial hits and select the pages to evict; None if the rows do not fit."""
        by_replica: dict[int, list[Admission]] = {}
        for row in rows:
            by_replica.setdefault(self.claims[row.ctx.request_id].replica, []).append(row)
        short, victims, keep = {}, {}, {}
        for replica, mine in by_replica.items():
            taken = itertools.accumulate(r.new - r.given_back for r in mine)
            short[replica] = max(taken) - self.unused(replica)
            keep[replica] = self.protected(replica) | {key for r in mine for key in r.path}
            victims[replica] = len(self.cache[replica]) - len(keep[replica])
        for replica, mine in by_replica.items():
            for row in (row for row in mine if row.sources):
                held = keep[replica]
                chosen = min(row.sources, key=lambda key: (key != source, dropped and key in held))
                scarce = chosen not in held and 0 < short[replica] >= victims[replica]
                if scarce or (len(rows) > 1 and max(short.values()) > 0):
                    row.partial, row.sources, row.declines = 0, [], True
                    self.stand(row, self.claims[row.ctx.request_id])
                else:
                    held.add(chosen)
        if any(short[replica] > victims[replica] for replica in by_replica):
            return None
        if not all(self.leaves_enough(row) for row in rows):
            return None
        return {r: self.oldest(r, keep[r], max(0, short[r])) for r in by_replica}

    def oldest(self, replica: int, keep: set[Key], n: int) -> list[Key]:
        left, gone = dict(self.cache[replica]), list[Key]()
        for _ in range(n):
            parents = {(ns, tokens[: -self.page_size]) for ns, tokens in left}
            leaves = [key for key in left if key not in parents and key not in keep]
            gone.append(min(leaves, key=lambda key: self.worth(key, left[key])))
            del left[gone[-1]]
        return gone

    def worth(self, key: Key, page: Page) -> Any:
        """Return the eviction rank of a page: the smallest is evicted first."""
        return page.stamp

    def walk(self, claim: Claim, ctx: Context, path: list[Key]) -> None:
        """Record that a request uses cached pages: see reference_policies."""

    def forget(self, replica: int, gone: list[Key]) -> None:
        """Evict pages."""
        for key in gone:
            self.cache[replica].pop(key).cached = False

    def apply(self, rows: list[Admission], victims: dict[int, list[Key]]) -> None:
        for row in sorted(rows, key=self.only_grows):
            claim = self.claims[row.ctx.request_id]
            self.evict_for(row, claim, victims[claim.replica])
            self.see(claim, row.ctx)
            if not claim.started:
                self.walk(claim, row.ctx, row.path[len(claim.path) :])
                claim.pages[: len(row.path)] = [self.cache[claim.replica][k] for k in row.path]
                claim.path = list(row.path)
                claim.frozen = max(claim.frozen, len(row.path))
            self.go_back(claim, row)
            claim.pages += [Page() for _ in range(row.needed - len(claim.pages))]
            row.ctx.start_idx, row.ctx.active_idx = row.start, row.active
            row.has_hit = row.total > claim.hit
            claim.has_declined = row.declines or (claim.has_declined and not row.has_hit)
            claim.written = row.start if row.has_hit else min(claim.written, row.start)
            moved = claim.hit, min(row.total, claim.counted)
            self.metrics["cache_tokens"] += max(0, row.total - max(claim.hit, claim.known))
            self.metrics["copied_tokens"] += row.partial
            self.copies += [row.partial] if row.partial else []
            self.metrics["input_tokens"] -= self.in_prompt(claim, *moved)
            claim.hit = row.total
            self.load(row, claim)
            self.count(claim, row.ctx)

    def only_grows(self, row: Admission) -> bool:
        """Return true if a row only grows; the other rows of a batch are served first."""
        claim = self.claims[row.ctx.request_id]
        return claim.started and row.start >= claim.frozen * self.page_size

    def evict_for(self, row: Admission, claim: Claim, victims: list[Key]) -> None:
        """Evict the first of `victims`: a victim for each page that a row lacks."""
        lacking = max(0, row.new - row.given_back - self.unused(claim.replica))
        self.forget(claim.replica, victims[:lacking])
        self.metrics["evicted_pages"] += len(victims[:lacking])
        del victims[:lacking]

    def go_back(self, claim: Claim, row: Admission) -> None:
        """Replace the pages that the next tokens write into and that others may read."""
        first = row.start // self.page_size
        if claim.frozen <= first:
            return
        if claim.frozen > row.needed:
            del claim.pages[row.needed :]
        kept = row.start % self.page_size
        for column in range(first, min(claim.frozen, row.needed)):
            page = claim.pages[column]
            if not self.is_sole(page, kept if column == first else 0, Leavers()):
                claim.pages[column] = Page()
                if column == first and kept:
                    self.copies.append(kept)
                    self.read.add(page, kept if self.copies_at_once else 0)
        self.leave_cache(claim, first)
        claim.frozen = first

    def leave_cache(self, claim: Claim, columns: int) -> None:
        """Release a claim's cached pages from a column on; they stay in the cache."""
        if len(claim.path) > columns:
            self.touch(claim.replica, claim.path)
            del claim.path[columns:]
            self.leave_host(claim, columns)

    def count(self, claim: Claim, ctx: Context) -> None:
        first = max(ctx.start_idx, claim.counted)
        self.metrics["input_tokens"] += self.in_prompt(claim, first, ctx.active_idx)
        claim.counted = max(claim.counted, ctx.active_idx)
        claim.ctx = ctx

    def see(self, claim: Claim, ctx: Context) -> None:
        """Set the prompt of a claim at its first pages, and the tokens that are counted already."""
        if claim.prompt < 0:
            prompt, counted = ctx.past if claim.past is None else claim.past
            claim.prompt = ctx.end_idx if prompt < 0 else prompt
            claim.known = max(counted, ctx.start_idx)
            claim.ran = max(claim.ran, ctx.start_idx)

    def past_of(self, claim: Claim, ctx: Context) -> tuple[int, int]:
        """Return the tokens of the prompt of a request, and its tokens that are counted already."""
        claim.first = tuple(ctx.ids)
        earlier = self.ended.get(self.place_of(ctx.request_id))
        if ctx.past[0] >= 0:
            claim.ran = ctx.ran
        elif earlier is not None and earlier.goes_on(ctx):
            claim.first, claim.ran = earlier.prompt, earlier.written
            return earlier.past
        return ctx.past

    def in_prompt(self, claim: Claim, first: int, end: int) -> int:
        """Count the prompt positions that earlier claims did not count."""
        return max(0, min(end, claim.prompt) - max(first, claim.known))

    # -- verbs -----------------------------------------------------------------------------------
    def claim(self, request_id: Any, replica: int = 0) -> None:
        if request_id in self.claims:
            raise Refused("AlreadyClaimedError")
        if len(self.claims_of(replica)) >= self.per_replica:
            raise Refused("CapacityError")
        self.claims[request_id] = Claim(replica)

    def place_of(self, request_id: Any) -> int:
        """Return the place of an ended claim: a later claim may take the place."""
        return hash(request_id) % max(256, min(4096, 1 << (4 * self.per_replica - 1).bit_length()))

    def reserve(
        self,
        ctx: Context,
        num_steps: int = 1,
        source: Key | None = None,
        *,
        dropped: bool = False,
        **options: Any,
    ) -> bool:
        with self.bounded(**options):
            self.check([ctx], num_steps)
            row = self.search(ctx, num_steps, Leavers())
            victims = self.settle([row], source, dropped=dropped)
            if self.read and (victims is None or any(victims.values())):
                self.read.clear()  # eviction waits for the copies of the rows before
                row = self.search(ctx, num_steps, Leavers())
                victims = self.settle([row], source, dropped=dropped)
        if victims is None:
            return False
        self.apply([row], victims)
        return True

    def fetch(
        self,
        batch: list[Context],
        num_steps: int = 1,
        source: Key | None = None,
        *,
        dropped: bool = False,
    ) -> None:
        claims = self.check(batch, num_steps)
        leaving = Leavers()
        rows = [
            self.search(ctx, num_steps, leaving)
            for ctx, claim in zip(batch, claims, strict=True)
            if len(claim.pages) < self.needed(ctx, num_steps)
            or ctx.start_idx < claim.frozen * self.page_size
        ]
        victims = self.settle(rows, source, dropped=dropped)
        if victims is None:
            raise Refused("InsufficientBlocksError")
        self.apply(rows, victims)
        for ctx, claim in zip(batch, claims, strict=True):
            claim.started = True
            claim.written = min(claim.written, ctx.start_idx)
            self.count(claim, ctx)

    def step(self, batch: list[Context]) -> list[tuple[int, int]]:
        claims = [self.find(ctx.request_id) for ctx in batch]
        for ctx, claim in zip(batch, claims, strict=True):
            if ctx.start_idx > len(claim.pages) * self.page_size:
                raise Refused("ValueError")
        swaps, flights = [], list[Any]()
        for row, (ctx, claim) in enumerate(zip(batch, claims, strict=True)):
            cache = self.cache[claim.replica]
            claim.started |= ctx.start_idx != claim.hit
            claim.written = ctx.start_idx
            written = ctx.start_idx // self.page_size if self.caching else 0
            before = len(claim.path)
            for column in range(len(claim.path), written):
                key, own = self.key_behind(claim.path, ctx, column), claim.pages[column]
                page = cache.setdefault(key, own)
                page.cached = True
                self.walk(claim, ctx, [key])
                for holder in self.claims_of(claim.replica):  # the page of each fork is cached now
                    if holder.pages[column : column + 1] == [page] and len(holder.path) == column:
                        holder.path.append(key)
                if page is not own:
                    claim.path.append(key)
                if page is not own and self.dedup:
                    claim.pages[column] = page
                    swaps.append((row, column))
            claim.frozen = max(claim.frozen, len(claim.path))
            if written > before or claim.is_due:
                self.store(claim, flights)
        self.publish(flights)
        return swaps

    def release(self, request_id: Any) -> None:
        claim = self.find(request_id)
        del self.claims[request_id]
        past = claim.prompt, max(claim.known, claim.counted)
        written = max(claim.ran, claim.written)
        if claim.ctx is not None and claim.ctx.remembers:
            claim.ctx.past, claim.ctx.ran = past, written
        if claim.prompt < 0 and claim.past is not None:
            past = claim.past
        if claim.first:
            place = self.place_of(request_id)
            self.ended[place] = Ended(request_id, claim.first, past, written)
        self.touch(claim.replica, claim.path)
        self.leave_host(claim, -1)

    def touch(self, replica: int, path: list[Key]) -> None:
        self.clock += 1
        for key in path:
            self.cache[replica][key].stamp = self.clock

    def pin(self, replica: int, tokens: Sequence[int], ns: Namespace) -> list[Key]:
        path = self.match(replica, tokens, ns, len(tokens))
        self.pins[replica].append(path)
        return path

    def unpin(self, replica: int, path: list[Key]) -> None:
        index = next(i for i, pinned in enumerate(self.pins[replica]) if pinned is path)
        del self.pins[replica][index]
        self.touch(replica, path)

    def reset(self) -> None:
        for replica, cache in enumerate(self.cache):
            self.forget(replica, list(cache.keys() - self.protected(replica)))
