# SPDX-License-Identifier: Apache-2.0
"""Several replicas: the placement of requests, and the split of batches, tables and numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache


def test_each_replica_takes_its_share_of_the_batch() -> None:
    manager = make_manager(replicas=2, max_batch_size=3)
    for n in range(4):
        manager.external_claim(n, replica_idx=n % 2)
    with pytest.raises(
        kvcore.CapacityError, match="replica 0 is full: 2 of 2 sequences are claimed; release one"
    ):
        manager.external_claim("late", replica_idx=0)
    manager.release(2)
    manager.external_claim("late", replica_idx=0)
    assert manager.get_replica(make_context([1], "late")) == 0


def test_second_claim_names_the_replica() -> None:
    manager = make_manager(replicas=3)
    manager.external_claim("request", replica_idx=2)
    with pytest.raises(kvcore.AlreadyClaimedError, match="replica 2"):
        manager.external_claim("request", replica_idx=0)


def test_auto_claims_the_emptiest_replica() -> None:
    manager = make_manager(4, 8, replicas=2)
    assert manager.maybe_reserve(claimed(manager, range(12), replica_idx=0))
    manager.external_claim("one", replica_idx="auto")
    assert manager.get_replica(make_context([1], "one")) == 1
    assert manager.maybe_reserve(claimed(manager, range(20), replica_idx=1))
    manager.external_claim("two", replica_idx="auto")
    assert manager.get_replica(make_context([1], "two")) == 0


def test_entries_are_replica_major_and_keep_the_batch_order() -> None:
    manager = make_manager(4, 16, replicas=2, shards=2)
    placed = [(0, 5), (1, 9), (0, 13), (1, 2), (1, 6)]
    rows = [claimed(manager, range(n * 50, n * 50 + n), replica_idx=r) for r, n in placed]
    inputs = manager.fetch(rows)
    assert [entry.cache_lengths.shape for entry in inputs] == [(2,), (2,), (3,), (3,)]
    for device, entry in enumerate(inputs):
        mine = [c for c, (replica, _) in zip(rows, placed, strict=True) if replica == device // 2]
        for row, context in enumerate(mine):
            pages = list(manager.get_req_blocks(context.request_id))
            assert entry.lookup_table[row, : len(pages)].tolist() == pages
    assert inputs[0].max_lengths.tolist() == [[13, 13]]
    assert inputs[2].max_lengths.tolist() == [[9, 9]]


def test_inputs_have_the_pools_of_their_devices() -> None:
    def manager(blocks: Any) -> kvcore.PagedKVCacheManager:
        return make_manager(replicas=2, shards=2, blocks=blocks)

    shape = manager("allocate").fetch([])[0].blocks.shape
    pools = [np.zeros(shape, np.float32) for _ in range(4)]
    inputs = manager(pools).fetch([])
    assert len(inputs) == 4
    for i, each in enumerate(inputs):
        assert [np.shares_memory(each.blocks, pool) for pool in pools].index(True) == i


def test_replica_without_rows_gets_empty_arrays() -> None:
    manager = make_manager(4, 16, replicas=3)
    inputs = manager.fetch([claimed(manager, range(5), replica_idx=1)])
    assert [entry.lookup_table.shape for entry in inputs] == [(0, 0), (1, 2), (0, 0)]
    assert [entry.max_lengths.tolist() for entry in inputs] == [[[0, 0]], [[5, 5]], [[0, 0]]]


def test_splits_count_requests_up_to_each_replica() -> None:
    manager = make_manager(replicas=3)
    rows = [claimed(manager, [1, 2], replica_idx=r) for r in (0, 0, 2)]
    splits = manager.get_data_parallel_splits(rows)
    assert splits.tolist() == [0, 2, 2, 3]
    assert splits.dtype == np.int64
    assert manager.get_data_parallel_splits([]).tolist() == [0, 0, 0, 0]


def test_recommendation_follows_the_longest_prefix_then_the_free_pages() -> None:
    manager = make_manager(4, 16, replicas=3)
    new = make_context(range(20))
    assert manager.get_or_recommend_replica(new) == 0
    manager.external_claim("idle", replica_idx=0)
    assert manager.get_or_recommend_replica(new) == 1
    assert manager.maybe_reserve(claimed(manager, range(50, 58), replica_idx=1))
    assert manager.get_or_recommend_replica(new) == 2
    put_in_cache(manager, range(4), replica_idx=0)
    assert manager.get_or_recommend_replica(new) == 0
    prefilled(manager, range(12), replica_idx=1)
    assert manager.get_or_recommend_replica(new) == 1
    before = manager.metrics, manager.num_free_blocks, new.start_idx
    assert manager.get_or_recommend_replica(make_context(range(20), extra_key="other")) == 2
    assert (manager.metrics, manager.num_free_blocks, new.start_idx) == before
    manager.external_claim(new.request_id, replica_idx=2)
    assert manager.get_or_recommend_replica(new) == 2


def test_shares_of_pages_are_means_over_replicas() -> None:
    manager = make_manager(4, 8, replicas=2)
    assert (manager.free_blocks_pct, manager.used_blocks_pct) == (1.0, 0.0)
    prefilled(manager, range(15), replica_idx=1)
    assert manager.num_free_blocks == 12
    assert manager.free_blocks_pct == pytest.approx(0.75)
    assert manager.used_blocks_pct == pytest.approx(0.25)
    assert (manager.num_replicas, manager.total_num_pages) == (2, 8)
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (0, 0.0)


def test_increment_cache_lengths_returns_new_inputs() -> None:
    manager = make_manager(4, 16, replicas=2, shards=2, blocks="allocate")
    rows = [claimed(manager, range(n), replica_idx=r) for r, n in ((0, 5), (1, 9), (1, 2))]
    inputs = manager.fetch(rows, num_steps=3)
    offsets = np.array([0, 5, 14, 16], np.uint32)
    splits = manager.get_data_parallel_splits(rows)
    model_inputs = SimpleNamespace(input_row_offsets=offsets, data_parallel_splits=splits)
    later = manager.increment_cache_lengths(inputs, model_inputs)
    assert [e.cache_lengths.tolist() for e in later] == [[5], [5], [9, 2], [9, 2]]
    assert [e.max_lengths.tolist() for e in later] == [[[1, 6], [1, 7]]] * 2 + [
        [[1, 10], [1, 11]]
    ] * 2
    assert [e.cache_lengths.tolist() for e in inputs] == [[0], [0], [0, 0], [0, 0]]
    assert inputs[0].max_lengths.tolist() == [[5, 5], [1, 6], [1, 7]]
    for old, new in zip(inputs, later, strict=True):
        assert new.cache_lengths.dtype == np.uint32
        assert np.shares_memory(old.blocks, new.blocks)
        np.testing.assert_array_equal(old.lookup_table, new.lookup_table)
    assert [c.start_idx for c in rows] == [0, 0, 0]
