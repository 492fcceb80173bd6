# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with a host tier: the stored pages of each bundle, and the pages a hit loads."""

from __future__ import annotations

from typing import Any

import pytest

from grouped_traffic import SHAPES, Traffic, manager_of, params_of, with_host_tier
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow

FULL, WINDOW = FullAttention([0]), SlidingWindow([1, 2], 4)  # page 2: three bundles
PROMPT = list(range(100, 112))  # six columns


def make(host_pages: int = 100, num_pages: int = 24, **options: Any) -> PagedKVCacheManager:
    params = with_host_tier(params_of(FULL, WINDOW), host_pages)
    return manager_of(params, num_pages=num_pages, **options)


def serve(manager: PagedKVCacheManager, name: str, tokens: list[int], chunk: int = 64) -> int:
    """Run a prompt; return its hit."""
    context = TextGenerationContext(name, tokens)
    manager.claim(name)
    hit = -1
    while context.start_idx < len(tokens):
        context.active_idx = min(len(tokens), context.start_idx + chunk)
        manager.fetch([context])
        hit = context.start_idx if hit < 0 else hit
        context.update(7)
        manager.step([context])
    manager.release(name)
    return hit


def crowd_out(manager: PagedKVCacheManager, pages: int) -> None:
    """Reserve `pages` pages for prompts of six pages each, and leave the cache empty."""
    for name in range(pages // 6):
        manager.claim(name)
        assert manager.reserve(TextGenerationContext(name, [1000 + name] * 4))
    for name in range(pages // 6):
        manager.release(name)


def cached(manager: PagedKVCacheManager) -> list[int]:
    return [group.cached_pages for group in manager.group_metrics]


def hit_of(manager: PagedKVCacheManager, tokens: list[int]) -> int:
    manager.claim("asks")
    found = manager.plan(TextGenerationContext("asks", [*tokens, -1])).hit_tokens
    manager.release("asks")
    return found


def moved(manager: PagedKVCacheManager) -> tuple[int, int]:
    return manager.metrics.d2h_blocks_copied, manager.metrics.h2d_blocks_copied


def test_a_hit_brings_back_full_pages_and_the_windows_that_it_reads() -> None:
    manager = make()
    assert serve(manager, "a", PROMPT) == 0
    assert moved(manager) == (18, 0)  # all pages of each column
    crowd_out(manager, 24)
    assert cached(manager) == [0, 0]
    assert hit_of(manager, PROMPT) == 12
    assert serve(manager, "b", [*PROMPT, 1]) == 12
    assert moved(manager) == (18, 6 + 2 * 2)  # six full pages, two columns of the windows
    assert cached(manager) == [6, 4]
    assert manager.match_prefix(PROMPT) == 12


def test_windows_that_the_device_has_lost_come_back_under_its_full_pages() -> None:
    manager = make()
    serve(manager, "a", PROMPT)
    crowd_out(manager, 18)
    assert cached(manager) == [6, 0]
    assert manager.match_prefix(PROMPT) == 0
    manager.claim("b")
    context = TextGenerationContext("b", [*PROMPT, 1])
    assert manager.plan(context).new_pages == 4 + 3
    assert manager.reserve(context)
    assert context.start_idx == 12
    assert moved(manager) == (18, 4)
    assert cached(manager) == [6, 4]
    assert manager.match_prefix(PROMPT) == 12  # loaded pages are in the cache at once


def test_a_hit_ends_where_windows_are_in_neither_tier() -> None:
    manager = make(host_pages=13)
    serve(manager, "a", PROMPT)
    assert moved(manager)[0] == 12  # four columns; there was no room for more
    crowd_out(manager, 24)
    assert hit_of(manager, PROMPT) == 8
    serve(manager, "b", [200 + t for t in range(6)])  # the tier evicts passed window pages for it
    assert manager.metrics.d2h_blocks_copied == 12 + 9
    crowd_out(manager, 24)
    assert hit_of(manager, PROMPT[:4]) < 4


def test_a_later_store_completes_a_record() -> None:
    manager = make(host_pages=13)
    serve(manager, "a", PROMPT[:8])
    serve(manager, "b", [200 + t for t in range(6)])
    crowd_out(manager, 24)
    stored = moved(manager)[0]
    hit = hit_of(manager, PROMPT[:6])
    assert hit < 6
    serve(manager, "c", PROMPT[:6])  # its record had full pages, but no window pages
    assert moved(manager)[0] > stored
    crowd_out(manager, 24)
    assert hit_of(manager, PROMPT[:6]) == 6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_layers_read_what_was_written_through_the_tier(shape: str, seed: int) -> None:
    params = with_host_tier(SHAPES[shape], [80, 120, 400][seed])
    traffic = Traffic(params, seed, num_pages=40)
    verbs = ["claim", "step", "step", "step", "fork", "release", "crowd_out"]
    traffic.act(verbs, 150)
    assert traffic.read > 500
    assert traffic.manager.metrics.h2d_blocks_copied > 0
    traffic.end()
    traffic.manager.reset_prefix_cache()
    assert traffic.manager.host_committed_block_pct == 0
