# SPDX-License-Identifier: Apache-2.0
"""Managers whose layers do not all keep every token: tables, freed pages, hits, contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grouped_traffic import SHAPES, Traffic, manager_of, params_of
from kvcore import CapacityError, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import FullAttention, SlidingWindow, bundles


def claimed(
    manager: PagedKVCacheManager, name: str, tokens: list[int], **options: Any
) -> TextGenerationContext:
    manager.claim(name)
    return TextGenerationContext(name, tokens, **options)


def run(manager: PagedKVCacheManager, *batch: TextGenerationContext, token: int = 9) -> Any:
    inputs = manager.fetch(batch)
    for context in batch:
        context.update(token)
    manager.step(batch)
    return inputs[0]


def live(manager: PagedKVCacheManager, name: str, bundle: int) -> int:
    return sum(page < manager.total_num_pages for page in manager.get_req_blocks(name, bundle))


FULL, WINDOW = FullAttention([0]), SlidingWindow([1, 2], 32)


def test_one_full_group_is_the_cache_without_groups() -> None:
    params = params_of(FullAttention([0, 1]))
    manager, flat = manager_of(params), manager_of(params_of(FullAttention([0, 1]), groups=None))
    for each in (manager, flat):
        context = claimed(each, "a", list(range(9)))
        (inputs,) = each.fetch([context])
        assert inputs.blocks.shape == (64, 2, 2, 2, 1, 4)
        assert len(inputs.tables) == 1
        assert inputs.tables[0] is inputs.lookup_table
        assert inputs.lookup_table.tolist() == [[0, 1, 2, 3, 4]]
        context.update(9)
        assert each.step([context]).shape == (0, 3)


def test_a_hit_holds_what_windows_read() -> None:
    params = params_of(FULL, WINDOW, page_size=16)
    assert len(bundles(params)) == 3
    manager = manager_of(params)
    first = claimed(manager, "a", list(range(55)))
    run(manager, first)
    assert [live(manager, "a", b) for b in range(3)] == [4, 3, 3]
    manager.release("a")
    assert manager.num_free_blocks == 64
    again = claimed(manager, "b", [*range(48), 900, 901, 902, 903, 904])
    plan = manager.plan(again)
    assert (plan.hit_tokens, plan.new_pages, plan.fits) == (48, 3, True)
    assert manager.reserve(again)
    assert again.start_idx == 48
    assert [live(manager, "b", b) for b in range(3)] == [4, 3, 3]
    (inputs,) = manager.fetch([again])
    hole = manager.total_num_pages
    assert [table[0, 0] == hole for table in inputs.tables] == [False, True, True]
    assert manager.match_prefix(list(range(48))) == 48


def test_pages_come_back_behind_the_window() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 32), page_size=16))
    context = claimed(manager, "a", list(range(320)), active_idx=64)
    held = []
    while context.start_idx < 320:
        context.active_idx = context.start_idx + 64
        assert manager.reserve(context)
        held.append(live(manager, "a", 1))
        run(manager, context)
    assert held == [4, 6, 6, 6, 6]
    run(manager, context)
    assert live(manager, "a", 1) == 3
    assert len(manager.get_req_blocks("a", 1)) == 21


def test_reserve_chunks_reserves_what_runs_next() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 8))
    for chunks, pages in ((False, 20 + 2), (True, 2 + 2)):
        manager = manager_of(params, reserve_chunks=chunks)
        context = claimed(manager, "a", list(range(40)), active_idx=4)
        assert manager.reserve(context)
        assert manager.total_num_pages - manager.num_free_blocks == pages
        while context.start_idx < 40:
            context.active_idx = min(40, context.start_idx + 4)
            assert manager.reserve(context)
            run(manager, context)
        manager.release("a")
        assert manager.num_free_blocks == manager.total_num_pages


def test_swaps_name_the_bundle() -> None:
    manager = manager_of(params_of(FullAttention([0]), SlidingWindow([1], 64)))
    contexts = [claimed(manager, name, list(range(6))) for name in "ab"]
    manager.fetch(contexts)
    for context in contexts:
        context.update(7)
    swaps = manager.step(contexts)
    assert swaps.shape == (6, 4)
    assert swaps[:, 0].tolist() == [1] * 6
    assert sorted(map(tuple, swaps[:, [1, 3]].tolist())) == [
        (c, b) for c in range(3) for b in (0, 1)
    ]
    for _, column, page, bundle in swaps.tolist():
        assert manager.get_req_blocks("b", bundle)[column] == page


def test_truncation_beyond_drafts_is_refused() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 8))
    manager = manager_of(params, max_draft_tokens=5)
    context = claimed(manager, "a", list(range(40)))
    run(manager, context)
    with pytest.raises(ValueError, match="max_draft_tokens of 5"):
        manager.truncate("a", 34)
    manager.truncate("a", 35)
    context.rewind(35)
    assert manager.reserve(context)
    run(manager, context)


def test_what_never_fits_is_refused() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 8))
    manager = manager_of(params, num_pages=20)
    assert manager.reserve(claimed(manager, "a", list(range(28)), active_idx=1))
    with pytest.raises(CapacityError, match="more than the whole pool of 20"):
        manager.reserve(claimed(manager, "b", list(range(40)), active_idx=1))


def test_bundles_out_of_range_are_refused() -> None:
    manager = manager_of(params_of(FULL, WINDOW))
    manager.claim("a")
    for bundle in (-1, 3):
        with pytest.raises(IndexError, match=f"bundle is {bundle}"):
            manager.get_req_blocks("a", bundle)
    context = TextGenerationContext("a", [1, 2, 3])
    (inputs,) = manager.fetch([context])
    with pytest.raises(IndexError, match="layer is 3"):
        ops.append(inputs, 3, np.ones((3, 1, 4), np.float32), None, inputs.row_offsets)


# -- contents: a layer reads the values that were written for the same tokens ----------------------
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_layers_read_what_was_written(shape: str, seed: int) -> None:
    traffic = Traffic(SHAPES[shape], seed)
    traffic.act(["claim", "step", "step", "step", "fork", "release"], 120)
    assert traffic.read > 1000
    traffic.end()


def test_pages_of_groups_are_counted() -> None:
    manager = manager_of(params_of(FullAttention([0]), SlidingWindow([1, 2], 4)))
    context = claimed(manager, "a", list(range(12)))
    run(manager, context)
    full, window = manager.group_metrics
    assert (full.held_pages, full.cached_pages, full.holes, full.given_back) == (6, 6, 0, 0)
    assert (window.held_pages, window.cached_pages, window.given_back) == (4, 12, 8)
    manager.release("a")
    full, window = manager.group_metrics
    assert (full.held_pages, window.held_pages) == (0, 0)
    other = claimed(manager, "b", list(range(100, 196)), active_idx=4)
    assert manager.reserve(other)  # 48 and 4 pages; 18 are cached, 46 are free
    full, window = manager.group_metrics
    assert (window.holes, window.cached_pages) == (6, 6)
    manager.release("b")
    again = claimed(manager, "c", [*range(6), 50])  # computes the tokens of the holes
    run(manager, again)
    full, window = manager.group_metrics
    assert (full.filled, window.filled) == (0, 6)
    manager.reset_metrics()
    assert (manager.group_metrics[1].given_back, manager.group_metrics[1].filled) == (0, 0)
    assert manager_of(params_of(FullAttention([0]))).group_metrics == ()
