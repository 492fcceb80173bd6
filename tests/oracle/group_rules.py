# SPDX-License-Identifier: Apache-2.0
"""The answers of a cache with groups while nothing is evicted, computed token by token.

The rules are in ``docs/groups.md``: the tokens that a layer still reads, the legal hits, the places
of checkpoints, and the table entries that have a page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcore import KVCacheParams
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, bundles

__all__ = ["GroupRules", "Told"]

Tokens = tuple[int, ...]


def first_read(group: AttentionGroup, n: int) -> int:
    """Return the first of `n` computed tokens that a layer reads again, or n for no token."""
    reads: Iterator[int]
    if isinstance(group, SlidingWindow):
        reads = (t for t in range(n) if n - t < group.window)
    elif isinstance(group, ChunkedLocal):
        reads = (t for t in range(n) if t // group.chunk == n // group.chunk)
    else:
        reads = iter(range(n))
    return next(reads, n)


@dataclass
class Told:
    """The state of one request under the rules."""

    tokens: list[int]
    hit: int = 0
    written: int = 0
    columns: int = 0  # columns with pages in full groups
    windowed: int = 0  # columns with pages in windows
    first: dict[int, int] = field(default_factory=dict)  # by group: number of columns given back
    has_run: bool = False  # fetched: a hit changes its pages no more
    has_slot: bool = False
    state: int = 0  # tokens in the state
    prompt_end: int = 0
    branch: int = 0


class GroupRules:
    """The cached columns of a manager, and the expected answer of each call."""

    def __init__(
        self,
        params: KVCacheParams,
        max_draft_tokens: int,
        *,
        parts: bool,
        is_exact: bool,
        keeps: bool,
    ) -> None:
        self.is_exact = is_exact  # False: `cached` is an upper bound
        self.bundles = bundles(params)
        self.groups = params.attention_groups
        self.size = max(bundle.page_size for bundle in self.bundles)
        # One more token is kept: after `rewind` to the accepted tokens the last of them runs again.
        self.drafts, self.parts = max_draft_tokens, parts
        self.keeps = keeps  # `leave` gives window pages back, `commit` does not
        self.kept = max_draft_tokens + 1 if max_draft_tokens > 0 else 0
        self.has_windows = any(self.is_window(g) for g in range(len(self.groups)))
        self.intervals = [group.interval for group in params.state_groups]
        self.keeps_everything = any(isinstance(group, FullAttention) for group in self.groups)
        self.cached: set[Tokens] = set()  # prefixes of whole columns
        self.checkpoints: set[Tokens] = set()

    # -- hits ----------------------------------------------------------------------------
    def depth(self, tokens: Tokens) -> int:
        """Return the cached whole columns of a prompt."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return sum(1 for _ in itertools.takewhile(lambda n: tokens[:n] in self.cached, ends))

    def whole_hit(self, tokens: Tokens) -> int:
        """Return the longest legal hit of whole columns, for complete windows without eviction."""
        n = self.depth(tokens) * self.size
        while n > 0 and self.intervals and tokens[:n] not in self.checkpoints:
            n -= self.size
        return n

    def longest_hit(self, tokens: Tokens) -> int:
        """Return the longest hit of a new request with these tokens; at least one token must run.

        Unlike `whole_hit`, it includes partial hits.
        """
        asked = tokens[:-1]
        whole = self.whole_hit(asked)
        if not self.parts or self.intervals:
            return whole
        begin = self.depth(asked) * self.size
        part = max(
            (
                sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                for pairs in (
                    zip(prefix[begin:], asked[begin:], strict=False)
                    for prefix in self.cached
                    if len(prefix) == begin + self.size and prefix[:begin] == asked[:begin]
                )
            ),
            default=0,
        )
        return begin + part

    # -- a request -----------------------------------------------------------------------
    def due(self, told: Told, start: int) -> int | None:
        """Return the first token after `start` at which a checkpoint is due."""
        if not self.intervals:
            return None
        at = [n for n in (told.prompt_end, told.branch) if n > start]
        at += [(start // each + 1) * each for each in self.intervals if each is not None]
        return min(at, default=None)

    def reserve(self, told: Told, start: int, active: int, end: int) -> tuple[int, int, bool]:
        """Return start_idx, active_idx and whether the chunk was cut.

        `start` is the start_idx before the reservation.
        """
        tokens = tuple(told.tokens)
        if not told.has_run:
            told.prompt_end = (end - 1) // self.size * self.size
            if active - start > 1:
                hit = self.longest_hit(tokens)
                cached = self.depth(tokens[:-1]) * self.size
                told.branch = cached if cached > max(hit, told.hit) else 0
                if hit > start:
                    active = min(end, hit + active - start) if hit >= active else active
                    start = hit
                    self.hit(told, hit)
        due = self.due(told, start)
        is_cut = due is not None and due < active
        return start, (due if is_cut and due is not None else active), is_cut

    def hit(self, told: Told, n: int) -> None:
        """Record that a request starts after `n` cached tokens."""
        told.hit = told.written = told.state = n
        self._pass(told, n)

    def take(self, told: Told, active: int, end: int, steps: int) -> None:
        """Record the pages and the slot that a reservation takes."""
        told.has_slot = bool(self.intervals)
        told.columns = max(told.columns, -(-(end + steps - 1) // self.size))
        told.windowed = max(told.windowed, -(-(active + steps - 1) // self.size))

    def commit(self, told: Told, start: int) -> None:
        """Record `start` written tokens: whole columns are cached, and windows advance."""
        tokens = tuple(told.tokens)
        for n in range(self.size, start + 1, self.size):
            self.cached.add(tokens[:n])
        at_due = start != told.state and start > 0 and self.due(told, start - 1) == start
        if (at_due or not self.is_exact) and start % self.size == 0:
            self.checkpoints.add(tokens[:start])
        told.has_run, told.written, told.state = True, start, start
        if not self.keeps:
            self.leave(told, start)

    def leave(self, told: Told, n: int) -> None:
        """Give back the window pages that no token after the first `n` reads."""
        self._pass(told, max(0, n - self.kept))

    def leaves_at(self, told: Told) -> int:
        """Return the number of tokens at which the next page is given back."""
        ends = {g: (column + 1) * self.size for g, column in told.first.items()}
        passed = (
            any(first_read(self.groups[g], n) >= ends[g] for g in ends if self.is_window(g))
            for n in itertools.count()
        )
        return self.kept + next(n for n, is_passed in enumerate(passed) if is_passed)

    def is_window(self, group: int) -> bool:
        """Return true if a group gives pages back."""
        return not isinstance(self.groups[group], FullAttention)

    def fork(self, parent: Told, tokens: list[int]) -> Told:
        """Return a child that continues after the tokens that its parent has written."""
        n = parent.written
        parent.has_run = parent.has_run or n > 0  # the child holds the same pages now
        columns = -(-n // self.size)
        child = Told(tokens, written=n, columns=columns, windowed=columns, has_run=n > 0)
        child.first, child.state = dict(parent.first), n
        child.has_slot = bool(self.intervals) and n > 0
        child.prompt_end = (len(tokens) - 1) // self.size * self.size
        return child

    def may_truncate(self, told: Told, n: int) -> bool:
        """Return true if a request can be truncated to `n` written tokens."""
        if self.has_windows:
            if n < told.written - self.drafts and not self.keeps:
                return False
            reads = [first_read(group, n) // self.size for group in self.groups]
            if any(first < told.first.get(g, 0) for g, first in enumerate(reads)):
                return False  # before the first page that its hit holds
        if not self.intervals or n in (0, told.state):
            return True
        return n % self.size == 0 and tuple(told.tokens[:n]) in self.checkpoints

    def truncate(self, told: Told, n: int) -> None:
        told.written = told.state = n
        told.columns = -(-n // self.size)
        told.windowed = min(told.windowed, told.columns)

    def _pass(self, told: Told, n: int) -> None:
        for g, group in enumerate(self.groups):
            told.first[g] = max(told.first.get(g, 0), first_read(group, n) // self.size)

    # -- tables --------------------------------------------------------------------------
    def has_page(self, told: Told, bundle: int) -> list[bool]:
        """Return for each entry of a table whether it has a page."""
        made = self.bundles[bundle]
        group = self.groups.index(made.group)
        end = told.columns
        if not isinstance(made.group, FullAttention):
            end = min(end, told.windowed)
        first = told.first.get(group, 0)
        columns = [first <= c < end for c in range(told.columns)]
        return [is_there for is_there in columns for _ in range(self.size // made.page_size)]
