# SPDX-License-Identifier: Apache-2.0
"""Provide a paged KV cache as plain arrays: one pool of blocks, one block table, five functions.

The cache has no manager and no hidden state. The caller keeps the list of free blocks. Each
function returns a new cache and leaves its argument unchanged or, with ``donate=True``, updates it
in place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvcore import _core
from kvcore.backends.arrays import host_array, in_library_of, is_on_gpu
from kvcore.ops import functional_rows as rows
from kvcore.ops.attend_rows import AttentionOptions, attend_rows
from kvcore.params import require_count
from kvcore.support.arguments import flag
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "PagedKVCache",
    "allocate_blocks",
    "append_kv",
    "attend_kv",
    "gather_kv",
    "init_paged_kv_cache",
]


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache:
    """Hold the arrays of a paged KV cache, in numpy or any library with DLPack.

    Parameters
    ----------
    key_pool, value_pool : array [num_blocks, block_size, num_kv_heads, head_dim]
        The blocks, in any single dtype; the last axis is contiguous, the others may be strided.
    block_table : int32 array [batch, max_blocks_per_seq]
        Column ``c`` of a row holds the id of the block with the row's tokens from
        ``c * block_size`` on; -1 means no block.
    seq_lengths : int32 array [batch]
        Number of tokens written per row.

    Notes
    -----
    The functions of this module check that the arrays fit together; the constructor does not.

    Both pools may be on one GPU; the functions then enqueue their work on the current stream and
    return cupy arrays. Table and lengths are checked on the host. If they are on the GPU, each call
    reads them back and waits for the stream. If they are in host memory, no call waits.
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
    """Return the caller's pools, table and lengths; raise TypeError if `cache` is not a cache."""
    missing = [each.name for each in fields(PagedKVCache) if not hasattr(cache, each.name)]
    if missing:
        raise TypeError(
            f"cache is a {type(cache).__name__} without {missing[0]}, must be a PagedKVCache"
        )
    return cache.key_pool, cache.value_pool, cache.block_table, cache.seq_lengths


def cache_is_on_gpu(cache: PagedKVCache) -> bool:
    """Return whether a cache's pools are on a GPU; raise TypeError if `cache` is not a cache."""
    return is_on_gpu(arrays_of(cache)[0])


def host_arrays(
    cache: PagedKVCache,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """View pools, table and lengths in host memory as numpy arrays."""
    names = (each.name for each in fields(PagedKVCache))
    keys, values, table, lengths = map(host_array, arrays_of(cache), names)
    return keys, values, table, lengths


def is_traced(*values: Any) -> bool:
    """Return whether any value is an array of a function that jax traces."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(value, jax.core.Tracer) for value in values)


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    if dtype is None:
        raise TypeError("dtype is None, must name the dtype of the pools")
    if isinstance(dtype, str) and dtype.startswith(("bfloat", "float8")):
        return numpy_dtype(dtype)
    return np.dtype(dtype)


def init_paged_kv_cache(
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    batch_size: int,
    max_blocks_per_seq: int,
    dtype: DTypeLike,
) -> PagedKVCache:
    """Allocate an empty cache in numpy: zero pools, a table of -1, lengths of 0.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in each pool, tokens per block.
    num_kv_heads, head_dim : int
        Heads per token, elements per head.
    batch_size, max_blocks_per_seq : int
        Rows and columns of the block table.
    dtype : dtype or str
        Dtype of the pools; "bfloat16", "float8_e4m3fn" and "float8_e5m2" are dtypes of ml_dtypes.

    Raises
    ------
    ValueError
        A size below 1.
    TypeError
        A size that is not an int; a `dtype` that is not a dtype of numbers.

    Examples
    --------
    >>> from kvcore.functional import init_paged_kv_cache
    >>> init_paged_kv_cache(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8,
    ...                     batch_size=3, max_blocks_per_seq=4, dtype="float16")
    PagedKVCache(3 rows, 4 blocks of 2 tokens, 1 heads x 8, float16)
    """
    shape = {"num_blocks": num_blocks, "block_size": block_size}
    shape |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    require_count(**shape, batch_size=batch_size, max_blocks_per_seq=max_blocks_per_seq)
    pool_dtype = _dtype(dtype)
    if pool_dtype.kind in "OUSmM" or pool_dtype.names is not None:
        raise TypeError(f"dtype is {pool_dtype}, must be a dtype of numbers")
    return PagedKVCache(
        key_pool=np.zeros(tuple(shape.values()), pool_dtype),
        value_pool=np.zeros(tuple(shape.values()), pool_dtype),
        block_table=np.full((batch_size, max_blocks_per_seq), -1, np.int32),
        seq_lengths=np.zeros(batch_size, np.int32),
    )


def allocate_blocks(
    cache: PagedKVCache,
    *,
    sequence_idx: int,
    num_new_tokens: int,
    free_block_ids: Any,
    donate: bool = False,
) -> tuple[PagedKVCache, int]:
    """Enter the blocks that a row needs for more tokens into the block table.

    Parameters
    ----------
    cache : PagedKVCache
    sequence_idx : int
        The row.
    num_new_tokens : int
        Number of tokens that the next append writes.
    free_block_ids : list, or int32 or int64 array [n]
        Blocks that no row uses; the first ids of the list are taken, in order.
    donate : bool
        Whether to write into the cache's own block table.

    Returns
    -------
    cache : PagedKVCache
        A cache with the same pools and, unless donated, a new block table and new lengths.
    consumed : int
        ``ceil((length + num_new_tokens) / block_size) - ceil(length / block_size)``; the caller
        drops that many ids from the front of its free list.

    Raises
    ------
    ValueError
        Too few ids; an id that is not a block, is listed twice, or would be taken although a row
        already has it; a row that would exceed the table's width; blocks left from an allocation
        without its append; with `donate` a table that is read-only or whose elements share memory.
        Nothing has changed.
    IndexError
        The row does not exist.
    TypeError
        An argument of another type or dtype.

    Notes
    -----
    Copies the table unless donated, and reads each entry of the table and each id once.

    Examples
    --------
    >>> from kvcore.functional import allocate_blocks, init_paged_kv_cache
    >>> cache = init_paged_kv_cache(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8,
    ...                             batch_size=1, max_blocks_per_seq=4, dtype="float32")
    >>> cache, consumed = allocate_blocks(
    ...     cache, sequence_idx=0, num_new_tokens=3, free_block_ids=[3, 1, 0, 2])
    >>> consumed, cache.block_table.tolist()
    (2, [[3, 1, -1, -1]])
    """
    if is_traced(*arrays_of(cache), sequence_idx, num_new_tokens, free_block_ids):
        raise TypeError(
            "allocate_blocks returns the number of ids to drop from the list of free blocks, which "
            "a traced function does not have: call it outside of jax.jit"
        )
    if not isinstance(free_block_ids, (list, tuple)):
        free_block_ids = host_array(free_block_ids, "free_block_ids")
    asked = sequence_idx, num_new_tokens, free_block_ids
    donate = flag("donate", donate)
    if cache_is_on_gpu(cache):
        given = rows.rows_of(cache)
        table, lengths, consumed = rows.allocate_blocks(given, *asked, donate=donate)
    else:
        (_, _, table, lengths), consumed = _core.allocate_blocks(
            *host_arrays(cache), *asked, donate
        )
    if donate:
        return cache, consumed
    return PagedKVCache(cache.key_pool, cache.value_pool, table, lengths), consumed


def append_kv(
    cache: PagedKVCache,
    sequence_idx: int,
    keys_new: Any,
    values_new: Any,
    *,
    donate: bool = False,
) -> PagedKVCache:
    """Write the K and V of new tokens after the tokens of a row.

    Parameters
    ----------
    cache : PagedKVCache
    sequence_idx : int
        The row; blocks for its new tokens are already allocated.
    keys_new, values_new : array [tokens, num_kv_heads, head_dim]
        Arrays in the pool's dtype, with any strides.
    donate : bool
        Whether to write into the cache's own arrays.

    Returns
    -------
    PagedKVCache
        A cache of four new arrays, in numpy or cupy; with `donate` the cache itself.

    Raises
    ------
    ValueError
        Shapes that differ; a block that is not allocated, not in the pool or twice in the row; more
        tokens than the table can hold; with `donate` an array that is read-only, whose elements
        share memory or that shares memory with another. Nothing has changed.
    IndexError
        The row does not exist.
    TypeError
        A dtype other than the pool's; an argument of another type.

    Notes
    -----
    Copies the pools. With `donate` only the new tokens are copied; a large copy releases the GIL.
    If the caller gives two rows the same block, tokens that are appended to this block appear in
    both rows.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.functional import PagedKVCache, append_kv
    >>> table, lengths = np.array([[3, 1]], np.int32), np.array([0], np.int32)
    >>> cache = PagedKVCache(np.zeros((4, 2, 1, 8)), np.zeros((4, 2, 1, 8)), table, lengths)
    >>> append_kv(cache, 0, np.ones((3, 1, 8)), np.ones((3, 1, 8))).seq_lengths
    array([3], dtype=int32)
    """
    donate = flag("donate", donate)
    if is_traced(*arrays_of(cache), sequence_idx, keys_new, values_new):
        return _append_traced(cache, sequence_idx, keys_new, values_new, donate=donate)
    if cache_is_on_gpu(cache):
        new = keys_new, values_new
        written = rows.append_rows(rows.rows_of(cache), sequence_idx, *new, donate=donate)
        return cache if donate else PagedKVCache(*written)
    arrays = _core.append_rows(
        *host_arrays(cache),
        sequence_idx,
        host_array(keys_new, "keys_new"),
        host_array(values_new, "values_new"),
        donate,
    )
    return cache if donate else PagedKVCache(*arrays)


def _append_traced(
    cache: PagedKVCache, sequence_idx: Any, keys_new: Any, values_new: Any, *, donate: bool
) -> PagedKVCache:
    from kvcore.ops import jax_calls

    if donate:
        raise ValueError(
            "donate is True in a traced function, where arrays do not change; pass donate_argnums= "
            "to jax.jit to update the cache in place"
        )
    new = keys_new, values_new
    return PagedKVCache(*jax_calls.append_rows(arrays_of(cache), sequence_idx, *new))


def gather_kv(cache: PagedKVCache, sequence_idx: int) -> tuple[Any, Any, Any]:
    """Copy the K and V of a row into contiguous arrays.

    Parameters
    ----------
    cache : PagedKVCache
    sequence_idx : int
        The row.

    Returns
    -------
    keys, values : array [seq_len, num_kv_heads, head_dim]
        New arrays in the pool's dtype. In a function that jax traces, [max_blocks_per_seq *
        block_size, num_kv_heads, head_dim] with zeros after the row's tokens, because traced shapes
        are fixed.
    seq_len : int
        Number of tokens written; an int32 scalar in a traced function.

    Raises
    ------
    ValueError
        A block that is not allocated or not in the pool.
    IndexError
        The row does not exist.
    TypeError
        An argument of another type or dtype.

    Notes
    -----
    Copies the row's tokens once; a large copy releases the GIL.

    Examples
    --------
    >>> from kvcore.functional import gather_kv, init_paged_kv_cache
    >>> cache = init_paged_kv_cache(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8,
    ...                             batch_size=1, max_blocks_per_seq=4, dtype="float32")
    >>> keys, values, seq_len = gather_kv(cache, 0)
    >>> keys.shape, values.dtype, seq_len
    ((0, 1, 8), dtype('float32'), 0)
    """
    if is_traced(*arrays_of(cache), sequence_idx):
        from kvcore.ops import jax_calls

        return jax_calls.gather_rows(arrays_of(cache), sequence_idx)
    if cache_is_on_gpu(cache):
        return rows.gather_rows(rows.rows_of(cache), sequence_idx)
    keys, values, seq_len = _core.gather_rows(*host_arrays(cache), sequence_idx)
    return keys, values, seq_len


def attend_kv(
    cache: PagedKVCache,
    sequence_idx: int | None,
    queries: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    threads: int = 1,
) -> Any:
    """Attend causally over the tokens of a row, or of every row, without copying their blocks.

    Parameters
    ----------
    cache : PagedKVCache
        A cache in host memory. K and V of the queries' own tokens are already appended.
    sequence_idx : int or None
        The row; None for all rows.
    queries : array float32, float16 or bfloat16 [tokens, q_heads, head_dim]
        Queries of the last `tokens` tokens of the row; or, for all rows, of the last token of each
        row, [batch, q_heads, head_dim]. ``q_heads`` is a multiple of the pool's heads: head h reads
        K and V of head ``h // (q_heads // num_kv_heads)``.
    scale : float, optional
        Factor of the products of query and key; ``head_dim ** -0.5`` by default.
    window : int, optional
        Number of tokens that a token sees: itself and the ``window - 1`` before it.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    threads : int
        Number of threads of the call.

    Returns
    -------
    array [tokens, q_heads, head_dim]
        An array in the queries' dtype and library. If `sequence_idx` is None, a row without tokens
        gives zeros.

    Raises
    ------
    ValueError, IndexError
        Shapes that do not fit, a row that does not exist, a row with fewer tokens than queries, a
        block that is not in the pool.
    TypeError
        A wrong dtype, or arrays on a GPU.

    Notes
    -----
    Reads the K and V that the queries see once. In a function that jax compiles, lengths and blocks
    are checked when the program runs; a failed check ends the program with an error of jax.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.functional import PagedKVCache, attend_kv
    >>> pool = np.arange(6, dtype=np.float32).reshape(3, 1, 1, 2)  # three blocks of a token
    >>> table, lengths = np.array([[2, 0]], np.int32), np.array([2], np.int32)
    >>> cache = PagedKVCache(pool, pool, table, lengths)
    >>> attend_kv(cache, 0, np.zeros((1, 1, 2), np.float32)).tolist()
    [[[2.0, 3.0]]]
    """
    shape: tuple[int, ...] = getattr(queries, "shape", ())
    if len(shape) != 3 or not shape[2]:
        raise ValueError(f"queries has shape {shape}, must be (tokens, q_heads, head_dim)")
    if scale is None:
        scale = float(shape[2]) ** -0.5
    options = AttentionOptions(scale, window, soft_cap, threads).checked()
    if is_traced(*arrays_of(cache), sequence_idx, queries):
        from kvcore.ops import jax_calls

        return jax_calls.attend(arrays_of(cache), sequence_idx, queries, options)
    seen = host_array(queries, "queries")
    return in_library_of(queries, attend_rows(host_arrays(cache), sequence_idx, seen, options))
