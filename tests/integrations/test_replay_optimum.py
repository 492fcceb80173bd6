# SPDX-License-Identifier: Apache-2.0
"""Belady's optimum against all orders of evictions, and against the manager's policies."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvcore.apps.replay import uses as uses_module
from kvcore.apps.replay.belady import optimum
from kvcore.apps.replay.uses import PageUsesError, page_uses
from kvcore.apps.replay.workload import Workload
from kvcore.replay import (
    POLICIES,
    ChatSettings,
    PoolSettings,
    chat_workload,
    read_trace,
    replay_admission,
)
from trace_files import BLOCK, random_rows, row, write_trace

Name = tuple[int, ...]


def most_hits(prompts: list[tuple[Name, bool]], pages: int) -> int:
    """Return the most whole pages that any choice of evictions finds, by trying all of them.

    A prompt is its blocks, and a flag for a partial last block. Any set of cached pages with their
    parents that leaves room for the prompt may stay.
    """

    @cache
    def rest(at: int, cached: frozenset[Name]) -> int:
        if at == len(prompts):
            return 0
        blocks, is_partial = prompts[at]
        if len(blocks) > pages:
            return rest(at + 1, cached)
        path = [blocks[: n + 1] for n in range(len(blocks))]
        hits = next((n for n, name in enumerate(path[:-1]) if name not in cached), len(path) - 1)
        own = frozenset(path[:-1] if is_partial else path)
        others = sorted(cached - own)
        best = 0
        # A choice that keeps fewer pages than fit never finds more.
        for stay in combinations(others, min(pages - len(path), len(others))):
            after = own | frozenset(stay)
            if all(name[:-1] in after for name in stay if len(name) > 1):
                best = max(best, rest(at + 1, after))
        return hits + best

    return rest(0, frozenset())


def drawn(seed: int, *, partial: bool) -> list[tuple[Name, bool]]:
    rng = random.Random(seed)
    prompts = []
    for _ in range(rng.randint(5, 8)):
        steps = tuple(rng.randrange(2) for _ in range(rng.randint(1, 3)))
        prompts.append((steps, partial or rng.random() < 0.5))
    return prompts


def workload_of(folder: Path, prompts: list[tuple[Name, bool]]) -> Workload:
    """Write the prompts as a trace; a partial last block belongs to one prompt only."""
    ids: dict[Name, int] = {}
    rows: list[dict[str, Any]] = []
    for blocks, is_partial in prompts:
        path = [blocks[: n + 1] for n in range(len(blocks))]
        if is_partial:
            path[-1] = (*path[-1], -len(rows) - 1)
        length = len(path) * BLOCK - (200 if is_partial else 0)
        rows.append(row([ids.setdefault(name, len(ids)) for name in path], length=length))
    return read_trace(write_trace(folder, *rows))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_finds_more_pages_and_something_finds_as_many(tmp_path: Path, seed: int) -> None:
    prompts = drawn(seed, partial=True)
    uses = page_uses(workload_of(tmp_path, prompts), BLOCK)
    for pages in range(2, 7):
        assert optimum(uses, pages).cached_pages == most_hits(prompts, pages)


@pytest.mark.parametrize("seed", range(40))
def test_prompts_that_fill_their_pages_are_bounded(tmp_path: Path, seed: int) -> None:
    prompts = drawn(seed, partial=False)
    uses = page_uses(workload_of(tmp_path, prompts), BLOCK)
    for pages in range(2, 7):
        assert optimum(uses, pages).cached_pages >= most_hits(prompts, pages)


@pytest.mark.parametrize("page_size", [16, 48, 128, 500, 512, 700])
@pytest.mark.parametrize("seed", range(3))
def test_no_run_of_the_manager_exceeds_it(tmp_path: Path, page_size: int, seed: int) -> None:
    workload = read_trace(
        write_trace(tmp_path, *random_rows(seed, requests=150, depth=6, fan_out=2))
    )
    assert_limit(workload, page_size, [1, 6, 9, 17, 40, 10_000])


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_no_run_of_chats_exceeds_it(page_size: int) -> None:
    settings = ChatSettings(
        conversations=60, system_prompts=3, system_tokens=(5, 90), median_message=20
    )
    assert_limit(chat_workload(seed=page_size, settings=settings), page_size, [200, 300, 1_000])


def assert_limit(workload: Workload, page_size: int, capacities: list[int]) -> None:
    """Compare with the manager; its unbounded cache must equal the optimum."""
    uses = page_uses(workload, page_size)
    for pages in capacities:
        best = optimum(uses, pages)
        for policy in POLICIES:
            pool = PoolSettings(page_size=page_size, pages=pages, policy=policy)
            report = replay_admission(workload, pool)
            assert (best.requests, best.refused) == (report.requests, report.refused)
            assert best.prompt_pages == report.prompt_pages
            assert best.cached_pages >= report.cached_pages
            assert best.cached_tokens >= report.cached_tokens
            assert best.token_hit_rate >= report.token_hit_rate
            assert best.served_token_hit_rate >= report.served_token_hit_rate
    unbounded = replay_admission(workload, PoolSettings(page_size=page_size, pages=10**6))
    best = optimum(uses, 10**6)
    assert best.cached_tokens == unbounded.cached_tokens
    assert best.cached_pages == unbounded.cached_pages
    assert best.evicted_pages == 0


def test_replicas_together_find_no_more() -> None:
    settings = ChatSettings(conversations=40, system_prompts=3, system_tokens=(50, 90))
    workload = chat_workload(seed=5, settings=settings)
    uses = page_uses(workload, 16)
    for pages in (150, 400):
        pool = PoolSettings(page_size=16, pages=pages, replicas=3)
        best = optimum(uses, pages, replicas=3)
        report = replay_admission(workload, pool)
        assert best.refused == report.refused
        assert best.cached_tokens >= report.cached_tokens


def test_more_pages_never_find_less() -> None:
    uses = page_uses(chat_workload(seed=1, limit=400), 16)
    rates = [optimum(uses, pages).cached_pages for pages in range(700, 9_000, 300)]
    assert rates == sorted(rates)


def test_prompts_shorter_than_a_page_have_no_pages(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, row([0], length=5), row([0], length=9)))
    best = optimum(page_uses(workload, BLOCK), 10)
    assert (best.cached_pages, best.cached_tokens, best.prompt_pages) == (0, 0, 2)


def test_the_number_of_uses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses_module, "MOST_PAGE_USES", 100)
    with pytest.raises(PageUsesError, match="expected larger pages or a limit"):
        page_uses(chat_workload(seed=0, limit=50), 16)


def test_progress_of_listing_uses_is_told() -> None:
    told: list[int] = []
    page_uses(chat_workload(seed=0, limit=200), 16, on_progress=told.append)
    assert told == [0, 64, 128, 192]
