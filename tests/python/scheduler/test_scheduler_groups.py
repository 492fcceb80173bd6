# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler over managers whose layers have windows: reservations and their times."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import numpy as np
import pytest

from builders import in_groups
from conftest import slow_but
from kvcore import CapacityError, KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, bundles
from kvcore.scheduler import Request, Scheduler
from kvcore.sizing import longest_sequence, pages_per_sequence

FULL = FullAttention([0])
WINDOW = SlidingWindow([1, 2], 9)


def make_params(*groups: Any, page_size: int = 4) -> KVCacheParams:
    return KVCacheParams(
        "float32", 4, 4, 3, page_size=page_size, enable_prefix_caching=True, groups=groups
    )


def make_manager(params: KVCacheParams, num_pages: int, **options: Any) -> PagedKVCacheManager:
    options = {"max_batch_size": 6, "max_seq_len": 4096, "blocks": None} | options
    return PagedKVCacheManager(
        params, num_pages=num_pages, enable_runtime_checks=True, **in_groups(options)
    )


def serve(scheduler: Scheduler, seed: int = 0) -> list[Request]:
    numbers, ended = random.Random(seed), list[Request]()
    while batch := scheduler.next_batch():
        tokens = [numbers.randrange(5) for _ in batch.requests]
        ended += scheduler.update(batch, np.array([tokens] * batch.num_steps))
    return ended


def requests_of(lengths: list[int], new: int, seed: int = 1) -> list[Request]:
    numbers = random.Random(seed)
    shared = [numbers.randrange(5) for _ in range(max(lengths))]
    prompts = [
        shared[: n // 2] + [numbers.randrange(5) for _ in range(n - n // 2)] for n in lengths
    ]
    return [Request(TextGenerationContext(i, p), new) for i, p in enumerate(prompts)]


def test_windows_get_pages_for_the_chunk_that_runs() -> None:
    params = make_params(FULL, WINDOW)
    manager = make_manager(params, 400)
    scheduler = Scheduler(manager, max_batch_tokens=16)
    (request,) = requests_of([400], 4)
    scheduler.add(request)
    ended = serve(scheduler)
    assert [r.finish_reason for r in ended] == ["length"]
    assert manager.metrics.peak_used_pages <= pages_per_sequence(params, 403, 16)
    assert manager.metrics.peak_used_pages < 100 + 2 * 10  # unbounded windows: 2 x 100


@pytest.mark.parametrize("num_steps", slow_but([5], [1, 5]))
@pytest.mark.parametrize(
    "groups",
    [
        (FULL, WINDOW),
        (WINDOW,),
        (FULL, ChunkedLocal([1, 2], 12)),
        (FULL, SlidingWindow([1, 2], 9, n_kv_heads=1)),
        (FullAttention([0], n_kv_heads=1), WINDOW),
        (SlidingWindow([0, 1], 6, n_kv_heads=2), ChunkedLocal([2], 10)),
    ],
    ids=["window", "alone", "chunk", "small-window", "small-full", "three-sizes"],
)
def test_a_pool_for_the_longest_request_serves_all(groups: Any, num_steps: int) -> None:
    """Preempted requests also return in chunks, as far as windows have pages."""
    params, preemptions = make_params(*groups), 0
    for budget in (1, 7, 32):
        most = max(budget, num_steps)
        pages = next(n for n in count(1) if longest_sequence(params, n, most) >= 96)
        manager = make_manager(params, pages)
        scheduler = Scheduler(manager, max_batch_tokens=budget, num_steps=num_steps)
        for request in requests_of([60, 3, 77, 40, 77, 12], 20):
            scheduler.add(request)
        ended = serve(scheduler)
        assert sorted(r.context.request_id for r in ended) == list(range(6))
        assert {r.context.end_idx - r.num_prompt for r in ended} == {20}
        assert manager.num_free_blocks == manager.total_num_pages
        preemptions += scheduler.num_preemptions
    assert preemptions or FULL not in groups


def test_what_never_fits_in_chunks_is_refused() -> None:
    params = make_params(FULL, WINDOW)
    manager = make_manager(params, 40)
    most = longest_sequence(params, 40, 16)
    assert 40 < most < 160
    scheduler = Scheduler(manager, max_batch_tokens=16)
    scheduler.add(requests_of([most], 1)[0])
    with pytest.raises(CapacityError, match=f"the pool holds {most} "):
        scheduler.add(requests_of([most + 1], 1)[0])
    assert len(serve(scheduler)) == 1


def test_hits_leave_the_chunk_its_length() -> None:
    params = make_params(FULL, WINDOW)
    manager = make_manager(params, 400)
    first, second = requests_of([200], 1)[0], requests_of([200], 1)[0]
    second.context = TextGenerationContext(
        "again", [*first.context.tokens[:150].tolist(), *[9] * 60]
    )
    second.num_prompt = 210
    scheduler = Scheduler(manager, max_batch_tokens=16)
    scheduler.add(first)
    serve(scheduler)
    scheduler.add(second)
    batch = scheduler.next_batch()
    assert batch is not None
    assert second.cached_tokens == 150
    assert second.context.active_length == 16
    assert bundles(params)[1].group == WINDOW
    scheduler.close()
