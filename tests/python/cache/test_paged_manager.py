# SPDX-License-Identifier: Apache-2.0
"""PagedKVCacheManager: the worked example and each documented rule of the calls."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, make_params, prefilled, put_in_cache
from foreign_context import Context
from kvcore import PagedKVCacheManager


def totals(manager: PagedKVCacheManager) -> tuple[int, int]:
    metrics = manager.metrics
    return metrics.input_tokens, metrics.cache_tokens


def test_cached_pages_count_whether_requests_share_them_or_not() -> None:
    manager = make_manager(2, 8)
    assert manager.num_cached_blocks == 0
    put_in_cache(manager, [1, 2, 3, 4, 5])
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 8)
    context = claimed(manager, [1, 2, 3, 4, 5])
    assert manager.maybe_reserve(context)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 5)


# -- the worked example --------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", ["allocate", None])
@pytest.mark.parametrize("kind", [kvcore.TextGenerationContext, Context])
def test_worked_example(blocks: Any, kind: Any) -> None:
    manager = make_manager(1, 128, blocks=blocks)
    first = kind("first", [10, 11, 12, 13, 14])
    manager.external_claim("first")
    assert manager.num_free_blocks == 128
    assert manager.maybe_reserve(first) is True
    assert len(manager.get_req_blocks("first")) == 5
    assert manager.num_free_blocks == 123
    assert totals(manager) == (5, 0)
    (inputs,) = manager.fetch([first])
    assert inputs.cache_lengths.tolist() == [0]
    assert inputs.max_lengths.tolist() == [[5, 5]]
    assert inputs.lookup_table.tolist() == [list(manager.get_req_blocks("first"))]
    first.update(15)
    assert len(manager.step([first])) == 0

    second = kind("second", [10, 11, 12, 13])
    manager.claim("second")
    assert manager.maybe_reserve(second)
    assert second.start_idx == 3
    own = manager.get_req_blocks("second")
    assert list(own[:3]) == list(manager.get_req_blocks("first")[:3])
    assert own[3] not in manager.get_req_blocks("first")
    assert manager.num_free_blocks == 122
    assert totals(manager) == (6, 3)
    (inputs,) = manager.fetch([second])
    assert inputs.max_lengths.tolist() == [[1, 4]]
    assert inputs.cache_lengths.tolist() == [3]
    second.update(14)
    swaps = manager.step([second])
    fourth = manager.get_req_blocks("first")[3]
    assert swaps.tolist() == [[0, 3, fourth]]
    assert swaps.dtype == np.int32
    assert list(manager.get_req_blocks("second")) == list(manager.get_req_blocks("first")[:4])
    assert manager.num_free_blocks == 123


# -- claim, release ------------------------------------------------------------------------------
def test_claim_takes_no_pages() -> None:
    manager = make_manager()
    manager.external_claim("request")
    assert manager.contains("request")
    assert manager.num_free_blocks == 16
    assert list(manager.get_req_blocks("request")) == []
    manager.release("request")
    assert not manager.contains("request")


def test_single_replica_may_be_named() -> None:
    manager = make_manager()
    manager.external_claim("default")
    manager.external_claim("named", replica_idx=0)
    manager.external_claim("auto", replica_idx="auto")
    assert [manager.get_replica(make_context([1], n)) for n in ("default", "named", "auto")] == [
        0
    ] * 3


def test_release_returns_pages_and_keeps_committed_ones_cached() -> None:
    manager = make_manager()
    context = prefilled(manager, range(10))
    assert manager.num_free_blocks == 13
    manager.release(context.request_id)
    assert manager.num_free_blocks == 16
    assert manager.match_prefix(range_of(10)) == 8


def range_of(n: int) -> Any:
    return np.arange(n, dtype=np.int32)


# -- reserve -------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 20])
def test_reserve_takes_pages_for_tokens_and_steps(page_size: int, num_steps: int) -> None:
    manager = make_manager(page_size, 64)
    context = claimed(manager, range(33))
    assert manager.maybe_reserve(context, num_steps=num_steps)
    pages = math.ceil((33 + num_steps - 1) / page_size)
    assert len(manager.get_req_blocks(context.request_id)) == pages
    assert manager.reserve(context, num_steps)
    assert len(manager.get_req_blocks(context.request_id)) == pages


def test_whole_sequence_is_reserved_not_the_chunk() -> None:
    manager = make_manager()
    context = claimed(manager, range(20), active_idx=3)
    assert manager.maybe_reserve(context)
    assert len(manager.get_req_blocks(context.request_id)) == 5
    assert totals(manager) == (3, 0)
    manager.fetch([context])
    context.update(0)
    assert manager.maybe_reserve(context)
    assert manager.maybe_reserve(context)
    assert totals(manager) == (20, 0)


def test_hit_moves_the_chunk_along() -> None:
    manager = make_manager()
    put_in_cache(manager, range(16))
    context = claimed(manager, range(20), active_idx=6)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (16, 20)
    shorter = claimed(manager, [*range(16), *range(50, 90)], active_idx=6)
    assert manager.maybe_reserve(shorter)
    assert (shorter.start_idx, shorter.active_idx) == (16, 22)


def test_hit_inside_the_chunk_leaves_its_end() -> None:
    manager = make_manager()
    put_in_cache(manager, range(8))
    context = claimed(manager, range(20), active_idx=10)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (8, 10)


def test_one_token_is_always_left_to_run() -> None:
    manager = make_manager(partial_page_reuse=False)
    put_in_cache(manager, range(16))
    for length, hit in ((16, 12), (17, 16), (13, 12), (12, 8), (4, 0), (5, 4)):
        context = claimed(manager, range(length))
        assert manager.maybe_reserve(context)
        assert context.start_idx == hit
        manager.release(context.request_id)


def test_single_token_is_never_looked_up() -> None:
    manager = make_manager(1)
    put_in_cache(manager, range(8))
    context = claimed(manager, [0])
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0
    assert totals(manager) == (9, 0)


def test_nothing_is_reused_without_prefix_caching() -> None:
    manager = make_manager(caching=False)
    put_in_cache(manager, range(16))
    context = prefilled(manager, range(16))
    assert totals(manager) == (32, 0)
    assert manager.match_prefix(range_of(16)) == 0
    manager.release(context.request_id)
    assert manager.num_free_blocks == 16


def test_full_pool_answers_false() -> None:
    manager = make_manager(4, 4)
    first, second = claimed(manager, range(12)), claimed(manager, range(20, 28))
    assert manager.maybe_reserve(first)
    assert manager.maybe_reserve(second) is False
    manager.release(first.request_id)
    assert manager.maybe_reserve(second) is True


def test_sum_of_length_and_steps_is_in_the_message() -> None:
    manager = make_manager(4, 64, max_seq_len=20)
    context = claimed(manager, range(18))
    assert manager.maybe_reserve(context, num_steps=3)
    with pytest.raises(kvcore.CapacityError, match=r"\b21\b.*\b20\b"):
        manager.maybe_reserve(context, num_steps=4)


def test_later_and_longer_hit_moves_tokens_from_input_to_cache() -> None:
    manager = make_manager()
    early = claimed(manager, range(12))
    late = claimed(manager, [*range(12), 99])
    assert manager.maybe_reserve(early)
    assert manager.maybe_reserve(late)
    assert totals(manager) == (25, 0)
    free = manager.num_free_blocks
    manager.fetch([early])
    early.update(0)
    manager.step([early])
    assert manager.maybe_reserve(late)
    assert late.start_idx == 12
    assert totals(manager) == (13, 12)
    assert manager.num_free_blocks == free + 3
    assert manager.maybe_reserve(late)
    assert totals(manager) == (13, 12)


def test_no_reuse_after_a_fetch() -> None:
    manager = make_manager()
    early, late = claimed(manager, range(12)), claimed(manager, [*range(12), 99])
    for context in (early, late):
        assert manager.maybe_reserve(context)
    manager.fetch([early, late])
    pages = list(manager.get_req_blocks(late.request_id))
    early.update(0)
    manager.step([early])
    assert manager.maybe_reserve(late)
    assert list(manager.get_req_blocks(late.request_id)) == pages
    assert late.start_idx == 0


def test_preempted_context_is_simply_claimed_again() -> None:
    manager = make_manager()
    context = prefilled(manager, range(10))
    manager.release(context.request_id)
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (8, 11)
    manager.release(context.request_id)
    manager.reset_prefix_cache()
    manager.external_claim(context.request_id)
    manager.fetch([context])
    assert (context.start_idx, context.active_idx) == (0, 11)


def test_batch_reserve_stops_at_the_first_that_does_not_fit() -> None:
    manager = make_manager(4, 6)
    batch = [claimed(manager, range(n, n + 8)) for n in (0, 100, 200, 300)]
    assert manager.maybe_reserve_batch([]) == 0
    assert manager.maybe_reserve_batch(batch) == 3
    assert [len(manager.get_req_blocks(c.request_id)) for c in batch] == [2, 2, 2, 0]
    assert manager.maybe_reserve_batch(batch[:3], num_steps=2) == 0
    assert manager.maybe_reserve_batch(batch[:3]) == 3


# -- fetch ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_empty_batch(page_size: int, num_steps: int) -> None:
    manager = make_manager(page_size, replicas=2, shards=2)
    inputs = manager.fetch([], num_steps)
    assert len(inputs) == 4
    for entry in inputs:
        assert entry.lookup_table.shape == (0, 0)
        assert entry.cache_lengths.shape == (0,)
        assert entry.max_lengths.tolist() == [[0, 0], [1, 1], [1, 2]][:num_steps]
        for array in (entry.lookup_table, entry.cache_lengths, entry.max_lengths):
            assert array.dtype == np.uint32


def test_fetch_reserves_what_is_missing() -> None:
    manager = make_manager()
    put_in_cache(manager, range(8))
    context = claimed(manager, range(10))
    (entry,) = manager.fetch([context], num_steps=4)
    assert context.start_idx == 8
    assert entry.cache_lengths.tolist() == [8]
    assert entry.max_lengths.tolist() == [[2, 10], [1, 11], [1, 12], [1, 13]]
    assert entry.lookup_table.shape == (1, 4)


def test_rows_are_padded_with_the_number_of_pages() -> None:
    manager = make_manager(4, 16)
    rows = [claimed(manager, range(n * 100, n * 100 + n)) for n in (3, 11, 8)]
    (entry,) = manager.fetch(rows)
    assert manager.total_num_pages == 16
    expected = [[*manager.get_req_blocks(c.request_id), 16, 16, 16][:3] for c in rows]
    assert entry.lookup_table.tolist() == expected
    assert entry.max_lengths.tolist() == [[11, 11]]
    shorter = manager.fetch(rows[:1])[0].lookup_table
    assert shorter.tolist() == [list(manager.get_req_blocks(rows[0].request_id))]


def test_longest_active_and_longest_end_may_be_of_different_rows() -> None:
    manager = make_manager(4, 32)
    running = prefilled(manager, range(30))
    fresh = claimed(manager, range(100, 112), active_idx=7)
    (entry,) = manager.fetch([running, fresh], num_steps=2)
    assert entry.max_lengths.tolist() == [[7, 31], [1, 32]]
    assert entry.cache_lengths.tolist() == [30, 0]


# -- step ----------------------------------------------------------------------------------------
def test_step_commits_whole_written_pages_only() -> None:
    manager = make_manager(enable_runtime_checks=False)  # checks would refuse the first step
    context = claimed(manager, range(11), active_idx=7)
    manager.fetch([context])
    manager.step([context])
    assert manager.match_prefix(range_of(11)) == 0
    context.update(0)
    manager.step([context])
    assert manager.match_prefix(range_of(11)) == 4
    manager.fetch([context])
    context.update(11)
    manager.step([context])
    manager.step([context])
    assert manager.match_prefix(range_of(12)) == 8


def test_step_of_nothing() -> None:
    swaps = make_manager().step([])
    assert swaps.shape == (0, 3)
    assert swaps.dtype == np.int32


# -- numbers -------------------------------------------------------------------------------------
def test_metrics_never_go_below_zero() -> None:
    manager = make_manager()
    early, late = claimed(manager, range(12)), claimed(manager, [*range(12), 99])
    assert manager.maybe_reserve_batch([early, late]) == 2
    manager.reset_metrics()
    manager.fetch([early])
    early.update(0)
    manager.step([early])
    assert manager.maybe_reserve(late)
    assert late.start_idx == 12
    assert totals(manager) == (0, 12)


def test_metrics_are_copies_and_can_be_reset() -> None:
    manager = make_manager()
    assert manager.metrics.cache_hit_rate == 0.0
    put_in_cache(manager, range(8))
    before = manager.metrics
    context = prefilled(manager, range(10))
    after = manager.metrics
    assert (before.input_tokens, before.cache_tokens, before.prompt_tokens) == (8, 0, 8)
    assert (after.input_tokens, after.cache_tokens, after.prompt_tokens) == (10, 8, 18)
    assert after.cache_hit_rate == pytest.approx(8 / 18)
    assert (after.h2d_blocks_copied, after.d2h_blocks_copied) == (0, 0)
    assert (after.evicted_pages, after.copied_tokens, after.peak_used_pages) == (0, 0, 3)
    manager.reset_metrics()
    assert (manager.metrics.input_tokens, manager.metrics.cache_tokens) == (0, 0)
    assert after.input_tokens == 10
    manager.release(context.request_id)


def test_increment_takes_bare_offsets_or_a_tuple_on_one_replica() -> None:
    manager = make_manager()
    rows = [claimed(manager, range(n)) for n in (5, 3)]
    inputs = manager.fetch(rows, num_steps=2)
    offsets = np.array([0, 5, 8], np.uint32)
    for form in (offsets, ("tokens", offsets), SimpleNamespace(input_row_offsets=offsets)):
        assert manager.increment_cache_lengths(inputs, form)[0].cache_lengths.tolist() == [5, 3]


def test_devices_must_match_the_params() -> None:
    with pytest.raises(ValueError, match=r"2 devices are given, params\.n_devices is 1"):
        PagedKVCacheManager(make_params(4), 4, 64, devices=("cpu", "cpu"), num_pages=2)


def test_input_symbols_name_the_fields() -> None:
    manager = make_manager(4, 16, shards=2)
    symbols = manager.input_symbols()
    assert len(symbols) == 2
    text = repr(symbols[0])
    for word in ("blocks", "cache_lengths", "lookup_table", "max_lengths", "uint32"):
        assert word in text
