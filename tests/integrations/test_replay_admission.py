# SPDX-License-Identifier: Apache-2.0
"""Admission mode against an independent LRU simulator."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvcore.apps.replay.workload import Workload
from kvcore.replay import ChatSettings, PoolSettings, chat_workload, read_trace, replay_admission
from trace_files import BLOCK, random_rows, row, write_trace


def simulate_lru(workload: Workload, page_size: int, pages: int) -> tuple[int, int, int]:
    """Return whole pages hit, pages evicted and requests refused, by definition and slowly.

    The name of a cached page is all tokens up to its end; its age is the time of the last release.
    The source page of a partial hit stays, unless its room is needed. Different blocks share no
    token, so with pages that divide a block there is at most one source page.
    """
    cached: dict[bytes, int] = {}
    hits = evicted = refused = 0
    for now in range(len(workload)):
        tokens = workload.prompt(now)
        needed = -(-len(tokens) // page_size)
        if needed > pages:
            refused += 1
            continue
        names = [tokens[: n * page_size].tobytes() for n in range(1, len(tokens) // page_size + 1)]
        hit = 0
        while hit < (len(tokens) - 1) // page_size and names[hit] in cached:
            hit += 1
        copied = tokens[: min(hit * page_size + page_size, len(tokens) - 1)].tobytes()
        sources = [
            name
            for name in cached
            if len(name) == (hit + 1) * page_size * 4
            and len(copied) > hit * page_size * 4
            and name.startswith(copied)
        ]
        room = pages - (needed - hit)
        kept = set(names[:hit]) | (set(sources) if hit + len(sources) <= room else set())
        while len(cached) > room:
            parents = {name[: -page_size * 4] for name in cached}
            leaves = [name for name in cached if name not in parents | kept]
            cached.pop(min(leaves, key=cached.__getitem__))
            evicted += 1
        hits += hit
        cached |= dict.fromkeys(names, now)
    return hits, evicted, refused


@pytest.mark.parametrize("page_size", [128, 256, 512])
@pytest.mark.parametrize("pages", [4, 9, 17, 40, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_replay_equals_the_simulator(tmp_path: Path, page_size: int, pages: int, seed: int) -> None:
    rows = random_rows(seed, requests=120, depth=6, fan_out=2)
    workload = read_trace(write_trace(tmp_path, *rows))
    report = replay_admission(workload, PoolSettings(page_size=page_size, pages=pages))
    hits, evicted, refused = simulate_lru(workload, page_size, pages)
    assert (report.cached_pages, report.evicted_pages, report.refused) == (hits, evicted, refused)
    assert report.requests == 120 - refused
    assert report.leaked_pages == 0
    assert report.peak_used_pages <= pages


def test_counts_of_a_hand_made_trace(tmp_path: Path) -> None:
    rows = [row([0, 1]), row([0, 1], length=1000), row([0, 2]), row([3, 4, 5]), row([0, 1])]
    workload = read_trace(write_trace(tmp_path, *rows))
    report = replay_admission(workload, PoolSettings(page_size=BLOCK, pages=2))
    # Hits: block 0 of the second and third prompt; the fourth is larger than the pool; then the
    # page of block 2 is the oldest leaf, so block 0 is hit again.
    assert (report.requests, report.refused) == (4, 1)
    assert report.cached_pages == 3
    assert report.prompt_pages == 2 + 2 + 2 + 3 + 2
    assert report.prompt_tokens == 4 * 1024 + 1000 + 512
    assert report.page_hit_rate == 3 / 11
    assert report.output_tokens == 0
    assert report.steps == 5


def test_last_token_is_left_to_run_and_partial_pages_count_as_tokens_only(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, row([0, 1]), row([0, 1])))
    report = replay_admission(workload, PoolSettings(page_size=BLOCK, pages=10))
    assert report.cached_pages == 1
    assert report.cached_tokens == 2 * BLOCK - 1
    assert report.token_hit_rate == (2 * BLOCK - 1) / (4 * BLOCK)


def test_several_replicas_hit_what_one_hits() -> None:
    settings = ChatSettings(conversations=40, system_prompts=3, system_tokens=(50, 90))
    workload = chat_workload(seed=5, settings=settings)
    one = replay_admission(workload, PoolSettings(page_size=8, pages=100_000))
    three = replay_admission(workload, PoolSettings(page_size=8, pages=100_000, replicas=3))
    assert three.cached_pages == one.cached_pages > 0
    assert three.total_pages == 3 * one.total_pages
    assert three.leaked_pages == 0


def test_default_pool_holds_the_same_tokens_at_any_page_size() -> None:
    assert PoolSettings(page_size=16).pages_per_replica == 32_768
    assert PoolSettings(page_size=1000, replicas=2).total_pages == 2 * 525


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    workload = read_trace(write_trace(tmp_path, *[row([0])] * 200))
    replay_admission(workload, PoolSettings(), on_progress=told.append)
    assert told == sorted(told)
    assert len(told) > 2


@pytest.mark.parametrize("pages", [17, 40, 1000])
def test_explained_misses_add_up(tmp_path: Path, pages: int) -> None:
    rows = random_rows(0, requests=120, depth=6, fan_out=2)
    workload = read_trace(write_trace(tmp_path, *rows))
    pool = PoolSettings(page_size=128, pages=pages)
    plain, told = (replay_admission(workload, each) for each in (pool, replace(pool, explain=True)))
    misses = told.misses
    assert plain.misses is None
    assert misses is not None
    assert told.to_dict()["misses"] == asdict(misses)
    assert misses.cached_tokens == told.cached_tokens == plain.cached_tokens
    assert misses.prompt_tokens == told.served_prompt_tokens
    assert sum(misses.by_reason.values()) == misses.uncached_tokens
    assert (misses.evicted > 0) == (told.evicted_pages > 0)
    assert misses.admissions == told.requests
    roomy = replay_admission(workload, replace(pool, pages=1000, explain=True)).misses
    assert roomy is not None
    assert roomy.evicted == 0
    if not told.refused:  # a small pool evicts, but has seen the same prompts
        assert misses.never_seen == roomy.never_seen


def test_a_small_pool_remembers_pages_that_left_long_ago() -> None:
    workload = chat_workload(limit=400)
    longest = -(-int(workload.prompt_lengths.max()) // 16)
    small, large = (
        replay_admission(workload, PoolSettings(pages=pages, explain=True))
        for pages in (longest, 100_000)
    )
    assert small.misses is not None
    assert large.misses is not None
    assert large.misses.evicted == small.refused == 0
    assert small.evicted_pages > 8 * longest
    # Only whole pages are remembered, so the equal start of an evicted page counts as never seen.
    more = small.misses.never_seen - large.misses.never_seen
    assert 0 <= more < 16 * small.requests
    assert small.misses.evicted > 16 * small.requests
