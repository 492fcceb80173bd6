# SPDX-License-Identifier: Apache-2.0
"""Hits of a cache that never evicts, in plain Python: with windows only, and with states."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["hits_of_checkpoints", "hits_of_prefixes"]

Prompt = Sequence[int]


def hits_of_prefixes(prompts: Sequence[Prompt], page: int) -> list[int]:
    """Return the hit of each prompt if every token of the cached pages can be copied.

    Only whole pages are cached, and the last token of a prompt always runs. With windows the hits
    are the same, because a cache without evictions has every page of every window.
    """
    found = []
    cached: list[Prompt] = []
    for prompt in prompts:
        found.append(max((_shared(prompt[:-1], each) for each in cached), default=0))
        cached.append(prompt[: len(prompt) // page * page])
    return found


def hits_of_checkpoints(
    prompts: Sequence[Prompt], page: int, every: int | None = None
) -> list[int]:
    """Return the hit of each prompt if layers keep a state.

    A hit ends at a checkpoint. A prompt leaves a checkpoint at its last page end before its last
    token, at the end of the pages that were cached before, and every `every` tokens.
    """
    pages: set[tuple[int, ...]] = set()
    checkpoints: set[tuple[int, ...]] = set()
    found = []
    for prompt in map(tuple, prompts):
        ends = range(page, len(prompt), page)  # page ends before the last token runs
        hit = max((end for end in ends if prompt[:end] in checkpoints), default=0)
        cached = max((end for end in ends if prompt[:end] in pages), default=0)
        found.append(hit)
        due = {max(ends, default=0), cached}
        if every is not None:
            due |= set(range(every, len(prompt) + 1, every))
        checkpoints |= {prompt[:end] for end in due if end > hit}
        pages |= {prompt[:end] for end in range(page, len(prompt) + 1, page)}
    return found


def _shared(first: Prompt, second: Prompt) -> int:
    """Return the number of leading tokens that are equal."""
    for at, (a, b) in enumerate(zip(first, second)):  # noqa: B905 - up to the shorter prompt
        if a != b:
            return at
    return min(len(first), len(second))
