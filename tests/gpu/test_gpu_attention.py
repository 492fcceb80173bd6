# SPDX-License-Identifier: Apache-2.0
"""Attention that Triton compiles for this GPU, compared with the oracle.

``TRITON_INTERPRET=0 python -m pytest tests/gpu/test_gpu_attention.py`` takes some minutes, mostly
to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from attention_oracle import assert_close, assert_lse
from attention_scenes import DTYPES, Scene
from gpu_arrays import on_gpu, to_host
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import NARROW, WIDE
from latent_rows import Latent
from nvfp4_scenes import Nvfp4Scene

cupy = gpu_arrays.require_gpu()
gpu_arrays.require_compiler()
pytestmark = [pytest.mark.gpu]


def moved(scene: Scene) -> tuple[PagedBatch, Any]:
    batch = scene.batch

    def put(array: Any) -> Any:
        return on_gpu(array) if isinstance(array, np.ndarray) else array

    pools = put(batch.key_pool), put(batch.value_pool)
    step = put(scene.table), put(batch.cache_lengths)
    scales = put(batch.key_scales), put(batch.value_scales)
    fused = on_gpu(scene.q.base)
    q = fused[:, 1 : 1 + scene.q_heads, 2 : 2 + scene.dim]
    more = batch.global_scales
    return PagedBatch(*pools, *step, batch.layout, *scales, global_scales=more), q


def check(scene: Scene, splits: int | None = None, **rule: Any) -> None:
    batch, q = moved(scene)
    o, lse = ops.attention(
        batch, 0, q, on_gpu(scene.offsets), return_lse=True, splits=splits, **rule
    )
    expected, sums = scene.expected(**rule)
    assert_close(to_host(o), expected, scene.q_dtype)
    if scene.scales == "tokens":  # K is rounded if each token has its own scales
        np.testing.assert_allclose(to_host(lse), sums, atol=2e-2, rtol=1e-5)
    else:
        assert_lse(to_host(lse), sums)


@pytest.mark.parametrize("q_dtype", WIDE)
@pytest.mark.parametrize(("dim", "new"), [(128, 1), (64, 40), (80, 3)])
@pytest.mark.reduced
def test_pools_in_nvfp4(q_dtype: str, dim: int, new: int) -> None:
    scale = np.array([0.02], np.float32)
    scene = Nvfp4Scene(
        cached=[300, 0, 41],
        new=[new, new, 2],
        dim=dim,
        group=4,
        q_dtype=q_dtype,
        layout="HND" if dim == 64 else "NHD",
        global_scales=(0.75, scale),
    )
    check(scene)
    check(scene, splits=3)


# Each case compiles one or two kernels, in seconds, so these are pairs and not all combinations.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", range(2))
def test_every_dtype(dtype: str, turn: int) -> None:
    i = DTYPES.index(dtype)
    kinds = ("number", "heads", "tokens") if dtype == "int8" else ("none", "heads", "tokens")
    for new in ([1, 1, 1], [40, 1, 300]):
        scene = Scene(
            cached=[700, 0, 45],
            new=new,
            dim=128,
            group=4,
            dtype=dtype,
            q_dtype=WIDE[(i + turn) % 3],
            scales=kinds[(i + 2 * turn) % 3] if dtype in NARROW else "none",
        )
        check(scene)


@pytest.mark.parametrize(
    ("page", "group", "dim", "rule"),
    [
        (1, 1, 59, {}),
        (3, 3, 64, {"window": 30}),
        (64, 8, 80, {"chunk": 64, "soft_cap": 20.0}),
        (256, 64, 128, {"causal": False, "splits": 7}),
    ],
)
def test_pages_groups_and_rules(page: int, group: int, dim: int, rule: dict[str, Any]) -> None:
    for new in ([2, 1], [2, 70]):
        check(
            Scene(
                cached=[500, 3],
                new=new,
                page=page,
                group=group,
                dim=dim,
                dtype="bfloat16",
                q_dtype="bfloat16",
            ),
            **rule,
        )


@pytest.mark.parametrize("dim", [96, 256, 512])
def test_large_heads(dim: int) -> None:
    for new in ([1], [90]):
        check(Scene(cached=[300], new=new, dim=dim, dtype="float16", q_dtype="float16"))


def replay(graph: Any, stream: Any, held: tuple[Any, Any], scene: Scene) -> None:
    """Copy a scene to the memory that a captured call reads, and replay the call."""
    batch, q = held
    other, other_q = moved(scene)
    for to, source in (
        (batch.key_pool, other.key_pool),
        (batch.value_pool, other.value_pool),
        (batch.lookup_table, other.lookup_table),
        (batch.cache_lengths, other.cache_lengths),
        (q, other_q),
    ):
        to[...] = source
    cupy.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_rows_of_656_bytes(heads: int) -> None:
    latent = Latent(300, 2, rank=512, rope=64, page=64, heads=heads)
    rows = np.full((*latent.pool.shape[:2], 656), 0xFF, np.uint8)
    batch = PagedBatch(rows, None, latent.table, np.zeros(1, np.uint32), "MLA_FP8")
    ops.append(batch, 0, latent.rows[:, None], None, np.array([0, 302], np.uint32))
    stored, _, _ = ops.gather(batch, 0, lengths=np.array([302], np.uint32))
    expected, _ = latent.expected(stored[:, 0], scale=0.06)
    device = PagedBatch(on_gpu(rows), None, on_gpu(latent.table), on_gpu(latent.cached), "MLA_FP8")
    o = ops.attention(device, 0, on_gpu(latent.q), on_gpu(latent.offsets), scale=0.06)
    assert_close(to_host(o), expected, "float32")


def test_a_captured_call_serves_other_lengths_and_pages() -> None:
    scenes = [Scene(cached=[n, 40], new=[1, 1], q_dtype="float16", seed=n) for n in (90, 95)]
    batch, q = moved(scenes[0])
    offsets, out = on_gpu(scenes[0].offsets), cupy.empty(q.shape, q.dtype)
    scratch = cupy.empty(ops.attention_scratch(batch, q, 4), np.float32)
    asked: dict[str, Any] = {"out": out, "scratch": scratch, "splits": 4}
    stream = cupy.cuda.Stream(non_blocking=True)
    ops.attention(batch, 0, q, offsets, stream=stream, **asked)  # compiles
    stream.synchronize()
    with stream:
        stream.begin_capture()
        ops.attention(batch, 0, q, offsets, stream=stream, **asked)
        graph = stream.end_capture()
    for scene in (*scenes, scenes[0]):
        replay(graph, stream, (batch, q), scene)
        assert_close(to_host(out), scene.expected()[0], "float16")


@pytest.mark.parametrize("splits", [1, 4])
def test_a_captured_call_returns_logarithms(splits: int) -> None:
    scenes = [Scene(cached=[n, 40], new=[1, 1], seed=n) for n in (90, 95)]
    batch, q = moved(scenes[0])
    offsets = on_gpu(scenes[0].offsets)
    pair = cupy.empty(q.shape, q.dtype), cupy.empty(q.shape[:2], np.float32)
    scratch = cupy.empty(max(1, ops.attention_scratch(batch, q, splits)), np.float32)
    asked: dict[str, Any] = {"out": pair, "return_lse": True, "scratch": scratch, "splits": splits}
    stream = cupy.cuda.Stream(non_blocking=True)
    ops.attention(batch, 0, q, offsets, stream=stream, **asked)  # compiles
    stream.synchronize()
    with stream:
        stream.begin_capture()
        found = ops.attention(batch, 0, q, offsets, stream=stream, **asked)
        graph = stream.end_capture()
    assert found[0] is pair[0]
    assert found[1] is pair[1]
    for scene in (*scenes, scenes[0]):
        replay(graph, stream, (batch, q), scene)
        expected, sums = scene.expected()
        assert_close(to_host(pair[0]), expected, "float32")
        assert_lse(to_host(pair[1]), sums)


def test_shared_prefixes_and_lists_of_pages() -> None:
    scene = Scene(
        cached=[90, 100, 95, 200], new=[1, 3, 1, 1], group=4, shared=[([0, 1, 3], 3), ([0, 3], 5)]
    )
    batch, q = moved(scene)
    o = ops.cascade_attention(batch, 0, q, scene.offsets, scene.groups())
    assert_close(to_host(o), scene.expected()[0], "float32")
    expected = ops.page_indices(scene.batch, scene.offsets)
    found = ops.page_indices(batch, on_gpu(scene.offsets))
    total = int(expected.indptr[-1])
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        size = total if i == 1 else len(a)
        assert np.array_equal(a[:size], to_host(b)[:size])
