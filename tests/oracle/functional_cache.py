# SPDX-License-Identifier: Apache-2.0
"""Small caches of kvcore.functional, their contents, and a check for refused calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore.functional import (
    PagedKVCache,
    allocate_blocks,
    append_kv,
    gather_kv,
    init_paged_kv_cache,
)
from kvcore.support.dtypes import NARROW, WIDE

Array = np.ndarray[Any, Any]
DTYPES = [*WIDE, *NARROW]
FIELDS = ("key_pool", "value_pool", "block_table", "seq_lengths")


def make_cache(**rest: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {
        "num_blocks": 4,
        "block_size": 2,
        "num_kv_heads": 1,
        "head_dim": 3,
        "batch_size": 2,
        "max_blocks_per_seq": 4,
        "dtype": "float32",
    }
    return init_paged_kv_cache(**(sizes | rest))


def rows_of(numbers: list[int], dtype: Any = np.float32) -> Array:
    """Return K or V rows [n, 1, 3]; all elements of a row are its token's number."""
    return np.broadcast_to(np.array(numbers)[:, None, None], (len(numbers), 1, 3)).astype(dtype)


def snapshot(cache: PagedKVCache) -> list[bytes]:
    return [np.asarray(getattr(cache, name)).tobytes() for name in FIELDS]


def filled() -> PagedKVCache:
    """Return a cache: row 0 holds tokens 1, 2, 3 in blocks 3 and 1; row 1 is empty."""
    cache, _ = allocate_blocks(
        make_cache(), sequence_idx=0, num_new_tokens=3, free_block_ids=[3, 1, 0, 2]
    )
    return append_kv(cache, 0, rows_of([1, 2, 3]), rows_of([-1, -2, -3]))


def numbers_in(cache: PagedKVCache, row: int) -> list[int]:
    keys, values, seq_len = gather_kv(cache, row)
    assert keys.shape == values.shape == (seq_len, cache.num_kv_heads, cache.head_dim)
    assert (keys == -values).all()
    return [int(n) for n in keys[:, 0, 0]]


def refused(error: type[Exception], cache: PagedKVCache, call: Any, *words: object) -> None:
    """Check the error and its text, and that no byte of the cache has changed."""
    for donate in (False, True):
        kept = snapshot(cache)
        with pytest.raises(error) as caught:
            call(cache, donate)
        assert type(caught.value) is error
        assert all(str(word) in str(caught.value) for word in words), str(caught.value)
        assert snapshot(cache) == kept


def allocation(row: Any = 0, tokens: Any = 2, ids: Any = (0, 2)) -> Any:
    return lambda cache, donate: allocate_blocks(
        cache, sequence_idx=row, num_new_tokens=tokens, free_block_ids=ids, donate=donate
    )


def append(row: Any, keys: Any, values: Any = None) -> Any:
    given_values = keys if values is None else values
    return lambda cache, donate: append_kv(cache, row, keys, given_values, donate=donate)


def gathering(row: Any) -> Any:
    return lambda cache, donate: gather_kv(cache, row)
