# SPDX-License-Identifier: Apache-2.0
"""kvcore.functional on arrays of other libraries."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conftest import require
from functional_cache import (
    FIELDS,
    append,
    filled,
    make_cache,
    numbers_in,
    refused,
    rows_of,
)
from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    gather_kv,
)
from kvcore.support.dtypes import NARROW, WIDE


# -- other libraries -----------------------------------------------------------------------------
class Exported:
    """An array of another library with DLPack and other given attributes."""

    def __init__(self, array: Any, kind: int = 1, dtype: str = "float32") -> None:
        self.array = array
        self.kind = kind
        self.dtype = dtype

    def __dlpack__(self, **rest: Any) -> Any:
        return self.array.__dlpack__(**rest)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


def test_arrays_with_dlpack_come_in() -> None:
    cache = filled()
    seen = PagedKVCache(*(Exported(getattr(cache, name)) for name in FIELDS))
    assert numbers_in_any(seen) == [1, 2, 3]
    rows = Exported(rows_of([4]))
    assert numbers_in(append_kv(cache, 0, rows, Exported(rows_of([-4]))), 0) == [1, 2, 3, 4]
    ids = Exported(np.array([0, 2], np.int32), dtype="int32")
    assert allocate_blocks(cache, sequence_idx=1, num_new_tokens=3, free_block_ids=ids)[1] == 2


def numbers_in_any(cache: PagedKVCache) -> list[int]:
    return [int(n) for n in gather_kv(cache, 0)[0][:, 0, 0]]


def test_a_table_on_a_gpu_is_refused_beside_pools_in_host_memory() -> None:
    cache = dataclasses.replace(filled(), block_table=Exported(np.zeros(1), kind=2))
    with pytest.raises(TypeError, match=r"block_table is on cuda:0.*host memory"):
        gather_kv(cache, 0)


class ExportedBfloat16(Exported):
    """jax's bfloat16: numpy's DLPack refuses the dtype, ``__array__`` supports it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array


def test_bfloat16_comes_in_as_that_of_ml_dtypes() -> None:
    rows = rows_of([4], ml_dtypes.bfloat16)
    cache = make_cache(dtype=ml_dtypes.bfloat16)
    cache.block_table[0, 0] = 2
    seen = ExportedBfloat16(rows, dtype="bfloat16")
    keys, _, _ = gather_kv(append_kv(cache, 0, seen, seen), 0)
    assert keys.tolist() == rows.tolist()
    pool = ExportedBfloat16(cache.key_pool, dtype="bfloat16")
    with pytest.raises(ValueError, match="key_pool is read-only"):
        append_kv(dataclasses.replace(cache, key_pool=pool), 0, rows, rows, donate=True)


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW])
def test_torch_tensors_come_in_and_are_donated(dtype: str) -> None:
    torch = require("torch")
    pools = [torch.zeros((4, 2, 1, 3), dtype=getattr(torch, dtype)) for _ in range(2)]
    table = torch.full((2, 4), -1, dtype=torch.int32)
    cache = PagedKVCache(pools[0], pools[1], table, torch.zeros(2, dtype=torch.int32))
    assert (cache.num_blocks, cache.head_dim) == (4, 3)
    cache, consumed = allocate_blocks(
        cache, sequence_idx=0, num_new_tokens=3, free_block_ids=torch.tensor([3, 1]), donate=True
    )
    assert (consumed, table[0].tolist()) == (2, [3, 1, -1, -1])
    rows = torch.arange(1, 10, dtype=torch.float32).reshape(3, 1, 3).to(pools[0].dtype)
    functional = append_kv(cache, 0, rows, rows)
    assert not pools[0].float().any()
    assert append_kv(cache, 0, rows, rows, donate=True) is cache
    assert pools[0][3, 1, 0].tolist() == [4, 5, 6]
    for one in (functional, cache):
        keys, _, _ = gather_kv(one, 0)
        assert keys.dtype.name == dtype
        assert keys.astype(np.float32).ravel().tolist() == rows.float().flatten().tolist()


def test_torch_tensor_that_cannot_be_seen_is_refused() -> None:
    torch = require("torch")
    rows = torch.zeros((1, 1, 3), requires_grad=True)
    refused(TypeError, filled(), append(0, rows), "keys_new", "Tensor")
