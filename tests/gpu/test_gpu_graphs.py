# SPDX-License-Identifier: Apache-2.0
"""Replays of graphs that are captured once on a GPU: the same bytes as steps without graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import on_gpu, to_host
from graph_steps import SHAPES, Run, wide
from kvcore import KVCacheParams, RaggedKVCacheInputs, TextGenerationContext, ops
from kvcore.cuda import GraphBatch
from same_arrays import same_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = [pytest.mark.gpu]

ROWS, TOKENS = 5, 40


class Model:
    """A step on memory with fixed addresses: append, and attention if `splits` is not 0."""

    def __init__(self, params: KVCacheParams, splits: int) -> None:
        self.splits = splits
        heads = [wide(layer, params) for layer in range(params.num_layers)]
        self.k = [cupy.zeros((TOKENS, n, 4), np.float32) for n in heads]
        self.out = [cupy.zeros((TOKENS, n, 4), np.float32) for n in heads]
        self.scratch = cupy.zeros((splits * TOKENS * max(heads) * 5,), np.float32)
        self.skipped = cupy.zeros((1,), np.int32)

    def compute(self, contexts: list[TextGenerationContext]) -> None:
        rows = [c.tokens[c.start_idx : c.active_idx] for c in contexts]
        new = np.concatenate([np.empty(0, np.int32), *rows])
        for layer, k in enumerate(self.k):
            found = np.full(k.shape, np.nan, np.float32)  # padding, which no call may write
            found[: len(new)] = (10 * layer + new.astype(np.float32))[:, None, None]
            k.set(found)
            self.out[layer][...] = 0

    def captured(self, batch: GraphBatch) -> None:
        batch.build_slots()
        for layer, k in enumerate(self.k):
            ops.append_slots(batch.inputs, layer, k, k, batch.slots(layer), out=self.skipped)
            self.attend(batch.inputs, layer, batch.row_offsets, TOKENS)
        batch.advance()

    def eager(self, inputs: RaggedKVCacheInputs) -> None:
        offsets = on_gpu(np.asarray(inputs.row_offsets))
        n = int(inputs.row_offsets[-1])
        for layer, k in enumerate(self.k):
            ops.append(inputs, layer, k[:n], k[:n], offsets)
            self.attend(inputs, layer, offsets, n)

    def attend(self, inputs: RaggedKVCacheInputs, layer: int, offsets: Any, n: int) -> None:
        if self.splits:
            ops.attention(
                inputs, layer, self.k[layer][:n], offsets, out=self.out[layer][:n],
                splits=self.splits, scratch=self.scratch,
            )  # fmt: skip


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_64_replays_are_eager_steps_bit_for_bit(shape: str, splits: int) -> None:
    if splits:
        gpu_arrays.require_compiler()
    params = SHAPES[shape]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        runs = Run(params), Run(params)
        (first,) = runs[0].manager.fetch([])
        models = [Model(params, splits) for _ in runs]
        batch = GraphBatch(first, ROWS, 100, tokens_per_row=8)
        models[0].captured(batch)  # loads and compiles all kernels before the capture
        stream.synchronize()
        stream.begin_capture()
        models[0].captured(batch)
        graph = stream.end_capture()

        def replay(inputs: RaggedKVCacheInputs) -> None:
            batch.load(inputs)
            graph.launch(stream)

        for turn in range(64):
            for run, model, how in zip(runs, models, (replay, models[1].eager), strict=True):
                if turn % 7 == 0:
                    run.end(turn % 3)
                    run.begin(min(1 + turn % 4, ROWS - len(run.contexts)), seed=turn)
                run.step(model, how)  # type: ignore[arg-type]
            for ours, theirs in zip(models[0].out, models[1].out, strict=True):
                assert same_bytes(to_host(ours), to_host(theirs))
                assert not splits or bool(ours.any())
            assert to_host(models[0].skipped).tolist() == [0]
        for pools in zip(*(blocks_of(run) for run in runs), strict=True):
            assert same_bytes(*pools)


def blocks_of(run: Run) -> list[Any]:
    (inputs,) = run.manager.fetch([])
    parts = inputs.blocks if isinstance(inputs.blocks, tuple) else (inputs.blocks,)
    return [to_host(part) for part in parts]


def test_a_graph_compacts_by_the_rows_of_each_replay() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    table = np.arange(60, dtype=np.int32).reshape(6, 10)
    device, kept = on_gpu(table), on_gpu(np.zeros(6, np.int32))
    lengths, offsets = on_gpu(np.arange(6, dtype=np.int32)), on_gpu(np.arange(7, dtype=np.int32))
    with stream:
        stream.synchronize()
        stream.begin_capture()
        ops.compact_table(device, lengths, kept, row_offsets=offsets)
        graph = stream.end_capture()
        for rows, left in (([0, 1, 3, 5], [0, 1, 3, 5]), ([1, 2, 3], [1, 3, 5]), ([2], [5])):
            kept.set(np.array([*rows, *[-1] * (6 - len(rows))], np.int32))
            graph.launch(stream)
            stream.synchronize()
            expected = np.full_like(table, -1)
            expected[: len(left)] = table[left]
            assert np.array_equal(to_host(device), expected)
            assert to_host(lengths).tolist() == left + [0] * (6 - len(left))
            assert to_host(offsets).tolist() == np.minimum(np.arange(7), len(left)).tolist()


def test_a_capture_that_would_read_host_memory_is_refused() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.zeros((4, 16), np.uint8)
    ids = on_gpu(np.array([1], np.int64))
    with stream:
        ops.fill_pages(pool, ids, 1)
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(ValueError, match="captured"):
            ops.fill_pages(pool, [2], 7)
        ops.fill_pages(pool, ids, 7)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert to_host(pool)[:, 0].tolist() == [0, 7, 0, 0]
