# SPDX-License-Identifier: Apache-2.0
"""Quantised caches: hits, parts of pages, forks, truncation, eviction, views."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_params
from families import forks
from kvcore import ops
from kvcore.support.dtypes import NARROW, numpy_dtype

LAYERS = 2
PAGE = 4
# Half a code step, as a fraction of the group's largest value.
HALF_STEP = {"float8_e4m3fn": 16 / 448, "float8_e5m2": 4096 / 57344, "int8": 0.5 / 127}
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}

SHAPES: list[dict[str, Any]] = [
    {"kv_scale_granularity": 8},
    {"kv_scale_granularity": 4, "v_head_dim": 12},
    {"kv_scale_granularity": 8, "is_mla": True},
    {},
    {"v_head_dim": 5},
    {"is_mla": True},
]


def cache_of(dtype: str, num_pages: int = 24, **rest: Any) -> kvcore.PagedKVCacheManager:
    shape = {"n_kv_heads": 1 if rest.get("is_mla") else 3, "head_dim": 24, "num_layers": LAYERS}
    params = make_params(PAGE, dtype=dtype, **(shape | rest))
    return kvcore.PagedKVCacheManager(
        params, 16, 256, num_pages=num_pages, enable_runtime_checks=True
    )


class Engine:
    """Runs batches; K and V of a token depend on all tokens up to it, as in a model."""

    def __init__(self, manager: kvcore.PagedKVCacheManager) -> None:
        self.manager = manager
        params = manager.params
        self.dtype = params.dtype
        self.group = params.kv_scale_granularity
        self.shapes = [(params.n_kv_heads_per_device, width) for width in params.row_widths]
        if params.is_mla:
            self.shapes = self.shapes[:1]

    def values(self, context: Any, layer: int, begin: int, end: int) -> list[Any]:
        """Return K and V as the model computes them, [tokens, heads, width] float32."""
        tokens = np.asarray(context.tokens, np.int32)
        seeds = [zlib.crc32(tokens[: n + 1].tobytes(), layer) for n in range(begin, end)]
        return [
            np.array(
                [np.random.default_rng([s, part]).normal(0, 2, shape) for s in seeds], np.float32
            ).reshape(-1, *shape)
            for part, shape in enumerate(self.shapes)
        ]

    def stored(self, x: Any) -> tuple[Any, Any]:
        """Quantise and dequantise contiguous values; return them and the largest allowed error."""
        if self.group is None:
            wide = np.clip(x, -LARGEST[self.dtype], LARGEST[self.dtype])
            wide = np.rint(wide) if self.dtype == "int8" else wide
            codes = wide.astype(numpy_dtype(self.dtype))
            return codes.astype(np.float32), None
        codes, scales = ops.quantize(x, self.dtype, self.group)
        limit = np.repeat(scales, self.group, -1) * LARGEST[self.dtype] * HALF_STEP[self.dtype]
        return ops.dequantize(codes, scales, "float32"), limit * (1 + 1e-5)

    def check(self, inputs: Any, batch: Sequence[Any], ends: Sequence[int]) -> None:
        lengths = np.array(ends, np.uint32)
        for layer in range(LAYERS):
            k, v, offsets = ops.gather(inputs, layer, lengths=lengths, dtype="float32", threads=2)
            read = [k] if v is None else [k, v]
            for context, (begin, end) in zip(batch, pairwise(offsets), strict=True):
                expected = self.values(context, layer, 0, int(end - begin))
                for x, found in zip(expected, read, strict=True):
                    back, limit = self.stored(x)
                    assert np.array_equal(found[begin:end], back)
                    if limit is not None:
                        assert (np.abs(back - x) <= limit).all()

    def forward(self, batch: Sequence[Any]) -> None:
        """Check the batch's cached values, write the new values, and check all values."""
        (inputs,) = self.manager.fetch(batch)
        self.check(inputs, batch, [context.start_idx for context in batch])
        counts = [context.active_idx - context.start_idx for context in batch]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        for layer in range(LAYERS):
            new = [self.values(c, layer, c.start_idx, c.active_idx) for c in batch]
            joined = [np.concatenate(parts) for parts in zip(*new, strict=True)]
            k, v = joined if len(joined) == 2 else (joined[0], None)
            ops.append(inputs, layer, k, v, offsets, threads=2)
        self.check(inputs, batch, [context.active_idx for context in batch])

    def run(self, batch: Sequence[Any], sampled: int = 0) -> None:
        self.forward(batch)
        for context in batch:
            context.update(sampled)
        self.manager.step(batch)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_hits_read_codes_and_scales(dtype: str, shape: dict[str, Any]) -> None:
    manager = cache_of(dtype, **shape)
    engine = Engine(manager)
    first = claimed(manager, range(11))
    engine.run([first])
    engine.run([first])
    second = claimed(manager, [*range(8), 90, 91])
    engine.run([second, first])
    assert manager.metrics.cache_tokens == 8
    engine.run([first, second])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES)
def test_part_of_a_page_brings_its_scales(dtype: str, shape: dict[str, Any]) -> None:
    manager = cache_of(dtype, **shape)
    engine = Engine(manager)
    first = claimed(manager, range(12))
    engine.run([first])
    second = claimed(manager, [*range(10), 90, 91, 92])
    engine.run([second])
    assert (manager.metrics.cache_tokens, manager.metrics.copied_tokens) == (10, 2)
    engine.run([first, second])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES)
def test_forks_read_what_their_parent_wrote(dtype: str, shape: dict[str, Any]) -> None:
    """Parent and children continue in a shared page: each request gets its own copy."""
    manager = cache_of(dtype, **shape)
    engine = Engine(manager)
    parent = claimed(manager, range(6))
    engine.run([parent], sampled=6)
    family = [parent, *forks(manager, parent, 2)]
    for turn in range(5):
        for row in family:
            engine.run([row], sampled=100 * turn + family.index(row))
    engine.run(family)
    manager.release(parent.request_id)
    engine.run(family[1:])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES)
def test_rejected_tokens_are_written_again(dtype: str, shape: dict[str, Any]) -> None:
    manager = cache_of(dtype, **shape)
    engine = Engine(manager)
    context = claimed(manager, range(5))
    engine.run([context], sampled=5)
    context.extend([50, 51, 52])
    engine.run([context], sampled=53)
    manager.truncate(context.request_id, 7)
    context.rewind(7)
    context.extend([60, 61])
    engine.run([context])
    engine.run([context])


@pytest.mark.parametrize("dtype", NARROW)
def test_pages_of_evicted_sequences_keep_no_scales(dtype: str) -> None:
    """In a small pool every page changes its owner, together with its scales."""
    manager = cache_of(dtype, num_pages=6, kv_scale_granularity=12)
    engine = Engine(manager)
    rng = np.random.default_rng(1)
    for turn in range(12):
        context = claimed(manager, rng.integers(0, 3, 5 + turn % 7).tolist())
        engine.run([context])
        engine.run([context], sampled=turn)
        manager.release(context.request_id)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("granularity", [4, 24])
def test_views_load_and_store_through_the_scales(dtype: str, granularity: int) -> None:
    manager = cache_of(dtype, kv_scale_granularity=granularity)
    engine = Engine(manager)
    context = claimed(manager, range(6))
    engine.run([context])
    (view,) = manager.fetch_collection([context])
    keys, values = view.get_key_cache(1), view.get_value_cache(1)
    x = engine.values(context, 1, 0, 6)
    for cache, expected in ((keys, x[0]), (values, x[1])):
        back, _ = engine.stored(expected)
        loaded = [[[cache.load(0, h, t, d) for d in range(24)] for h in range(3)] for t in range(6)]
        assert np.array_equal(np.array(loaded, np.float32), back)
    back, limit = engine.stored(x[0])
    keys.store(0, 2, 5, 7, float(x[0][5, 2, 6]))
    assert abs(keys.load(0, 2, 5, 7) - x[0][5, 2, 6]) <= limit[5, 2, 6]
    assert keys.load(0, 2, 5, 8) == back[5, 2, 8]


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_count_the_scales(shape: dict[str, Any]) -> None:
    manager = cache_of("int8", num_pages=5, **shape)
    (inputs,) = manager.fetch([])
    parts = [
        array
        for part in (inputs.blocks, inputs.kv_scales)
        for array in (part if isinstance(part, tuple) else (part,))
        if array is not None
    ]
    assert sum(array.nbytes for array in parts) == 5 * manager.params.bytes_per_page
    estimate = kvcore.PagedKVCacheManager.estimated_memory_size(
        manager.params, 1, PAGE * 3, LAYERS, 1 << 30, ["cpu"]
    )
    assert estimate == 3 * manager.params.bytes_per_page


def test_shards_have_scales_of_their_own() -> None:
    params = make_params(
        4, shards=2, dtype="int8", n_kv_heads=4, head_dim=8, kv_scale_granularity=8
    )
    manager = kvcore.PagedKVCacheManager(params, 4, 64, num_pages=8, devices=["cpu", "cpu"])
    context = make_context(range(5))
    manager.claim(context.request_id)
    offsets, lengths = np.array([0, 5], np.uint32), np.array([5], np.uint32)
    shards = manager.fetch([context])
    x = np.random.default_rng(2).normal(size=(5, 4, 8)).astype(np.float32)
    for i, inputs in enumerate(shards):
        ops.append(inputs, 0, x[:, 2 * i : 2 * i + 2], x[:, 2 * i : 2 * i + 2], offsets)
    read = [ops.gather(inputs, 0, lengths=lengths)[0] for inputs in shards]
    codes, scales = ops.quantize(x, "int8", 8)
    assert np.array_equal(np.concatenate(read, 1), ops.dequantize(codes, scales, "float32"))
