# SPDX-License-Identifier: Apache-2.0
"""Attention over the plain arrays of a paged cache."""

from __future__ import annotations

from typing import Any

from kvcore.backends.arrays import host_array, in_library_of
from kvcore.compat.functional_cache import PagedKVCache, arrays_of, host_arrays, is_traced
from kvcore.ops.attend_rows import AttentionOptions, attend_rows

__all__ = ["attend_kv"]


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
    """Attend causally over the tokens of a row, or of every row, where they lie.

    Parameters
    ----------
    cache : PagedKVCache
        In host memory. K and V of the queries' own tokens are appended already.
    sequence_idx : int or None
        The row; None for all of them.
    queries : array float32, float16 or bfloat16 [tokens, q_heads, head_dim]
        Of the last `tokens` tokens of the row; or of the last token of each row, [batch, q_heads,
        head_dim]. ``q_heads`` is a multiple of the pool's heads: head h reads K and V of head
        ``h // (q_heads // num_kv_heads)``.
    scale : float, optional
        Of the products of query and key; ``head_dim ** -0.5`` by default.
    window : int, optional
        Tokens that a token sees: itself and the ``window - 1`` before it.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    threads : int
        Of the call.

    Returns
    -------
    array [tokens, q_heads, head_dim]
        In the queries' dtype and library. Zeros for a row without tokens, of all rows.

    Raises
    ------
    ValueError, IndexError
        Shapes that do not fit, no such row, a row with fewer tokens than queries, a block that is
        not in the pool.
    TypeError
        Another dtype, or arrays on a GPU.

    Notes
    -----
    Costs reading the K and V that the queries see once. In a function that jax compiles, what
    only the running program knows ends it with an error of jax's.

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
