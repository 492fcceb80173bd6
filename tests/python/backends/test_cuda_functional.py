# SPDX-License-Identifier: Apache-2.0
"""kvcore.functional and increment_cache_lengths on cupy arrays over emulated memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import RaggedKVCacheInputs
from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    gather_kv,
    init_paged_kv_cache,
)
from kvcore.ops.increment import increment_cache_lengths

require_emulation()


def cache_on(machine: Machine | None, *, tables_on_gpu: bool = False) -> PagedKVCache:
    cache = init_paged_kv_cache(
        num_blocks=5,
        block_size=2,
        num_kv_heads=2,
        head_dim=3,
        batch_size=2,
        max_blocks_per_seq=3,
        dtype="float16",
    )
    if machine is None:
        return cache
    pools = machine.array(cache.key_pool, 1), machine.array(cache.value_pool, 1)
    tables = cache.block_table, cache.seq_lengths
    if tables_on_gpu:
        tables = machine.array(tables[0], 1), machine.array(tables[1], 1)
    return PagedKVCache(pools[0], pools[1], tables[0], tables[1])


def fields(machine: Machine, cache: PagedKVCache) -> list[Any]:
    given = (cache.key_pool, cache.value_pool, cache.block_table, cache.seq_lengths)
    return [a.copy() if isinstance(a, np.ndarray) else machine.host(a) for a in given]


def same(machine: Machine, device: PagedKVCache, host: PagedKVCache) -> None:
    for one, other in zip(fields(machine, device), fields(machine, host), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("tables_on_gpu", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_every_function_does_what_it_does_on_the_cpu(
    machine: Machine, tables_on_gpu: bool, donate: bool
) -> None:
    host, device = cache_on(None), cache_on(machine, tables_on_gpu=tables_on_gpu)
    rng = np.random.default_rng(0)
    free = [3, 1, 0, 2, 4]
    for row, count in ((1, 3), (0, 1), (1, 2), (0, 0)):
        asked: dict[str, Any] = {
            "sequence_idx": row,
            "num_new_tokens": count,
            "free_block_ids": free,
        }
        before = fields(machine, device)
        host, consumed = allocate_blocks(host, **asked, donate=donate)
        new, also = allocate_blocks(device, **asked, donate=donate)
        assert consumed == also
        keys, values = (rng.normal(size=(count, 2, 3)).astype(np.float16) for _ in range(2))
        host = append_kv(host, row, keys, values, donate=donate)
        newer = append_kv(new, row, machine.array(keys, 1), machine.array(values, 1), donate=donate)
        if not donate:
            for one, other in zip(fields(machine, device), before, strict=True):
                assert one.tobytes() == other.tobytes()
        device = newer
        same(machine, device, host)
        expected, found = gather_kv(host, row), gather_kv(device, row)
        assert found[2] == expected[2]
        for one, other in zip(found[:2], expected[:2], strict=True):
            assert machine.host(one).tobytes() == other.tobytes()
        free = free[consumed:]


@pytest.mark.parametrize("tables_on_gpu", [False, True])
def test_refusals_are_those_of_the_cpu_and_change_nothing(
    machine: Machine, tables_on_gpu: bool
) -> None:
    device = cache_on(machine, tables_on_gpu=tables_on_gpu)
    before = fields(machine, device)
    tokens = machine.array(np.ones((1, 2, 3), np.float16), 1)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is -1, unallocated"):
        append_kv(device, 0, tokens, tokens, donate=True)
    with pytest.raises(IndexError, match="sequence_idx is 2"):
        gather_kv(device, 2)
    with pytest.raises(ValueError, match="free_block_ids holds block 1 twice"):
        allocate_blocks(
            device, sequence_idx=0, num_new_tokens=3, free_block_ids=[1, 1], donate=True
        )
    wrong = machine.array(np.ones((1, 2, 3), np.float32), 1)
    with pytest.raises(TypeError, match="keys_new has dtype float32, the pool float16"):
        append_kv(device, 0, wrong, wrong)
    if tables_on_gpu:
        wide = machine.array(np.zeros((2, 2), np.int32), 1)[:, 0]
        strided = PagedKVCache(device.key_pool, device.value_pool, device.block_table, wide)
        with pytest.raises(ValueError, match="seq_lengths is strided"):
            append_kv(strided, 0, tokens, tokens, donate=True)
    same_pools = PagedKVCache(
        device.key_pool, device.key_pool, device.block_table, device.seq_lengths
    )
    with pytest.raises(ValueError, match="are the same memory"):
        append_kv(same_pools, 0, tokens, tokens, donate=True)
    host = np.ones((1, 2, 3), np.float16)
    with pytest.raises(ValueError, match="keys_new is in host memory, must be on cuda:1"):
        append_kv(device, 0, host, host)
    for one, other in zip(fields(machine, device), before, strict=True):
        assert one.tobytes() == other.tobytes()


# ---- lengths for a step --------------------------------------------------------------------------
def inputs_on(machine: Machine, device: int, lengths: list[int]) -> RaggedKVCacheInputs:
    table = machine.array(np.zeros((len(lengths), 1), np.uint32), device)
    steps = np.array([[1, 9], [1, 10]], np.uint32)
    cached = machine.array(np.array(lengths, np.uint32), device)
    return RaggedKVCacheInputs(None, cached, table, steps)


class Previous:
    data_parallel_splits = np.array([0, 2, 3])

    def __init__(self, offsets: Any) -> None:
        self.input_row_offsets = offsets


def test_lengths_advance_on_every_device_without_a_wait(machine: Machine) -> None:
    inputs = [inputs_on(machine, 0, [4, 7]), inputs_on(machine, 1, [1])]
    offsets = np.array([0, 3, 4, 6], np.uint32)
    machine.in_any_order(0)
    advanced = increment_cache_lengths(inputs, Previous(offsets), 2)
    assert machine.kernels.emulation.num_waiting() > 0
    assert [machine.host(i.cache_lengths).tolist() for i in advanced] == [[7, 8], [3]]
    assert [machine.host(i.cache_lengths).tolist() for i in inputs] == [[4, 7], [1]]
    assert advanced[0].max_lengths.tolist() == [[1, 10]]


def test_row_offsets_may_lie_on_the_device(machine: Machine) -> None:
    inputs = [inputs_on(machine, 1, [4, 7])]
    offsets = machine.array(np.array([0, 3, 4], np.uint32), 1)
    (advanced,) = increment_cache_lengths(inputs, offsets, 1)
    assert machine.host(advanced.cache_lengths).tolist() == [7, 8]
    with pytest.raises(ValueError, match="row_offsets is on cuda:0, must be on cuda:1"):
        increment_cache_lengths(inputs, machine.array(np.zeros(3, np.uint32), 0), 1)
    with pytest.raises(ValueError, match="row offsets have 4 entries for a batch of 2"):
        increment_cache_lengths(inputs, machine.array(np.zeros(4, np.uint32), 1), 1)


@pytest.mark.parametrize("tables_on_gpu", [False, True])
def test_captured_calls_are_refused_and_change_nothing(
    machine: Machine, tables_on_gpu: bool
) -> None:
    cache = cache_on(machine, tables_on_gpu=tables_on_gpu)
    asked: dict[str, Any] = {"sequence_idx": 1, "num_new_tokens": 2, "free_block_ids": [3, 1]}
    cache, _ = allocate_blocks(cache, **asked, donate=True)
    tokens = machine.array(np.ones((2, 2, 3), np.float16), 1)
    before = fields(machine, cache)
    stream = machine.kernels.Stream(1)
    machine.streams[1] = stream.ptr
    machine.kernels.emulation.begin_capture(1, stream.ptr)
    with pytest.raises(ValueError, match=r"block_table .* captured into a graph"):
        append_kv(cache, 1, tokens, tokens, donate=True)
    graph = machine.kernels.emulation.end_capture(1, stream.ptr)
    machine.kernels.emulation.replay(graph, 1, stream.ptr)
    for found, expected in zip(fields(machine, cache), before, strict=True):
        assert found.tobytes() == expected.tobytes()
