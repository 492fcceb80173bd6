# SPDX-License-Identifier: Apache-2.0
"""Count the whole-page hits of prompts of block ids with a dict, if no page is ever evicted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

__all__ = ["count_hits"]


def count_hits(prompts: Iterable[tuple[int, Sequence[Hashable]]], block: int) -> int:
    """Return the number of hit blocks of prompts that are served one after another.

    Parameters
    ----------
    prompts : iterable of (int, sequence)
        Tokens of each prompt, and the ids of its blocks. A block is cached after the prompt with
        its last token. A hit block follows only hit blocks, and is before the last token.
    block : int
        Tokens per block.
    """
    nodes: dict[tuple[int, Hashable], int] = {}
    hits = 0
    for tokens, ids in prompts:
        node, is_hit = 0, True
        for level, each in enumerate(ids[: tokens // block]):
            known = nodes.get((node, each))
            is_hit = is_hit and known is not None and (level + 1) * block < tokens
            hits += is_hit
            node = nodes.setdefault((node, each), len(nodes) + 1)
    return hits
