# SPDX-License-Identifier: Apache-2.0
"""Memory, dtypes and streams of torch tensors and jax arrays on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import on_gpu, to_host
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import WIDE
from same_arrays import same_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM, TOKENS = 16, 8, 128, 300


def batch_of(torch: Any, dtype: Any) -> tuple[PagedBatch, Any]:
    pages = -(-TOKENS // PAGE)
    shape = (pages + 3, PAGE, HEADS, DIM)
    pools = [torch.zeros(shape, device="cuda", dtype=torch.float32).to(dtype) for _ in "kv"]
    table = torch.randperm(pages + 3, device="cuda")[:pages].to(torch.int32).view(1, pages)
    lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
    batch = PagedBatch(pools[0], pools[1], table.view(torch.uint32), lengths.view(torch.uint32))
    return batch, torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("has_stream", [False, True])
def test_tensors_are_worked_on_on_torch_s_current_stream(dtype: str, has_stream: bool) -> None:
    """K is written late on torch's stream, so a copy on another stream would read old bytes."""
    torch = gpu_arrays.require_torch()
    kind = getattr(torch, dtype)
    stream = torch.cuda.Stream() if has_stream else torch.cuda.current_stream()
    busy = torch.ones((4096, 4096), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        batch, offsets = batch_of(torch, kind)
        for _ in range(10):  # some milliseconds
            busy = busy @ busy * 1e-4
        k = torch.randn((TOKENS, HEADS, DIM), device="cuda").to(kind)
        k = k + busy[0, 0].to(kind) * 0
        v = -k
        ops.append(batch, 0, k, v, offsets)
        read, values, _ = ops.gather(batch, 0, lengths=np.array([TOKENS], np.uint32))
        assert isinstance(read, torch.Tensor)
        assert read.dtype == kind
        assert torch.equal(read, k)
        assert torch.equal(values, v)


def test_tensors_of_float8_keep_their_bits() -> None:
    torch = gpu_arrays.require_torch()
    codes = torch.randint(0, 126, (TOKENS, HEADS, DIM), device="cuda", dtype=torch.uint8)
    k = codes.view(torch.float8_e4m3fn)
    batch, offsets = batch_of(torch, torch.float8_e4m3fn)
    ops.append(batch, 0, k, k, offsets)
    read, _, _ = ops.gather(batch, 0, lengths=np.array([TOKENS], np.uint32))
    assert torch.equal(read.view(torch.uint8), codes)


def test_attention_of_tensors_is_torch_s() -> None:
    torch = gpu_arrays.require_torch()
    gpu_arrays.require_compiler()
    with torch.cuda.stream(torch.cuda.Stream()):
        batch, offsets = batch_of(torch, torch.bfloat16)
        q, k, v = (
            torch.randn((TOKENS, n, DIM), device="cuda").to(torch.bfloat16)
            for n in (4 * HEADS, HEADS, HEADS)
        )
        ops.append(batch, 0, k, v, offsets)
        o = ops.attention(batch, 0, q, offsets)
        q, k, v = (x.transpose(0, 1)[None].float() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        assert isinstance(o, torch.Tensor)
        torch.testing.assert_close(o.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_torch_graph_holds_append_and_attention() -> None:
    torch = gpu_arrays.require_torch()
    gpu_arrays.require_compiler()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch, offsets = batch_of(torch, torch.float16)
        q, k = (
            torch.randn((TOKENS, n, DIM), device="cuda").to(torch.float16)
            for n in (2 * HEADS, HEADS)
        )
        out = torch.zeros_like(q)
        size = ops.attention_scratch(batch, q, 2)
        scratch = torch.zeros(size, device="cuda")

        def step() -> None:
            ops.append(batch, 0, k, k, offsets)
            ops.attention(batch, 0, q, offsets, out=out, scratch=scratch, splits=2)

        step()
        side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.cuda.stream(side):
            k.normal_()
            q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        found = out.clone()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        assert torch.equal(found, out)


def test_arrays_of_jax_are_read() -> None:
    jax = gpu_arrays.require_jax()
    pool = cupy.zeros((4, PAGE, HEADS, DIM), np.float32)
    table, lengths = on_gpu(np.array([[2, 1]], np.uint32)), on_gpu(np.zeros(1, np.uint32))
    k = np.random.default_rng(3).standard_normal((20, HEADS, DIM), np.float32)
    batch = PagedBatch(pool, None, table, lengths)
    ops.append(batch, 0, jax.numpy.asarray(k), None, jax.numpy.array([0, 20], np.uint32))
    read, _, _ = ops.gather(batch, 0, lengths=np.array([20], np.uint32))
    assert same_bytes(k, to_host(read))
