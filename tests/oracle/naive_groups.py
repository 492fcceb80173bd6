# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of a model with groups, one request at a time: plain dicts, page by page.

The name of a run of `page_size` tokens is all tokens up to its end. The least recently used pages
are evicted; ``docs/groups.md`` describes the order for windows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from kvcore import KVCacheParams
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, bundles
from kvcore.layers.kinds import kept_tokens

__all__ = ["NaiveGroups"]

_BATCH = 64  # runs to evict before windows have their turn again


@dataclass
class Run:
    """Cached tokens with pages in all full groups; `has` lists the windows with pages."""

    name: bytes
    parent: bytes
    has: set[int] = field(default_factory=set)
    last: int = 0  # release time of the last request that held the run


Entry = tuple[bytes, int]


class NaiveGroups:
    """Serve prompts one after the other; count hits and evictions."""

    def __init__(self, params: KVCacheParams, pages: int, chunk: int) -> None:
        self.size, self.pages, self.chunk = params.page_size, pages, chunk
        lanes = [sum(b.group == g for b in bundles(params)) for g in params.attention_groups]
        pairs = list(zip(params.attention_groups, lanes, strict=True))
        self.full = sum(n for group, n in pairs if isinstance(group, FullAttention))
        self.windows: list[tuple[AttentionGroup, int]] = [
            pair for pair in pairs if not isinstance(pair[0], FullAttention)
        ]
        self.lanes = sum(lanes)
        self.runs: dict[bytes, Run] = {}
        # passed, kept, spare
        self.queues: tuple[dict[Entry, tuple[int, int]], ...] = ({}, {}, {})
        self.departure = 1
        self.broken = (0, 0)  # queue and departure
        self.ends: dict[tuple[int, int], bytes] = {}  # the prefix that a departure serves
        self.width = 0  # bytes of a token
        self.condemned: list[bytes] = []  # leaves after the last position where a hit can end
        self.now = 1
        self.evicted = 0
        self.given_back = [0] * len(self.windows)
        self.filled = [0] * len(self.windows)
        # State of the request that is served:
        self.own: dict[bytes, set[int]] = {}
        self.own_full = 0
        self.held: set[bytes] = set()
        self.read: set[Entry] = set()
        self.guard = b""

    # -- pages ---------------------------------------------------------------------------

    def cost(self, windows: set[int]) -> int:
        return sum(self.windows[w][1] for w in windows)

    def free(self) -> int:
        cached = sum(self.full + self.cost(run.has) for run in self.runs.values())
        own = self.own_full * self.full + sum(self.cost(has) for has in self.own.values())
        return self.pages - cached - own

    def idle(self) -> list[Entry]:
        return [
            (run.name, w)
            for run in self.runs.values()
            for w in run.has
            if (run.name, w) not in self.read
        ]

    def leaf(self, guard: bytes = b"") -> Run | None:
        """Return the run that is evicted next, never the guarded run."""
        parents = {run.parent for run in self.runs.values()}
        leaves = [
            run
            for name, run in self.runs.items()
            if name not in parents and name not in self.held and name != guard
        ]
        return min(leaves, key=lambda run: run.last, default=None)

    def make_room(self, pages: int) -> None:
        while (missing := pages - self.free()) > 0:
            before = self.free()
            wanted = min(max(missing // self.lanes, 1), _BATCH)
            rest = missing if missing < self.lanes else 0
            leaf = self.leaf()
            entry = self.next_idle(leaf.last if leaf else math.inf) if self.idle() else None
            is_broken = entry is not None and self.is_broken(entry)
            if is_broken or not self.evict_useless(wanted, rest):
                if entry is not None:
                    self.drop(entry)
                else:
                    self.evict_leaves(wanted, rest)
            self.evicted += self.free() - before

    def part_of(self, name: bytes, pages: int) -> Entry | None:
        """Return a window of a run with enough pages for the missing `pages`; the run stays."""
        run = self.runs[name]
        if pages == 0 or self.full + self.cost(run.has) <= pages:
            return None
        lanes = [(n, w) for w, (_, n) in enumerate(self.windows) if w in run.has and n >= pages]
        idle = [(n, w) for n, w in lanes if (name, w) not in self.read]
        return (name, min(idle)[1]) if idle else None

    def evict_leaves(self, n: int, rest: int) -> None:
        leaf = self.leaf(self.guard)
        if leaf is not None and (part := self.part_of(leaf.name, rest)):
            self.drop(part)
            return
        for _ in range(n):
            if (run := self.leaf(self.guard)) is None:
                break
            self.evict_run(run)

    def evict_run(self, run: Run) -> None:
        for w in run.has:
            for queue in self.queues:
                queue.pop((run.name, w), None)
        del self.runs[run.name]

    def is_useless(self, name: bytes) -> bool:
        """Return true if no hit can end with a run, and no run follows it."""
        if name not in self.runs or name in self.held:
            return False
        if any(run.parent == name for run in self.runs.values()):
            return False
        path = [name]
        while parent := self.runs[path[0]].parent:
            path.insert(0, parent)
        return self.shorten(path, len(path)) < len(path)

    def is_guarded(self, name: bytes) -> bool:
        """Return true if the copy source is an ancestor of a run, with no branch between them."""
        while name != self.guard and name:
            name = self.runs[name].parent
            if sum(run.parent == name for run in self.runs.values()) > 1:
                return False
        return bool(name)

    def evict_useless(self, n: int, rest: int) -> bool:
        """Evict up to `n` runs from the end of a condemned path, or one window of a run."""
        while self.condemned:
            name = self.condemned[0]
            if self.is_guarded(name) or not self.is_useless(name):
                self.condemned.pop(0)
                continue
            if part := self.part_of(name, rest):
                self.drop(part)
                return True
            for _ in range(n):
                parent = self.runs[name].parent
                self.evict_run(self.runs[name])
                name = parent
                if not self.is_useless(name):
                    self.condemned.pop(0)
                    return True
            self.condemned[0] = name
            return True
        return False

    def is_broken(self, entry: Entry) -> bool:
        at, departure = self.broken
        return entry in self.queues[at] and self.queues[at][entry][1] == departure

    def next_idle(self, others: float) -> Entry | None:
        passed, kept, spare = (next(iter(queue), None) for queue in self.queues)
        for first in (kept, spare):
            if first is not None and self.is_broken(first):
                return first
        if passed is not None or spare is not None:
            return passed or spare
        return kept if kept is not None and self.queues[1][kept][0] <= others else None

    def drop(self, entry: Entry) -> None:
        (at,) = (i for i, queue in enumerate(self.queues) if entry in queue)
        _, departure = self.queues[at].pop(entry)
        if entry in self.read:
            return
        self.runs[entry[0]].has.remove(entry[1])
        if at > 0 and self.broken != (at, departure):
            self.broken = at, departure
            end = self.ends[at, departure]
            while end and end not in self.runs:  # its last runs may be evicted already
                end = end[: -self.size * self.width]
            if end not in self.condemned and self.is_useless(end):
                self.condemned.append(end)

    def leave(self, entry: Entry, *, kept: bytes | None, spare: bool = False) -> None:
        """Mark a cached page as read by no request; `kept` is the prefix that it is kept for."""
        self.read.discard(entry)
        for queue in self.queues:
            queue.pop(entry, None)
        at = 0 if kept is None else 1 + spare
        if kept is not None:
            self.ends.setdefault((at, self.departure), kept)
        self.queues[at][entry] = (self.now, self.departure)

    # -- a request -----------------------------------------------------------------------

    def serve(self, tokens: bytes, count: int) -> int:
        """Return the hit of a prompt of `count` tokens; 0 also if the prompt is refused."""
        width = self.width = len(tokens) // count
        names = [tokens[: end * width] for end in range(self.size, count + 1, self.size)]
        most = self.full * -(-count // self.size)
        most += sum(n * g.max_pages(count, self.size, self.chunk) for g, n in self.windows)
        if most > self.pages:
            return 0
        hit, source = self.find(tokens, count, names, width)
        active = self.first_chunk(count, hit)
        if source is not None and not self.fits(names, count, hit, active, source):
            hit, source = self.shorten(names, hit // self.size) * self.size, None
            active = self.first_chunk(count, hit)
        first = self.take(names, count, hit, active, source)
        while True:
            self.commit(names, active)
            self.advance(names, count, active, first)
            if active == count:
                break
            start, active = active, min(count, active + self.chunk)
            self.reserve(names, start, active, first)
        self.release(names, count, first)
        return hit

    def first_chunk(self, count: int, hit: int) -> int:
        """Return the end of the first chunk: as without a hit, unless the hit is longer."""
        return min(count, self.chunk if hit < min(count, self.chunk) else hit + self.chunk)

    def find(
        self, tokens: bytes, count: int, names: list[bytes], width: int
    ) -> tuple[int, bytes | None]:
        depth = 0
        while depth < (count - 1) // self.size and names[depth] in self.runs:
            depth += 1
        whole = self.shorten(names, depth)
        for d in range(depth, whole - 1, -1):
            parts = self.parts(tokens[: (count - 1) * width], d, names, width)
            if part := max(parts, key=lambda part: part[0], default=None):
                return part
        return whole * self.size, None

    def parts(
        self, tokens: bytes, depth: int, names: list[bytes], width: int
    ) -> list[tuple[int, bytes]]:
        """Return the hits that end inside a page after `depth` pages, and their copy sources."""
        begin = depth * self.size
        found = []
        for source, run in self.runs.items():
            if run.parent != (names[depth - 1] if depth else b""):
                continue
            most = min(len(tokens) // width, begin + self.size - 1)
            same = (tokens[: n * width] == source[: n * width] for n in range(begin + 1, most + 1))
            n = begin + sum(itertools.takewhile(bool, same))
            chunks = [g.chunk for g, _ in self.windows if isinstance(g, ChunkedLocal)]
            ends = {n, *(n // chunk * chunk for chunk in chunks)}
            for end in ends:
                legal = all(
                    self.has_part(names, depth, source, w, end) for w in range(len(self.windows))
                )
                if begin < end and legal:
                    found.append((end, source))
        return found

    def has_part(self, names: list[bytes], depth: int, source: bytes, w: int, n: int) -> bool:
        group = self.windows[w][0]
        read = [*names[group.skipped_tokens(n) // self.size : depth], source]
        return kept_tokens(group) == 1 or all(w in self.runs[name].has for name in read)

    def shorten(self, names: list[bytes], depth: int) -> int:
        """Return the depth at which full groups and windows agree."""
        before = -1
        while before != depth:
            before = depth
            for w, (group, _) in enumerate(self.windows):
                present = [w in self.runs[name].has for name in names[:depth]]
                depth = group.longest_hit(present, self.size)[0]
        return depth

    def first_of(self, n: int) -> list[int]:
        return [group.skipped_tokens(n) // self.size for group, _ in self.windows]

    def needed(self, count: int, hit: int, active: int) -> int:
        """Count the pages that a request takes in addition to its hit."""
        depth, ends = hit // self.size, -(-active // self.size)
        pages = (-(-count // self.size) - depth) * self.full
        firsts = self.first_of(hit)
        for first, (_, lanes) in zip(firsts, self.windows, strict=True):
            pages += max(0, ends - max(depth, first)) * lanes
        return pages

    def fits(self, names: list[bytes], count: int, hit: int, active: int, source: bytes) -> bool:
        depth = hit // self.size
        available = self.free() + (len(self.runs) - depth - 1) * self.full
        available += sum(self.windows[w][1] for _, w in self.idle())
        for w, first in enumerate(self.first_of(hit)):
            for name in [*names[first:depth], source]:
                available -= self.windows[w][1] * (w in self.runs[name].has)
        return self.needed(count, hit, active) <= available

    def take(
        self, names: list[bytes], count: int, hit: int, active: int, source: bytes | None
    ) -> list[int]:
        depth = hit // self.size
        first = self.first_of(hit)
        self.held = set(names[:depth])
        self.read = {(name, w) for w, at in enumerate(first) for name in names[at:depth]}
        if source is not None:
            self.guard = source
            self.read |= {(source, w) for w in self.runs[source].has}
        self.make_room(self.needed(count, hit, active))
        self.own_full = -(-count // self.size) - depth
        self.fill(names, depth, active, first)
        if source is not None:
            self.departure += 1
            for w in self.runs[source].has:
                self.read.discard((source, w))
                if not any((source, w) in queue for queue in self.queues):
                    self.leave((source, w), kept=source)
            self.guard = b""
        return first

    def fill(self, names: list[bytes], begin: int, active: int, first: list[int]) -> None:
        rest = b"the page that is not whole"
        for column in range(begin, -(-active // self.size)):
            name = names[column] if column < len(names) else rest
            mine = {w for w, at in enumerate(first) if column >= at}
            if name not in self.held:
                self.own.setdefault(name, set()).update(mine)

    def reserve(self, names: list[bytes], start: int, active: int, first: list[int]) -> None:
        ends, begin = -(-active // self.size), -(-start // self.size)
        missing = zip(first, self.windows, strict=True)
        self.make_room(sum(max(0, ends - max(begin, at)) * n for at, (_, n) in missing))
        self.fill(names, begin, active, first)

    def commit(self, names: list[bytes], active: int) -> None:
        for column, name in enumerate(names[: active // self.size]):
            if name in self.held:
                continue
            mine = self.own.pop(name)
            self.own_full -= 1
            self.held.add(name)
            if name not in self.runs:
                parent = names[column - 1] if column else b""
                self.runs[name] = Run(name, parent, mine)
            for w in mine - self.runs[name].has:
                self.runs[name].has.add(w)
                self.filled[w] += self.windows[w][1]
            self.read |= {(name, w) for w in mine}

    def reach(self, w: int) -> int:
        span = kept_tokens(self.windows[w][0]) or 0
        return -(-(span - 1) // self.size) + 1

    def branch(self, names: list[bytes], column: int, w: int) -> int:
        """Return the end of the next branch, at most `reach(w)` pages after a column, or 0."""
        for end, name in enumerate(names[column : column + self.reach(w)], column + 1):
            if name in self.held and sum(run.parent == name for run in self.runs.values()) > 1:
                return end
        return 0

    def kept_for(
        self, names: list[bytes], bounds: tuple[int, int], column: int, w: int
    ) -> tuple[bytes | None, bool]:
        """Return the prefix of another branch or a next turn that may read a passed page again.

        The second value is true for the spare page, the one before the window.
        """
        count, active = bounds
        if branch := self.branch(names, column, w):
            return names[branch - 1], branch - column == self.reach(w)
        end = min(count, active) // self.size
        spare = min((count - 1) // self.size, end) - self.reach(w)
        return (names[end - 1] if spare <= column < end else None), column == spare

    def advance(self, names: list[bytes], count: int, n: int, first: list[int]) -> None:
        self.departure += 1
        for w, end in enumerate(self.first_of(n)):
            for column in range(first[w], max(first[w], end)):
                kept, spare = self.kept_for(names, (count, n), column, w)
                self.given_back[w] += self.windows[w][1] * (w in self.runs[names[column]].has)
                self.leave((names[column], w), kept=kept, spare=spare)
            first[w] = max(first[w], end)

    def release(self, names: list[bytes], count: int, first: list[int]) -> None:
        self.departure += 1
        for w, at in enumerate(first):
            entry = (names[at - 1], w) if at else (b"", w)
            if entry in self.queues[0]:
                self.leave(entry, kept=names[max(1, len(names) - 1) - 1], spare=True)
        self.departure += 1
        for w, at in enumerate(first):
            for column, name in enumerate(names[at:], at):
                kept, spare = self.kept_for(names, (count, count), column, w)
                self.leave((name, w), kept=kept or names[-1], spare=spare)
        for name in self.held:
            self.runs[name].last = self.now
        self.own, self.own_full, self.held, self.read = {}, 0, set(), set()
        self.now += 1
