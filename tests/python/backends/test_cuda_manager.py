# SPDX-License-Identifier: Apache-2.0
"""A manager with pools on (emulated) GPUs writes the CPU's bytes, in any order of streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from cuda_machine import BYTES, Machine, require_emulation
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops

require_emulation()

SIZES: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 8, "num_layers": 2, "page_size": 4}


def manager_on(
    devices: list[str],
    *,
    dtype: str = "float32",
    num_pages: int = 16,
    host_gb: float | None = None,
    **more: Any,
) -> PagedKVCacheManager:
    params = KVCacheParams(
        dtype,
        **SIZES,
        enable_prefix_caching=True,
        n_devices=len(devices),
        enable_kvcache_swapping_to_host=host_gb is not None,
        host_kvcache_swap_space_gb=host_gb,
        **more,
    )
    return PagedKVCacheManager(
        params, 8, 64, devices=devices, num_pages=num_pages, enable_runtime_checks=True
    )


def new_tokens(contexts: list[TextGenerationContext], seed: int) -> tuple[Any, Any, Any]:
    """Return K and V as a model would compute them: a function of the preceding tokens."""
    rows = [
        np.arange(c.start_idx, c.active_idx, dtype=np.float32) + np.float32(c.tokens[0])
        for c in contexts
    ]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.uint32)
    flat = np.concatenate(rows)[:, None, None] + np.arange(16, dtype=np.float32).reshape(2, 8)
    return flat + seed, flat - seed, offsets


def run(manager: PagedKVCacheManager, prompts: list[list[int]], steps: int, there: Any) -> None:
    """Serve prompts for some steps; `there` moves an array to the pool's device."""
    contexts = [TextGenerationContext(f"{len(p)}-{i}", p) for i, p in enumerate(prompts)]
    for context in contexts:
        manager.claim(context.request_id)
    for step in range(steps):
        (inputs,) = manager.fetch(contexts)
        k, v, offsets = new_tokens(contexts, seed=1)
        for layer in range(SIZES["num_layers"]):
            ops.append(inputs, layer, there(k), there(v), there(offsets))
        kvcore.update_batch(contexts, np.full(len(contexts), 100 + step, np.int32))
        manager.step(contexts)
    for context in contexts:
        manager.release(context.request_id)


def pools_of(manager: PagedKVCacheManager) -> Any:
    (inputs,) = manager.fetch([])
    return inputs.blocks


def test_fetch_hands_out_arrays_of_the_device(machine: Machine) -> None:
    manager = manager_on(["cuda:1"])
    context = TextGenerationContext("r", list(range(10)))
    manager.claim("r")
    (inputs,) = manager.fetch([context], num_steps=3)
    arrays: tuple[Any, ...] = (inputs.blocks, inputs.cache_lengths, inputs.lookup_table)
    assert [array.data.device_id for array in arrays] == [1, 1, 1]
    assert machine.host(inputs.cache_lengths).tolist() == [0]
    assert machine.host(inputs.lookup_table).tolist() == [manager.get_req_blocks("r")]
    assert isinstance(inputs.max_lengths, np.ndarray)
    assert inputs.max_lengths.tolist() == [[10, 10], [1, 11], [1, 12]]


def test_an_empty_batch_has_empty_arrays(machine: Machine) -> None:
    (inputs,) = manager_on(["cuda:0"]).fetch([])
    assert (inputs.cache_lengths.shape, inputs.lookup_table.shape) == ((0,), (0, 0))


def test_the_pool_has_the_bytes_of_the_cpu_s(machine: Machine) -> None:
    prompts = [list(range(9)), [1, 2, 3], list(range(6))]
    on_cpu, on_gpu = manager_on(["cpu"]), manager_on(["cuda:0"])
    for _ in range(3):  # later rounds reuse pages, whole and in part
        run(on_cpu, prompts, 5, lambda array: array)
        run(on_gpu, prompts, 5, machine.array)
    assert on_gpu.metrics == on_cpu.metrics
    assert on_gpu.metrics.cache_tokens > 0
    assert on_gpu.metrics.copied_tokens > 0
    np.testing.assert_array_equal(machine.host(pools_of(on_gpu)), pools_of(on_cpu))


def test_a_fetch_does_not_make_the_host_wait(machine: Machine) -> None:
    manager = manager_on(["cuda:0"])
    context = TextGenerationContext("r", list(range(10)))
    manager.claim("r")
    machine.in_any_order(seed=1)
    manager.fetch([context])
    assert machine.kernels.emulation.num_waiting() > 0


@pytest.mark.parametrize("seed", range(20))
def test_tables_in_flight_are_not_written_again(machine: Machine, seed: int) -> None:
    manager = manager_on(["cuda:0"])
    contexts = [TextGenerationContext(i, list(range(i + 1))) for i in range(4)]
    for context in contexts:
        manager.claim(context.request_id)
    machine.in_any_order(seed)
    fetched = []
    for turn in range(8):
        batch = contexts[turn % 4 :] + contexts[: turn % 4]
        (inputs,) = manager.fetch(batch)
        fetched.append((inputs.lookup_table, [manager.get_req_blocks(c.request_id) for c in batch]))
    for table, expected in fetched:
        assert machine.host(table).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_pages_change_hands_in_the_order_of_streams(machine: Machine, seed: int) -> None:
    """One stream reads a page while the next request writes the page on another stream."""
    manager = manager_on(["cuda:0"], num_pages=1)
    streams = [machine.kernels.Stream(0) for _ in range(2)]
    machine.in_any_order(seed)
    seen = machine.memory((4, 4, 2, 8), np.float32)
    for turn in range(4):
        machine.streams[0] = streams[turn % 2].ptr
        context = TextGenerationContext(turn, [turn] * 4)
        manager.claim(turn)
        (inputs,) = manager.fetch([context])
        tokens = machine.array(np.full((4, 2, 8), turn + 1, np.float32))
        offsets = np.array([0, 4], np.uint32)
        ops.append(inputs, 0, tokens, tokens, offsets)
        lengths = np.array([4], np.uint32)
        ops.gather(inputs, 0, lengths=lengths, out=(seen[turn], machine.memory((4, 2, 8), "f4")))
        manager.release(turn)
    assert machine.host(seen)[:, 0, 0, 0].tolist() == [1, 2, 3, 4]


def read_elsewhere(machine: Machine, manager: PagedKVCacheManager, *, ordered: bool) -> float:
    """Read a released page on a stream that no fetch used, while the next request writes it."""
    other = machine.kernels.Stream(0)
    seen = machine.memory((4, 2, 8), np.float32)
    for turn in range(2):
        context = TextGenerationContext(turn, [turn] * 4)
        manager.claim(turn)
        (inputs,) = manager.fetch([context])
        tokens = machine.array(np.full((4, 2, 8), turn + 1, np.float32))
        ops.append(inputs, 0, tokens, tokens, np.array([0, 4], np.uint32))
        if turn == 0:
            event = machine.kernels.Event(0)
            machine.kernels.record(event.ptr, 0, 0)
            machine.kernels.wait(event.ptr, 0, other.ptr)
            out = seen, machine.memory((4, 2, 8), np.float32)
            ops.gather(inputs, 0, lengths=np.array([4], np.uint32), out=out, stream=other)
            manager.release(turn, after=other if ordered else None)
    return float(machine.host(seen)[0, 0, 0])


def test_reuse_waits_for_what_release_names(machine: Machine) -> None:
    found: dict[bool, set[float]] = {}
    for ordered in (False, True):
        found[ordered] = set()
        for seed in range(20):
            manager = manager_on(["cuda:0"], num_pages=1)
            machine.in_any_order(seed)
            found[ordered].add(read_elsewhere(machine, manager, ordered=ordered))
    assert found[True] == {1.0}
    assert found[False] == {1.0, 2.0}, "the test would not notice a missing order"


def test_release_takes_events_and_refuses_what_is_neither(machine: Machine) -> None:
    manager = manager_on(["cuda:0"])
    event = machine.kernels.Event(0)
    machine.kernels.record(event.ptr, 0, 0)
    manager.claim("a")
    with pytest.raises(TypeError, match="stream is a str"):
        manager.release("a", after="later")
    assert manager.contains("a")
    manager.release("a", after=event)
    with pytest.raises(kvcore.RequestNotFoundError):
        manager.release("a", after=event)
    on_cpu = manager_on(["cpu"])
    on_cpu.claim("a")
    with pytest.raises(ValueError, match="no pool on a GPU; leave it out"):
        on_cpu.release("a", after=event)
    assert on_cpu.contains("a")


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_pages_swap_to_the_host_and_back(machine: Machine, seed: int | None) -> None:
    """Prompts need more than the four device pages; the copy streams run in any order."""
    page = KVCacheParams("float32", **SIZES).bytes_per_page
    on_gpu = manager_on(["cuda:0"], num_pages=4, host_gb=40 * page / (1 << 30))
    if seed is not None:
        machine.in_any_order(seed)
    prompts = [[i] * 9 for i in range(5)]
    found = []
    for i in [0, 1, 2, 3, 4, 0, 2, 1, 4, 3]:
        context = TextGenerationContext(i, prompts[i])
        on_gpu.claim(i)
        (inputs,) = on_gpu.fetch([context])
        k, v, offsets = new_tokens([context], seed=2)
        for layer in range(SIZES["num_layers"]):
            ops.append(inputs, layer, machine.array(k), machine.array(v), offsets)
        out = tuple(machine.memory((9, 2, 8), np.float32) for _ in range(2))
        ops.gather(inputs, 1, lengths=np.array([9], np.uint32), out=out)
        context.update(7)
        on_gpu.step([context])
        on_gpu.release(i)
        found.append((i, out[0]))
    assert on_gpu.metrics.h2d_blocks_copied == 10
    assert on_gpu.metrics.d2h_blocks_copied == 10
    for i, keys in found:
        fresh = TextGenerationContext("fresh", prompts[i])
        np.testing.assert_array_equal(machine.host(keys), new_tokens([fresh], seed=2)[0])


def test_replicas_and_shards_have_pools_of_their_own(machine: Machine) -> None:
    manager = manager_on(["cuda:0", "cuda:1"], data_parallel_degree=2)
    contexts = [TextGenerationContext(i, list(range(3 + i))) for i in range(2)]
    for replica, context in enumerate(contexts):
        manager.claim(context.request_id, replica)
    first, second = manager.fetch(contexts)
    assert [each.blocks.data.device_id for each in (first, second)] == [0, 1]
    shards = manager_on(["cuda:0", "cuda:1"])
    assert shards.params.tensor_parallel_degree == 2
    context = TextGenerationContext("r", list(range(5)))
    shards.claim("r")
    tables = [machine.host(each.lookup_table).tolist() for each in shards.fetch([context])]
    assert tables[0] == tables[1] == [shards.get_req_blocks("r")]


def test_too_large_a_pool_says_what_was_asked_for_and_what_is_free(machine: Machine) -> None:
    page = KVCacheParams("float32", **SIZES).bytes_per_page
    pages = BYTES // page + 1
    with pytest.raises(MemoryError, match=f"{pages * page} bytes are asked for on cuda:0, {BYTES}"):
        manager_on(["cuda:0"], num_pages=pages)


def test_devices_that_cannot_be_had_are_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"device is cuda:2, the driver shows cuda:0 \.\. cuda:1"):
        manager_on(["cuda:2"])
    with pytest.raises(ValueError, match="all in host memory or all on GPUs"):
        manager_on(["cpu", "cuda:0"])


def test_pools_of_the_caller_are_taken_where_the_devices_say(machine: Machine) -> None:
    params = KVCacheParams("bfloat16", **SIZES)
    shape = (16, 2, 2, 4, 2, 8)
    pool = machine.memory(shape, np.uint16)
    manager = PagedKVCacheManager(params, 4, 64, devices=["cuda:0"], num_pages=16, blocks=[pool])
    blocks = pools_of(manager)
    assert blocks.data.ptr == pool.data.ptr
    assert blocks.dtype.name == "bfloat16"
    elsewhere = machine.memory(shape, np.uint16, device=1)
    with pytest.raises(ValueError, match="on cuda:1, must be on cuda:0"):
        PagedKVCacheManager(params, 4, 64, devices=["cuda:0"], num_pages=16, blocks=[elsewhere])


def test_steps_of_a_multi_step_run_advance_on_the_device(machine: Machine) -> None:
    manager = manager_on(["cuda:0"])
    contexts = [TextGenerationContext(i, list(range(3 + i))) for i in range(2)]
    for context in contexts:
        manager.claim(context.request_id)
    inputs = manager.fetch(contexts, num_steps=2)
    offsets = machine.array(np.array([0, 3, 7], np.uint32))
    (advanced,) = manager.increment_cache_lengths(inputs, offsets)
    assert machine.host(advanced.cache_lengths).tolist() == [3, 4]
    assert machine.host(inputs[0].cache_lengths).tolist() == [0, 0]
    assert advanced.max_lengths.tolist() == [[1, 5]]


def test_views_read_and_write_elements_on_the_device(machine: Machine) -> None:
    manager = manager_on(["cuda:0"])
    context = TextGenerationContext("r", list(range(6)))
    manager.claim("r")
    (view,) = manager.fetch_collection([context])
    assert view.cache_length(0) == 0
    keys = view.get_key_cache(1)
    assert keys.empty_cache()
    keys.store(0, 1, 5, 7, 2.5)
    assert keys.load(0, 1, 5, 7) == 2.5
    page = manager.get_req_blocks("r")[1]
    assert machine.host(pools_of(manager))[page, 0, 1, 1, 1, 7] == 2.5
    with pytest.raises(IndexError, match="tok"):
        keys.load(0, 0, 8, 0)
    manager.release("r")
    with pytest.raises(kvcore.InvalidHandleError):
        keys.load(0, 0, 0, 0)


def test_slots_on_a_gpu_are_those_of_the_cpu(machine: Machine) -> None:
    params = KVCacheParams("float32", 2, 8, 2)
    manager = kvcore.ContinuousBatchingKVCacheManager(params, 4, 16, 2, ["cuda:1"])
    ids = manager.claim(2)
    manager.step({ids[0]: 5, ids[1]: 3})
    inputs = manager.fetch(ids)
    assert [each.data.device_id for each in inputs[0]] == [1] * 4
    assert machine.host(inputs[0].cache_lengths).tolist() == [5, 3]
    assert machine.host(inputs[0].lookup_table).tolist() == ids
    assert machine.host(inputs[0].is_cache_empty).tolist() == [False]
    offsets = machine.array(np.array([0, 1, 3], np.uint32), device=1)
    (advanced,) = manager.increment_cache_lengths(inputs, offsets)
    assert machine.host(advanced.cache_lengths).tolist() == [6, 5]
    (view,) = manager.fetch_collection(ids, new_tokens=[4, 1])
    assert (view.max_seq_length, view.max_cache_length) == (4, 9)
    view.get_value_cache(0).store(1, 0, 2, 0, 9.0)
    assert view.get_value_cache(0).load(1, 0, 2, 0) == 9.0
