# SPDX-License-Identifier: Apache-2.0
"""Pages whose element offsets exceed 31 and 32 bits, in pools that are mostly holes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import PagedBatch, ops

PAGE, HEADS, DIM = 16, 2, 64
PAGE_ELEMENTS = PAGE * HEADS * DIM
#: Page ids on both sides of 2^31 and of 2^32 elements.
IDS = [bound // PAGE_ELEMENTS + side for bound in (2**31, 2**32) for side in (-1, 0)]
#: Page ids that an offset that wraps around would hit, and neighbours.
OTHERS = {page % (b // PAGE_ELEMENTS) for page in IDS for b in (2**30, 2**31, 2**32)}
OTHERS = (OTHERS | {0, 1, IDS[0] - 1, IDS[1] + 1}) - set(IDS)
PAGES = IDS[-1] + 1


@pytest.fixture
def pools(tmp_path: Path) -> list[Any]:
    """Return two pools of 8 GiB each; the file system holds only touched pages."""
    shape = (PAGES, PAGE, HEADS, DIM)
    return [np.memmap(tmp_path / name, np.float16, "w+", shape=shape) for name in ("k", "v")]


def batch_of(pools: list[Any]) -> PagedBatch:
    table = np.array([IDS[:2], IDS[2:]], np.uint32)
    return PagedBatch(pools[0], pools[1], table, np.zeros(2, np.uint32))


def test_tokens_go_into_such_pages_and_come_back(pools: list[Any]) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(4 * PAGE, HEADS, DIM)).astype(np.float16) for _ in range(2))
    batch = batch_of(pools)
    ops.append(batch, 0, k, v, np.array([0, 2 * PAGE, 4 * PAGE], np.uint32))
    for pool, written in zip(pools, (k, v), strict=True):
        assert np.array_equal(pool[IDS], written.reshape(4, PAGE, HEADS, DIM))
        assert not pool[list(OTHERS)].any()
    read_k, read_v, _ = ops.gather(batch, 0, lengths=np.full(2, 2 * PAGE, np.uint32))
    assert np.array_equal(read_k, k)
    assert np.array_equal(read_v, v)


def test_whole_pages_are_copied_digested_and_zeroed(pools: list[Any]) -> None:
    pool = pools[0]
    pool[IDS[3]] = 1.5
    ops.copy_pages(pool, [(IDS[3], IDS[0]), (IDS[3], 7)])
    assert (pool[IDS[0]] == 1.5).all()
    assert len(set(ops.checksum(pool, [7, IDS[0], IDS[3]]).tolist())) == 1
    assert not pool[list(OTHERS | {IDS[1], IDS[2]})].any()
    ops.zero_pages(pool, [IDS[3]])
    assert not pool[IDS[3]].any()
    assert (pool[7] == 1.5).all()
