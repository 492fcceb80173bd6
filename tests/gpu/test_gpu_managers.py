# SPDX-License-Identifier: Apache-2.0
"""Managers with pools on a GPU in lockstep with managers in host memory: equal pages and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import gpu_arrays
import kvcore
from builders import make_context, make_params
from gpu_arrays import Put, normal, on_gpu, on_host, to_host
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from same_arrays import same_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

PAGE, LAYERS, HEADS, DIM = 4, 2, 2, 24


class Server:
    """Run batches on one manager, with K and V from a seed, and keep all arrays that are read."""

    def __init__(self, device: str, put: Put, num_pages: int = 24, **rest: Any) -> None:
        shape: dict[str, Any] = {"n_kv_heads": HEADS, "head_dim": DIM, "num_layers": LAYERS}
        params = make_params(PAGE, **(shape | rest))
        self.manager = kvcore.PagedKVCacheManager(
            params, 16, 256, devices=[device], num_pages=num_pages, enable_runtime_checks=True
        )
        self.put, self.rng = put, np.random.default_rng(11)
        self.dtype = numpy_dtype("float32" if params.kv_scale_granularity else params.dtype)
        self.is_mla = params.is_mla
        self.widths = DIM, params.v_head_dim or DIM
        self.seen: list[Any] = []

    def claim(self, tokens: Sequence[int], name: str) -> Any:
        context = make_context(tokens, name)
        self.manager.external_claim(name, replica_idx=0)
        return context

    def run(self, batch: Sequence[Any], sampled: int = 0, num_steps: int = 1) -> None:
        (inputs,) = self.manager.fetch(batch, num_steps)
        counts = [context.active_idx - context.start_idx for context in batch]
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        offsets = self.put(ends)
        lengths = np.array([context.active_idx for context in batch], np.uint32)
        heads = 1 if self.is_mla else HEADS
        for layer in range(LAYERS):
            size = int(ends[-1]), heads
            k, v = (self.put(normal(self.rng, (*size, n), self.dtype)) for n in self.widths)
            ops.append(inputs, layer, k, None if self.is_mla else v, offsets)
            read = ops.gather(inputs, layer, lengths=lengths)
            self.seen += [to_host(x) for x in read if x is not None]
        self.seen += [np.array(to_host(inputs.cache_lengths)), np.array(inputs.max_lengths)]
        self.seen.append(np.array(to_host(inputs.lookup_table)))
        for context in batch:
            context.update(sampled)
        self.manager.step(batch)

    def results(self) -> list[Any]:
        metrics = self.manager.metrics
        counts = [
            metrics.input_tokens,
            metrics.cache_tokens,
            metrics.copied_tokens,
            metrics.evicted_pages,
            metrics.h2d_blocks_copied,
            metrics.d2h_blocks_copied,
        ]
        probe = self.claim([7, 7], "probe")
        (inputs,) = self.manager.fetch([probe])
        pools = inputs.blocks if isinstance(inputs.blocks, tuple) else (inputs.blocks,)
        return [*self.seen, np.array(counts), *(to_host(pool) for pool in pools)]


def check_lockstep(script: Callable[[Server], None], **settings: Any) -> None:
    found = []
    for device, put in (("cpu", on_host), ("cuda:0", on_gpu)):
        server = Server(device, put, **settings)
        script(server)
        found.append(server.results())
    expected, results = found
    assert len(expected) == len(results)
    for i, pair in enumerate(zip(expected, results, strict=True)):
        assert same_bytes(*pair), f"array {i} differs"


def chat(server: Server) -> None:
    """Run prefix hits, copies of partial pages, forks, rejected tokens and decoding."""
    first = server.claim(range(11), "first")
    server.run([first], sampled=11)
    server.run([first], sampled=12)
    second = server.claim([*range(9), 90, 91, 92], "second")  # ends inside a page of the first
    server.run([second, first])
    child = make_context([*first.tokens[: first.start_idx].tolist(), 500], "child")
    server.manager.fork("first", child)
    for turn in range(6):
        server.run([first], sampled=100 + turn)
        server.run([child, second], sampled=200 + turn)
    second.extend([50, 51, 52])
    server.run([second], sampled=53)
    end = second.start_idx - 2
    server.manager.truncate("second", end)
    second.rewind(end)
    second.extend([60, 61])
    server.run([second, child, first])
    server.manager.release("first")
    server.run([child, second])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.reduced
def test_a_chat_leaves_the_host_s_bytes(dtype: str) -> None:
    check_lockstep(chat, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("rest", [{}, {"kv_scale_granularity": 8}, {"v_head_dim": 16}])
def test_a_chat_over_codes_leaves_the_host_s_bytes(dtype: str, rest: dict[str, Any]) -> None:
    check_lockstep(chat, dtype=dtype, **rest)


def test_a_chat_over_latent_rows_leaves_the_host_s_bytes() -> None:
    check_lockstep(chat, dtype="bfloat16", is_mla=True, n_kv_heads=1)


def test_a_pool_that_is_too_small_changes_hands_as_on_the_host() -> None:
    def script(server: Server) -> None:
        rng = np.random.default_rng(2)
        for turn in range(15):
            context = server.claim(rng.integers(0, 3, 5 + turn % 7).tolist(), f"turn {turn}")
            server.run([context])
            server.run([context], sampled=turn)
            server.manager.release(f"turn {turn}")

    check_lockstep(script, num_pages=6, dtype="float16")


def test_pages_that_went_to_the_host_tier_come_back() -> None:
    """With a small pool and a large host tier, the second visit of a prompt is a hit."""

    def script(server: Server) -> None:
        for visit in range(2):
            for who in range(4):
                name = f"{who}.{visit}"
                context = server.claim([who] * 9 + [visit], name)
                server.run([context])
                server.manager.release(name)
        assert server.manager.metrics.h2d_blocks_copied > 0

    page_bytes = 2 * LAYERS * PAGE * HEADS * DIM * 2
    check_lockstep(
        script,
        num_pages=5,
        dtype="float16",
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=64 * page_bytes / 2**30,
    )


def test_arrays_of_a_fetch_are_the_gpu_s() -> None:
    server = Server("cuda:0", on_gpu, dtype="float16")
    context = server.claim(range(6), "one")
    (inputs,) = server.manager.fetch([context], 3)
    for array in (inputs.blocks, inputs.cache_lengths, inputs.lookup_table):
        assert isinstance(array, cupy.ndarray)
        assert array.device.id == 0
    assert isinstance(inputs.max_lengths, np.ndarray)
    held = to_host(inputs.cache_lengths), to_host(inputs.lookup_table)
    context.update(1)
    server.manager.step([context])
    server.manager.fetch([context])
    assert np.array_equal(held[0], to_host(inputs.cache_lengths))
    assert np.array_equal(held[1], to_host(inputs.lookup_table))


def test_lengths_advance_on_the_device() -> None:
    server = Server("cuda:0", on_gpu, dtype="float16")
    context = server.claim(range(6), "one")
    inputs = server.manager.fetch([context], 3)
    offsets = on_gpu(np.array([0, 6], np.uint32))
    (later,) = server.manager.increment_cache_lengths(inputs, offsets)
    assert to_host(later.cache_lengths).tolist() == [6]
    assert to_host(inputs[0].cache_lengths).tolist() == [0]
    assert len(later.max_lengths) == 2
    assert later.blocks.data.ptr == inputs[0].blocks.data.ptr


def test_pages_are_not_written_again_before_work_that_reads_them_is_done() -> None:
    """A stream reads pages after much other work; meanwhile another request gets the pages."""
    server = Server("cuda:0", on_gpu, num_pages=3, dtype="float32", enable_prefix_caching=False)
    first = server.claim(range(9), "first")
    server.run([first])
    (inputs,) = server.manager.fetch([first])
    expected = to_host(ops.gather(inputs, 0, lengths=np.array([9], np.uint32))[0])
    busy = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with busy:
        load = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(50):
            load = load @ load
        read = ops.gather(inputs, 0, lengths=np.array([9], np.uint32))[0]
    server.manager.release("first", after=busy)
    second = server.claim(range(100, 109), "second")
    server.run([second])
    busy.synchronize()
    assert same_bytes(expected, to_host(read))
