# SPDX-License-Identifier: Apache-2.0
"""Layers of groups read the K and V of their own tokens, also from cached copies."""

from __future__ import annotations

from typing import Any

from digest_model import DigestModel
from grouped_traffic import manager_of, params_of
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention


def serve(manager: PagedKVCacheManager, name: str, tokens: list[int], more: int = 0) -> int:
    """Run a prompt and some more tokens; return its hit."""
    model = DigestModel(manager)
    manager.claim(name)
    context = TextGenerationContext(name, tokens)
    hit = -1
    while context.end_idx <= len(tokens) + more:
        (inputs,) = manager.fetch([context])
        hit = context.start_idx if hit < 0 else hit
        model.run(inputs, [context])
        context.update(50)
        manager.step([context])
    return hit


def evict_chunks(manager: PagedKVCacheManager) -> None:
    """Reserve more and more pages until all unread pages are evicted."""
    for n in range(1, 40):
        manager.claim(n)
        manager.reserve(TextGenerationContext(n, list(range(300, 300 + 4 * n))))
        manager.release(n)
        if manager.group_metrics[1].holes >= 4:
            return


def poison(manager: PagedKVCacheManager, keep: list[int]) -> None:
    manager.claim("p")
    (inputs,) = manager.fetch([TextGenerationContext("p", [7])])
    pool: Any = inputs.blocks
    pool[[page for page in range(manager.total_num_pages) if page not in keep]] = -5
    manager.release("p")


def test_what_is_copied_behind_a_chunk_serves_shorter_hits() -> None:
    """A chunk of 6 ends inside a page of 4: a hit of 6 tokens reads no page, a hit of 5 does."""
    manager = manager_of(params_of(FullAttention([0]), ChunkedLocal([1], 6), page_size=4), 16)
    prompt = list(range(12))
    serve(manager, "a", prompt, more=8)
    full = manager.get_req_blocks("a", 0)
    evict_chunks(manager)  # also evicts the second page, with tokens 4 and 5
    manager.release("a")
    poison(manager, full)
    assert serve(manager, "b", [*prompt[:6], 70, 71, 72]) == 0
    manager.release("b")
    serve(manager, "c", [*prompt[:4], 80, 81])  # fills the chunk's first page again
    manager.release("c")
    assert serve(manager, "d", [*prompt[:5], 90, 91]) == 5
