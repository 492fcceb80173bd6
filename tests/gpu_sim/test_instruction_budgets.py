# SPDX-License-Identifier: Apache-2.0
"""The number of PTX instructions that the kernels need for the bytes that they move.

A copy runs at memory speed only if a multiprocessor has free issue slots: other warps wait for each
instruction that a warp runs for 512 bytes (16 of each lane). The tests count executed instructions
per 512 bytes that lanes load and store. They fail if a change makes a kernel more expensive; after
a change that makes a kernel cheaper, lower its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvcore import PagedBatch, ops
from kvcore.support.dtypes import numpy_dtype
from ptx_text import Runner, require_simulation, runner

require_simulation()

PAGES, PAGE, HEADS, DIM, TOKENS = 32, 16, 8, 128, 512
SLACK = 1.1  # compilers differ


@pytest.fixture
def on() -> Iterator[Runner]:
    with runner() as found:
        yield found


class Scene:
    """A batch of one row that fills all pages except one, and the arrays to read and write."""

    def __init__(self, on: Runner, dtype: str) -> None:
        self.machine = on.machine
        self.dtype = dtype
        rng = np.random.default_rng(0)
        kind = numpy_dtype(dtype)
        raw = rng.integers(0, 100, (PAGES + 1, PAGE, HEADS, DIM * kind.itemsize), np.uint8)
        k_pool, v_pool = (self.machine.array(raw.view(kind)) for _ in range(2))
        table = self.machine.array(rng.permutation(PAGES).astype(np.uint32)[None])
        self.pool = k_pool
        self.offsets = self.machine.array(np.array([0, TOKENS], np.uint32))
        none, full = (self.machine.array(np.array([n], np.uint32)) for n in (0, TOKENS))
        is_wide = dtype == "bfloat16"
        scales: dict[str, Any] = {} if is_wide else {"key_scales": 0.5, "value_scales": 0.5}
        self.scale: dict[str, Any] = {} if is_wide else {"scale": 0.5}
        self.empty = PagedBatch(k_pool, v_pool, table, none)
        self.batch = PagedBatch(k_pool, v_pool, table, full, **scales)
        values = rng.normal(size=(TOKENS, HEADS, DIM)).astype(numpy_dtype("bfloat16"))
        self.k, self.v = (self.machine.array(values) for _ in range(2))
        self.ids = self.machine.array(np.arange(PAGES, dtype=np.int64))

    def append(self) -> None:
        ops.append(self.empty, 0, self.k, self.v, self.offsets, **self.scale)

    def gather(self) -> None:
        ops.gather(self.batch, 0, out=(self.k, self.v))

    def copy_pages(self) -> None:
        pairs = np.array([[i, i + 1] for i in range(0, PAGES, 2)])
        ops.copy_pages(self.pool, pairs)

    def zero_pages(self) -> None:
        ops.zero_pages(self.pool, self.ids)

    def checksum(self) -> None:
        ops.checksum(self.pool, self.ids)

    def append_slots(self) -> None:
        slots = self.machine.array(np.random.default_rng(1).permutation(TOKENS))
        ops.append_slots(self.batch, 0, self.k, self.v, slots)

    def quantize(self) -> None:
        ops.quantize(self.k, self.dtype, granularity="head")

    def in_nvfp4(self, lengths: int) -> PagedBatch:
        """The same batch in pools of four bits."""
        shape = PAGES + 1, PAGE, HEADS
        codes = np.random.default_rng(2).integers(0, 256, (*shape, DIM // 2), np.uint8)
        scales = np.ones((*shape, DIM // 16), numpy_dtype("float8_e4m3fn"))
        k, v, *of_blocks = (self.machine.array(each) for each in (codes, codes, scales, scales))
        table = self.machine.array(np.arange(PAGES, dtype=np.uint32)[None])
        cached = self.machine.array(np.array([lengths], np.uint32))
        return PagedBatch(k, v, table, cached, key_scales=of_blocks[0], value_scales=of_blocks[1])

    def append_nvfp4(self) -> None:
        ops.append(self.in_nvfp4(0), 0, self.k, self.v, self.offsets)

    def gather_nvfp4(self) -> None:
        ops.gather(self.in_nvfp4(TOKENS), 0, out=(self.k, self.v))

    def quantize_nvfp4(self) -> None:
        ops.quantize(self.k, "nvfp4", 16)

    def merge(self) -> None:
        lse = self.machine.array(np.zeros((TOKENS, HEADS), np.float32))
        ops.merge_states(self.k, lse, self.v, lse)

    def pack(self, *, back: bool = False) -> None:
        """Move all pages to vLLM's layout, or out of it."""
        x, pages = 16 // self.pool.itemsize, len(self.ids)
        shapes = (1, pages, HEADS, DIM // x, PAGE, x), (1, pages, HEADS, DIM, PAGE)
        packed = tuple([self.machine.memory(shape, self.pool.dtype) for shape in shapes])
        host = self.machine.host(self.pool)[None]
        plain = tuple([self.machine.array(host[:, first : first + pages]) for first in range(2)])
        caches = [ops.PoolLayout(plain, "layer_first_nhd"), ops.PoolLayout(packed, "vllm")]
        source, target = caches[::-1] if back else caches
        ops.transfer(source, target, self.ids, self.ids)

    def unpack(self) -> None:
        self.pack(back=True)


#: The dtype of the pools, the call, and a warp's instructions for 512 bytes.
BUDGETS: dict[str, tuple[str, Callable[[Scene], None], float]] = {
    "whole pages": ("bfloat16", Scene.copy_pages, 21),
    "zeros": ("bfloat16", Scene.zero_pages, 32),
    "digests": ("bfloat16", Scene.checksum, 40),
    "slots": ("bfloat16", Scene.append_slots, 21),
    "append": ("bfloat16", Scene.append, 24),
    "gather": ("bfloat16", Scene.gather, 26),
    "append to e4m3": ("float8_e4m3fn", Scene.append, 52),
    "append to int8": ("int8", Scene.append, 56),
    "gather from e4m3": ("float8_e4m3fn", Scene.gather, 59),
    "gather from int8": ("int8", Scene.gather, 57),
    "quantize to e4m3": ("float8_e4m3fn", Scene.quantize, 60),
    "quantize to int8": ("int8", Scene.quantize, 64),
    "append to nvfp4": ("bfloat16", Scene.append_nvfp4, 132),
    "gather from nvfp4": ("bfloat16", Scene.gather_nvfp4, 79),
    "quantize to nvfp4": ("bfloat16", Scene.quantize_nvfp4, 151),
    "merge": ("bfloat16", Scene.merge, 73),
    "pages to vLLM's": ("bfloat16", Scene.pack, 20),
    "pages out of vLLM's": ("bfloat16", Scene.unpack, 20),
    "pages to vLLM's of int8": ("int8", Scene.pack, 29),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_kernels_keep_their_budgets(on: Runner, name: str) -> None:
    dtype, work, budget = BUDGETS[name]
    scene = Scene(on, dtype)
    on.machine.host(scene.k)
    on.simulation.keep_order()
    on.simulation.counts()
    work(scene)
    on.machine.host(scene.k)
    all_counts = on.simulation.counts()
    most = max(all_counts.values(), key=lambda of: of["instructions"])
    found = 512 * most["instructions"] / (most["loaded"] + most["stored"])
    assert found <= budget * SLACK, f"{found:.1f} instructions for 512 bytes, {all_counts}"
