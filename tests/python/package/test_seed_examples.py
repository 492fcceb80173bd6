# SPDX-License-Identifier: Apache-2.0
"""The call sequences that the documents of the API describe, with kvcore's imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvcore import (
    ContinuousBatchingKVCacheCollection,
    ContinuousBatchingKVCacheManager,
    FetchContinuousBatchingKVCacheCollection,
    KVCacheParams,
    PagedKVCacheManager,
    TextGenerationContext,
)

PARAMS = KVCacheParams("float32", n_kv_heads=2, head_dim=4, num_layers=3)


# -- the continuous-batching manager: claim, step, (fetch, step) per token, release ---------------
def project(
    views: Sequence[ContinuousBatchingKVCacheCollection], prompts: Sequence[Sequence[int]]
) -> None:
    """A model whose keys are the tokens and whose values are their negatives."""
    for view in views:
        for row, tokens in enumerate(prompts):
            for position, token in enumerate(tokens, view.cache_length(row)):
                view.get_key_cache(2).store(row, 1, position, 3, token)
                view.get_value_cache(2).store(row, 1, position, 3, -token)


def test_request_from_claim_to_release() -> None:
    manager = ContinuousBatchingKVCacheManager(
        params=PARAMS, max_cache_batch_size=2, max_seq_len=16, num_layers=3, devices=["cpu"]
    )
    prompts = [[5, 6, 7], [8, 9]]
    seq_ids = manager.claim(batch_size=2)
    # commit context encoding projections
    views = manager.fetch_collection(seq_ids, new_tokens=[3, 2])
    assert views[0].get_key_cache(0).empty_cache()
    assert views[0].max_seq_length == 3
    project(views, prompts)
    manager.step([3, 2], views)
    # foreach token generated
    for token in range(10, 14):
        views = manager.fetch_collection(seq_ids)
        assert not views[0].get_key_cache(0).empty_cache()
        project(views, [[token], [token]])
        manager.step(valid_lengths=[1, 1], seq_ids=views)
    expected = [[*prompt, *range(10, 14)] for prompt in prompts]
    (view,) = manager.fetch_collection(seq_ids)
    for row, tokens in enumerate(expected):
        assert view.cache_length(row) == len(tokens)
        for position, token in enumerate(tokens):
            assert view.get_key_cache(2).load(row, 1, position, 3) == token
            assert view.get_value_cache(2).load(row, 1, position, 3) == -token
    # mark blocks as not in use
    for seq_id in seq_ids:
        manager.release(seq_id)
    assert manager.claim(2) == seq_ids


def test_numbers_the_manager_states() -> None:
    devices = ["cpu", "cpu"]
    params = KVCacheParams("bfloat16", n_kv_heads=4, head_dim=8, num_layers=3, n_devices=2)
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(params, 5, 16, 3, devices)
    assert size == (5 * 2 * 3 * 16 * 2 * 8 * 2 + 8 * 5) * 2
    manager = ContinuousBatchingKVCacheManager(params, 5, 16, 3, devices)
    assert manager.block_shape(5) == [5, 2, 3, 16, 2, 8]
    assert len(manager.fetch([])) == len(manager.input_symbols()) == 2
    with pytest.raises(ValueError, match="sequence 5 is not claimed"):
        manager.fetch([5])  # exceeds max_cache_batch_size
    with pytest.raises(ValueError, match="sequence 0 is not claimed"):
        manager.fetch([0])  # doesn't exist in cache


def test_multi_step_on_slots() -> None:
    manager = ContinuousBatchingKVCacheManager(PARAMS, 2, 16, 3, ["cpu"])
    seq_ids = manager.claim(2)
    inputs = manager.fetch(seq_ids)
    fetch_collection = FetchContinuousBatchingKVCacheCollection(PARAMS)
    offsets = np.array([0, 3, 5], np.uint32)
    seen = []
    for _ in range(3):
        ((blocks, cache_lengths, lookup_table, is_cache_empty),) = inputs
        view = fetch_collection(blocks, cache_lengths, lookup_table, is_cache_empty)
        assert np.shares_memory(view.get_key_cache(0).blocks, manager.blocks[0])
        seen.append((view.cache_lengths.tolist(), bool(is_cache_empty[0])))
        prev_model_inputs: tuple[Any, ...] = (np.zeros(offsets[-1]), offsets)
        inputs = manager.increment_cache_lengths(inputs, prev_model_inputs)
        offsets = np.array([0, 1, 2], np.uint32)
    assert seen == [([0, 0], True), ([3, 2], False), ([4, 3], False)]


# -- the collection ------------------------------------------------------------------------------
def test_collection_over_the_callers_arrays() -> None:
    blocks = np.arange(4 * 2 * 3 * 8 * 2 * 4, dtype=np.float32).reshape(4, 2, 3, 8, 2, 4)
    collection = ContinuousBatchingKVCacheCollection(
        blocks=blocks,
        cache_lengths=np.array([7, 0], np.uint32),
        lookup_table=np.array([3, 1], np.uint32),
        max_seq_length=1,
        max_cache_length=8,
        scales=None,
    )
    assert collection.name_str == "continuous_batching"
    assert collection.kv_cache_dynamic_shape == (4, 8, 2, 4)
    assert collection.kv_cache_dynamic_strides == (2 * 3 * 8 * 2 * 4, 2 * 4, 4, 1)
    cache = collection.get_value_cache(layer_idx=1)
    assert isinstance(cache, collection.CacheType)
    assert cache.load(bs=0, head=1, tok=7, dim=2) == blocks[3, 1, 1, 7, 1, 2]
    assert collection.cache_length(0) == cache.cache_length(0) == 7


# -- the paged manager ---------------------------------------------------------------------------
def test_requests_on_two_replicas() -> None:
    params = KVCacheParams(
        "float32",
        n_kv_heads=2,
        head_dim=4,
        num_layers=3,
        page_size=4,
        enable_prefix_caching=True,
        n_devices=2,
        data_parallel_degree=2,
    )
    kv_manager = PagedKVCacheManager(
        params=params,
        max_batch_size=8,
        max_seq_len=64,
        num_layers=3,
        devices=["cpu", "cpu"],
        session=None,
        available_cache_memory=1 << 20,
        page_size=4,
    )
    ctx1, ctx2 = TextGenerationContext("1", range_of(9)), TextGenerationContext("2", range_of(6))
    kv_manager.external_claim(ctx1.request_id, replica_idx=0)
    kv_manager.external_claim(ctx2.request_id, replica_idx=1)
    # Allocate blocks for these requests
    assert kv_manager.maybe_reserve(ctx1, num_steps=10)
    assert kv_manager.maybe_reserve(ctx2, num_steps=10)
    # Get KVCache inputs to feed to graph
    kv_cache_inputs = kv_manager.fetch([ctx1, ctx2], num_steps=10)
    assert [entry.cache_lengths.tolist() for entry in kv_cache_inputs] == [[0], [0]]
    assert [len(entry.max_lengths) for entry in kv_cache_inputs] == [10, 10]
    # Update requests with newly generated tokens
    ctx1.update(42)
    ctx2.update(42)
    # Commit newly written blocks to prefix cache
    kv_manager.step([ctx1, ctx2])
    assert [kv_manager.match_prefix(ctx1.tokens, replica_idx=r) for r in range(2)] == [8, 4]
    # Release metadata and KV blocks for these requests
    kv_manager.release(ctx1.request_id)
    kv_manager.release(ctx2.request_id)
    assert kv_manager.free_blocks_pct == 1.0


def range_of(n: int) -> Any:
    return np.arange(n, dtype=np.int32)
