# SPDX-License-Identifier: Apache-2.0
"""Compute the size of the scratch memory of attention on a GPU."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import PagedBatch, layer_pools
from kvcore.support.arguments import integer

__all__ = ["attention_scratch"]


def attention_scratch(
    inputs: RaggedKVCacheInputs | PagedBatch,
    q: Any,
    splits: SupportsIndex,
    *,
    layer: SupportsIndex = 0,
    v_head_dim: SupportsIndex | None = None,
) -> int:
    """Return the number of float32 elements that the `scratch` of ``attention`` must hold.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
    q : array [tokens, q_heads, head_dim]
        An array with the shape of q in the calls.
    splits : int
        As for ``attention``.
    layer : int
        Any layer with heads of the same size.
    v_head_dim : int, optional
        As for ``attention``.

    Returns
    -------
    int
        Elements: ``splits * tokens * q_heads * (v_head_dim + 1)``, or 0 for one split.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Fewer than one split, a `q` without three axes.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.zeros((3, 16, 2, 64), np.float16)
    >>> batch = PagedBatch(pool, pool, np.zeros((1, 2), np.uint32), np.zeros(1, np.uint32))
    >>> ops.attention_scratch(batch, np.zeros((5, 4, 64), np.float16), 8)
    10400
    """
    count = integer("splits", splits, 1)
    shape = any_array(q, "q").shape
    if len(shape) != 3:
        raise ValueError(f"q has shape {shape}, must be (tokens, q_heads, head_dim)")
    pools = layer_pools(inputs, layer)
    most = pools.width(0 if pools.parts[1] is None else 1)
    dim = most if v_head_dim is None else integer("v_head_dim", v_head_dim, 1, most)
    return count * shape[0] * shape[1] * (dim + 1) if count > 1 else 0
