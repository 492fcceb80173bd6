# SPDX-License-Identifier: Apache-2.0
"""The reference's records of pages and requests, and of the releases in a call."""

from __future__ import annotations

import dataclasses
from typing import Any

from foreign_context import Context

Namespace = tuple[str | None, str | None]
Key = tuple[Namespace, tuple[int, ...]]


@dataclasses.dataclass(eq=False)
class Page:
    """A page's identity; `stamp` is the time of its last release while it is cached."""

    cached: bool = False
    stamp: int = 0
    uses: int = 0  # while the page is cached


@dataclasses.dataclass(frozen=True)
class Ended:
    """A claim that has ended: what a later claim of the same id needs to go on with its request."""

    request_id: Any
    prompt: tuple[int, ...]  # the tokens at the first use of the claim
    past: tuple[int, int]  # tokens of the prompt, and counted tokens
    written: int

    def goes_on(self, ctx: Context) -> bool:
        """Return true if a claim with this context has the same request."""
        n, tokens = len(self.prompt), ctx.ids
        if ctx.request_id != self.request_id or not 0 < n < len(tokens) <= self.written + 1:
            return False
        return all(
            (*tokens[:n][part],) == self.prompt[part] for part in (slice(0, 2), slice(-4, None))
        )


@dataclasses.dataclass(eq=False)
class Claim:
    replica: int
    pages: list[Page] = dataclasses.field(default_factory=list)
    path: list[Key] = dataclasses.field(default_factory=list)  # committed keys and cached keys
    frozen: int = 0  # number of its pages that the cache or a fork may read
    written: int = 0  # tokens, as of the last step
    hit: int = 0
    counted: int = 0  # positions before it are in the metrics
    prompt: int = -1  # tokens of the prompt, -1 before the claim has pages
    known: int = 0  # positions before it were counted in an earlier claim
    past: tuple[int, int] | None = None  # of the request, at the first use of the claim
    first: tuple[int, ...] = ()  # the prompt of the request, at the first use of the claim
    ran: int = 0  # tokens that ran in earlier claims
    ctx: Context | None = None  # the context of the last use
    started: bool = False  # fetched or written: its pages must not change any more
    has_declined: bool = False  # a partial hit; the next hit must have a longer prefix
    host: list[Key] | None = None  # the part of its path that is in the host tier
    is_due: bool = False  # its pages may have to be stored, although no page is new


@dataclasses.dataclass
class Admission:
    """The changes that the reservation of one request would make."""

    ctx: Context
    start: int  # start of the request, and the end of its chunk
    active: int
    needed: int
    path: list[Key]
    partial: int
    sources: list[Key]  # equally good pages to copy `partial` tokens from
    total: int  # tokens of the hit
    below: int = 0  # pages of the hit in the host tier, if it is longer than the cached hit
    new: int = 0
    given_back: int = 0
    has_hit: bool = False
    declines: bool = False  # the page to copy from had to be evicted


class Leavers:
    """The number of releases of each page, and the tokens that the releasing forks copy from it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, int, int]] = {}

    def add(self, page: Any, reach: int) -> None:
        """Add a release whose copy reads the first `reach` tokens; 0 if the copy comes first."""
        _, count, before = self._found.get(id(page), (page, 0, 0))
        self._found[id(page)] = page, count + 1, max(before, reach)

    def count(self, page: Any) -> int:
        """Return the number of releases of a page."""
        return self._found.get(id(page), (page, 0, 0))[1]

    def reach(self, page: Any) -> int:
        """Return the tokens of the longest copy of a page."""
        return self._found.get(id(page), (page, 0, 0))[2]

    def __bool__(self) -> bool:
        return bool(self._found)

    def clear(self) -> None:
        """Clear the records at the end of a call."""
        self._found.clear()
