# SPDX-License-Identifier: Apache-2.0
"""What the reference keeps of a page, of a request, and of those that let go in a call."""

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
    uses: int = 0  # while it is cached


@dataclasses.dataclass(eq=False)
class Claim:
    replica: int
    pages: list[Page] = dataclasses.field(default_factory=list)
    path: list[Key] = dataclasses.field(default_factory=list)  # committed or taken from the cache
    frozen: int = 0  # of its pages, those that the cache or a fork may read
    written: int = 0  # tokens, as of the last step
    hit: int = 0
    counted: int = 0  # positions below are in the metrics
    prompt: int = -1  # tokens of the prompt, -1 before the claim has pages
    known: int = 0  # positions below were counted in an earlier claim
    past: tuple[int, int] | None = None  # of the context, when the claim was first used
    ctx: Context | None = None  # that it was used with last
    started: bool = False  # fetched or written: its pages must not change any more
    has_declined: bool = False  # a partial hit: it has none until a longer prefix is cached
    host: list[Key] | None = None  # of its path, what it knows to be in the host tier
    is_due: bool = False  # what it has may have to be stored, though it has no new page


@dataclasses.dataclass
class Admission:
    """What reserving one request would change."""

    ctx: Context
    start: int  # where the request would stand, and the end of its chunk
    active: int
    needed: int
    path: list[Key]
    partial: int
    sources: list[Key]  # equally good pages to copy `partial` tokens from
    total: int  # tokens of the hit
    below: int = 0  # pages of the hit in the host tier, where it goes on there
    new: int = 0
    given_back: int = 0
    has_hit: bool = False
    declines: bool = False  # the page to copy from had to be evicted


class Leavers:
    """Who lets go of each page, and what the copies that they leave behind read of it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, int, int]] = {}

    def add(self, page: Any, reach: int) -> None:
        """One more, whose copy reads the first `reach` tokens; 0 for a copy that is made first."""
        _, count, before = self._found.get(id(page), (page, 0, 0))
        self._found[id(page)] = page, count + 1, max(before, reach)

    def count(self, page: Any) -> int:
        """How many let go of it."""
        return self._found.get(id(page), (page, 0, 0))[1]

    def reach(self, page: Any) -> int:
        """Tokens of the longest copy."""
        return self._found.get(id(page), (page, 0, 0))[2]

    def __bool__(self) -> bool:
        return bool(self._found)

    def clear(self) -> None:
        """The call is over."""
        self._found.clear()
