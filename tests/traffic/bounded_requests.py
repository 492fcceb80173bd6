# SPDX-License-Identifier: Apache-2.0
"""A cached prompt, a request for it, and the state that a refused call must not change."""

from __future__ import annotations

from typing import Any

from kvcore import PagedKVCacheManager, TextGenerationContext

PROMPT = list(range(20))


def serve(manager: PagedKVCacheManager, tokens: list[int], chunk: int = 1 << 20) -> None:
    """Run a prompt and leave it cached."""
    context = TextGenerationContext("served", tokens, active_idx=min(chunk, len(tokens)))
    manager.claim("served", 0)
    while context.start_idx < len(tokens):
        assert manager.reserve(context)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
        context.active_idx = min(context.start_idx + chunk, context.end_idx)
    manager.release("served")


def claimed(
    manager: PagedKVCacheManager, name: str = "a", tokens: list[int] = PROMPT, **rest: Any
) -> TextGenerationContext:
    manager.claim(name, 0)
    return TextGenerationContext(name, tokens, **rest)


def state_of(manager: PagedKVCacheManager) -> tuple[Any, ...]:
    cached = manager.match_prefix(PROMPT, return_pages=True)
    return manager.num_free_blocks, manager.metrics, cached[0], cached[1].tolist()
