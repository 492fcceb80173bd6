# SPDX-License-Identifier: Apache-2.0
"""The arrays of a paged cache, and what kind they are of."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

from numpy.typing import NDArray

from kvcore.backends.arrays import host_array, is_on_gpu

__all__ = ["PagedKVCache", "arrays_of", "cache_is_on_gpu", "host_arrays", "is_traced"]


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache:
    """Hold the arrays of a paged KV cache, in numpy or any library with DLPack.

    Parameters
    ----------
    key_pool, value_pool : array [num_blocks, block_size, num_kv_heads, head_dim]
        The blocks, of any one dtype; the last axis contiguous, the others may be strided.
    block_table : int32 array [batch, max_blocks_per_seq]
        The block that holds tokens ``c * block_size`` and on of a row stands in column ``c``;
        -1 where there is none.
    seq_lengths : int32 array [batch]
        Tokens written per row.

    Notes
    -----
    The functions of this module check that the arrays fit together; the constructor does not.

    Pools on a GPU are all on one; the functions enqueue their work on the current stream and return
    cupy arrays. Table and lengths are checked on the host: where they are on the GPU as well, each
    call reads them back, which waits for the stream; kept in host memory, no call waits.
    """

    key_pool: Any
    value_pool: Any
    block_table: Any
    seq_lengths: Any

    @property
    def num_blocks(self) -> int:
        """Blocks in each pool."""
        return self._size(0)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._size(1)

    @property
    def num_kv_heads(self) -> int:
        """Heads per token."""
        return self._size(2)

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self._size(3)

    def _size(self, axis: int) -> int:
        shape = getattr(self.key_pool, "shape", None)
        if not isinstance(shape, tuple) or len(shape) != 4:
            raise TypeError(
                f"key_pool is a {type(self.key_pool).__name__} of shape {shape}, must be an array "
                f"[num_blocks, block_size, num_kv_heads, head_dim]"
            )
        return int(shape[axis])

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({len(self.seq_lengths)} rows, {self.num_blocks} blocks of "
            f"{self.block_size} tokens, {self.num_kv_heads} heads x {self.head_dim}, "
            f"{self.key_pool.dtype})"
        )


def arrays_of(cache: PagedKVCache) -> tuple[Any, Any, Any, Any]:
    """Return pools, table and lengths as the caller has them; TypeError for what is no cache."""
    missing = [each.name for each in fields(PagedKVCache) if not hasattr(cache, each.name)]
    if missing:
        raise TypeError(
            f"cache is a {type(cache).__name__} without {missing[0]}, must be a PagedKVCache"
        )
    return cache.key_pool, cache.value_pool, cache.block_table, cache.seq_lengths


def cache_is_on_gpu(cache: PagedKVCache) -> bool:
    """Tell where the pools of a cache are; TypeError for what is no cache."""
    return is_on_gpu(arrays_of(cache)[0])


def host_arrays(
    cache: PagedKVCache,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """See pools, table and lengths in host memory as numpy arrays."""
    names = (each.name for each in fields(PagedKVCache))
    keys, values, table, lengths = map(host_array, arrays_of(cache), names)
    return keys, values, table, lengths


def is_traced(*values: Any) -> bool:
    """Tell whether one of these stands for an array of a function that jax traces."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(value, jax.core.Tracer) for value in values)
