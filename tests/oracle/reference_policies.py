# SPDX-License-Identifier: Apache-2.0
"""The reference with every eviction policy except ARC: the rank of each page, page by page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import reference_tier
from foreign_context import Context
from kvcore.policies import BY_NAME
from reference_claims import Claim, Key, Namespace, Page

FOR_EVER = float("inf")
RANKED = tuple(name for name in BY_NAME if name != "arc")  # the policies of `Manager.worth`
NEVER = FOR_EVER  # the return of a closed session
NO_HINT = 1e300
RETURNS = {None: NO_HINT, "soon": 60, "later": 600, "never": NEVER}  # seconds after the release
GRACE = 5  # seconds after a return in which it still counts
ATTENTION_TOKENS = 24_576  # the same as in kvcore.policies.Cost


@dataclasses.dataclass
class Past:
    """The history of a cached page."""

    uses: int
    entered: int
    floor: int
    asked: tuple[int, float] = (0, FOR_EVER)  # the highest priority, and its end
    lasting: int = 0  # the highest priority without an end
    returns: float = NO_HINT  # when its session returns


class Manager(reference_tier.Manager):
    """The reference with a clock `now`; eviction drops the history of a page."""

    def __init__(self, *args: Any, eviction: str = "lru", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.eviction = eviction
        self.now = 0
        self.entries = 0
        self.floor = [0 for _ in self.cache]
        self.terms: dict[Any, dict[str, Any]] = {}  # the options of each request, by request id
        self.past: dict[int, tuple[Page, Past]] = {}

    def of(self, page: Page) -> Past:
        return self.past[id(page)][1]

    def walk(self, claim: Claim, ctx: Context, path: list[Key]) -> None:
        super().walk(claim, ctx, path)
        for key in path:
            page = self.cache[claim.replica][key]
            if id(page) in self.past:
                self.use_again(claim.replica, [key])
            else:
                self.entries += 1
                self.past[id(page)] = page, Past(1, self.entries, self.floor[claim.replica])
            self.ask(ctx.request_id, page)

    def use_again(self, replica: int, path: list[Key]) -> None:
        for key in path:
            past = self.of(self.cache[replica][key])
            past.uses, past.floor = past.uses + 1, self.floor[replica]

    def match_and_touch(self, replica: int, tokens: Sequence[int], ns: Namespace) -> int:
        path = self.match(replica, tokens, ns, len(tokens))
        self.use_again(replica, path)
        if path:
            self.touch(replica, path)
        return len(path)

    def ask(self, request_id: Any, page: Page) -> None:
        terms = self.terms.get(request_id, {})
        priority, ttl = terms.get("priority", 50), terms.get("ttl")
        past = self.of(page)
        if past.asked[1] <= self.now:
            past.asked = past.lasting, FOR_EVER
        if ttl is None:
            past.lasting = max(past.lasting, priority)
        past.asked = max(past.asked, (priority, FOR_EVER if ttl is None else self.now + ttl))

    def release(self, request_id: Any) -> None:
        claim = self.find(request_id)
        for key in claim.path:
            self.ask(request_id, self.cache[claim.replica][key])
        self.expect(request_id, claim)
        super().release(request_id)

    def expect(self, request_id: Any, claim: Claim) -> None:
        """Store when the session of a request returns: a shared page keeps the earliest time."""
        cache = self.cache[claim.replica]
        followers = Counter((space, tokens[: -self.page_size]) for space, tokens in cache)
        hint: Any = self.terms.get(request_id, {}).get("returns_in")
        returns = self.now + (RETURNS[hint] if hint in RETURNS else float(hint))
        is_shared, follower = False, 0
        for key in reversed(claim.path):
            is_shared = is_shared or followers[key] > follower
            past, follower = self.of(cache[key]), 1
            past.returns = min(self.returns(past), returns) if is_shared else returns

    def returns(self, past: Past) -> float:
        return NO_HINT if past.returns < self.now - GRACE else past.returns

    def worth(self, key: Key, page: Page) -> Any:
        past = self.of(page)
        lasts = past.asked[1] > self.now
        depth = len(key[1]) // self.page_size
        attention = max(1, ATTENTION_TOKENS // self.page_size)
        worth: dict[str, Callable[[], Any]] = {
            "lru": lambda: page.stamp,
            "lfu": lambda: (past.uses, page.stamp),
            "slru": lambda: (past.uses > 1, page.stamp),
            "fifo": lambda: past.entered,
            "priority": lambda: (past.asked[0] if lasts else past.lasting, page.stamp),
            "hinted": lambda: (-self.returns(past), page.stamp),
            "cost": lambda: (past.floor + past.uses * (attention + depth), page.stamp),
        }
        return worth[self.eviction]()

    def forget(self, replica: int, gone: list[Key]) -> None:
        if self.eviction == "cost":
            worths = [self.worth(key, self.cache[replica][key])[0] for key in gone]
            self.floor[replica] = max([self.floor[replica], *worths])
        for key in gone:
            del self.past[id(self.cache[replica][key])]
        super().forget(replica, gone)
