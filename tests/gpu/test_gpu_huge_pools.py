# SPDX-License-Identifier: Apache-2.0
"""Pages of a GPU whose element offsets need more than 31 and 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import normal, on_gpu, to_host
from kvcore import PagedBatch, ops
from same_arrays import same_bytes

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 8, 128
PAGE_ELEMENTS = PAGE * HEADS * DIM
#: Pages before and after 2^31 and 2^32 elements.
IDS = [bound // PAGE_ELEMENTS + side for bound in (2**31, 2**32) for side in (-1, 0)]
PAGES = IDS[-1] + 2
#: Pages that a wrapped offset would reach, and neighbours of `IDS`.
OTHERS = sorted(
    ({page % (b // PAGE_ELEMENTS) for page in IDS for b in (2**30, 2**31, 2**32)} | {0, 1})
    | {page + side for page in IDS for side in (-1, 1)} - set(IDS)
)
OTHERS = [page for page in OTHERS if 0 <= page < PAGES and page not in IDS]


@pytest.fixture
def pool() -> Any:
    """A pool of zeros, float16 [PAGES, PAGE, HEADS, DIM], more than 8 GiB."""
    size = PAGES * PAGE_ELEMENTS * 2
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < size + (1 << 30):
        pytest.skip(f"the pool takes {size} bytes, the GPU has {free} free")
    array = cupy.zeros((PAGES, PAGE, HEADS, DIM), cupy.float16)
    yield array
    del array
    cupy.get_default_memory_pool().free_all_blocks()


def pages(pool: Any, ids: list[int]) -> Any:
    return np.stack([to_host(pool[page]) for page in ids])


def test_tokens_go_into_such_pages_and_come_back(pool: Any) -> None:
    table, lengths = np.array([IDS[:2], IDS[2:]], np.uint32), np.zeros(2, np.uint32)
    batch = PagedBatch(pool, None, on_gpu(table), on_gpu(lengths))
    k = normal(np.random.default_rng(1), (4 * PAGE, HEADS, DIM), np.float16)
    ops.append(batch, 0, on_gpu(k), None, on_gpu(np.array([0, 2, 4], np.uint32) * np.uint32(PAGE)))
    assert same_bytes(k.reshape(4, PAGE, HEADS, DIM), pages(pool, IDS))
    assert not pages(pool, OTHERS).any()
    read, _, _ = ops.gather(batch, 0, lengths=np.full(2, 2 * PAGE, np.uint32))
    assert same_bytes(k, to_host(read))
    slots = np.concatenate([np.arange(PAGE) + page * PAGE for page in IDS])
    pool[...] = 0
    ops.append_slots(batch, 0, on_gpu(k), None, on_gpu(slots.astype(np.int64)))
    assert same_bytes(k.reshape(4, PAGE, HEADS, DIM), pages(pool, IDS))
    assert not pages(pool, OTHERS).any()


def test_whole_pages_are_copied_digested_and_zeroed(pool: Any) -> None:
    pool[IDS[3]] = 1.5
    ops.copy_pages(pool, [(IDS[3], IDS[0]), (IDS[3], 7)])
    assert (pages(pool, [IDS[0], 7]) == 1.5).all()
    assert len(set(to_host(ops.checksum(pool, [7, IDS[0], IDS[3]])).tolist())) == 1
    assert not pages(pool, [*set(OTHERS) - {7}, IDS[1], IDS[2]]).any()
    ops.zero_pages(pool, [IDS[3]])
    assert not pages(pool, [IDS[3]]).any()
    ops.copy_partial(pool[:, None, None], [(IDS[0], IDS[2], 3)])
    assert (pages(pool, [IDS[2]])[0, :3] == 1.5).all()
    assert not pages(pool, [IDS[2]])[0, 3:].any()


def test_codes_go_into_such_pages(pool: Any) -> None:
    """The same memory is used as 2^33 int8 codes."""
    codes = pool.view(np.int8).reshape(PAGES * 2, PAGE, HEADS, DIM)
    ids = [2 * page for page in IDS]
    scales = cupy.zeros((PAGES * 2, PAGE, HEADS, 1), cupy.float32)
    table, lengths = np.array([ids], np.uint32), np.zeros(1, np.uint32)
    batch = PagedBatch(codes, None, on_gpu(table), on_gpu(lengths), key_scales=scales)
    k = normal(np.random.default_rng(2), (4 * PAGE, HEADS, DIM), np.float16)
    ops.append(batch, 0, on_gpu(k), None, on_gpu(np.array([0, 4 * PAGE], np.uint32)))
    expected = ops.quantize(k, "int8", DIM)
    assert same_bytes(expected[0].reshape(4, PAGE, HEADS, DIM), pages(codes, ids))
    assert same_bytes(expected[1].reshape(4, PAGE, HEADS, 1), pages(scales, ids))
    assert not pages(codes, [2 * page for page in OTHERS]).any()
