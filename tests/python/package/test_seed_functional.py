# SPDX-License-Identifier: Apache-2.0
"""A program written for a jax module with kvcore.functional's names: only its imports differ."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore import functional
from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    gather_kv,
    init_paged_kv_cache,
)


def test_every_public_name_takes_the_same_arguments() -> None:
    assert set(functional.__all__) == {
        "PagedKVCache",
        "allocate_blocks",
        "append_kv",
        "attend_kv",
        "gather_kv",
        "init_paged_kv_cache",
    }
    assert [field.name for field in dataclasses.fields(PagedKVCache)] == [
        "key_pool",
        "value_pool",
        "block_table",
        "seq_lengths",
    ]
    keyword_only: dict[Callable[..., Any], str] = {
        init_paged_kv_cache: "num_blocks block_size num_kv_heads head_dim batch_size "
        "max_blocks_per_seq dtype",
        allocate_blocks: "sequence_idx num_new_tokens free_block_ids donate",
        append_kv: "donate",
        gather_kv: "",
    }
    for function, names in keyword_only.items():
        parameters = inspect.signature(function).parameters.values()
        got = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert got == names.split()
    assert list(inspect.signature(append_kv).parameters)[:4] == [
        "cache",
        "sequence_idx",
        "keys_new",
        "values_new",
    ]


def test_two_sequences_take_turns() -> None:
    cache = init_paged_kv_cache(
        num_blocks=8,
        block_size=4,
        num_kv_heads=2,
        head_dim=16,
        batch_size=2,
        max_blocks_per_seq=4,
        dtype=np.float32,
    )
    assert isinstance(cache, PagedKVCache)
    assert (cache.num_blocks, cache.block_size) == (8, 4)
    assert (cache.num_kv_heads, cache.head_dim) == (2, 16)

    free = np.arange(8, dtype=np.int32)
    written: list[list[np.ndarray]] = [[], []]
    for sequence_idx, chunk in [(0, 5), (1, 3), (0, 1), (1, 6), (0, 7)]:
        cache, consumed = allocate_blocks(
            cache, sequence_idx=sequence_idx, num_new_tokens=chunk, free_block_ids=free
        )
        free = free[consumed:]
        start = int(cache.seq_lengths[sequence_idx])
        keys = np.full((chunk, 2, 16), start + 1.0, dtype=np.float32)
        keys += np.arange(chunk, dtype=np.float32)[:, None, None]
        cache = append_kv(cache, sequence_idx, keys, -keys)
        written[sequence_idx].append(keys)

    assert free.tolist() == [7]
    assert cache.block_table.tolist() == [[0, 1, 5, 6], [2, 3, 4, -1]]
    assert cache.seq_lengths.tolist() == [13, 9]
    for sequence_idx in range(2):
        keys, values, seq_len = gather_kv(cache, sequence_idx)
        assert seq_len == int(cache.seq_lengths[sequence_idx])
        assert np.array_equal(keys, np.concatenate(written[sequence_idx]))
        assert np.array_equal(values, -keys)


def test_its_two_errors_are_value_errors() -> None:
    cache = init_paged_kv_cache(
        num_blocks=2,
        block_size=4,
        num_kv_heads=1,
        head_dim=2,
        batch_size=1,
        max_blocks_per_seq=2,
        dtype=np.float16,
    )
    with pytest.raises(ValueError, match="free_block_ids has 1 entries"):
        allocate_blocks(
            cache, sequence_idx=0, num_new_tokens=5, free_block_ids=np.arange(1, dtype=np.int32)
        )
    rows = np.ones((1, 1, 2), dtype=np.float16)
    with pytest.raises(ValueError, match="unallocated; call allocate_blocks"):
        append_kv(cache, 0, rows, rows)
    with pytest.raises(ValueError, match="shape"):
        append_kv(cache, 0, rows, rows[:0])
