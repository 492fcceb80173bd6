# SPDX-License-Identifier: Apache-2.0
"""What an operation works on: one layer's pools, the page table and the lengths of a batch."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore._hotpath import RaggedKVCacheInputs
from kvcore.arrays import host_array

__all__ = ["LayerPools", "PagedBatch", "layer_pools"]

_LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Name the pools of one layer, of any affine layout, and the pages of a batch in them.

    Parameters
    ----------
    key_pool : array [pages, page_size, heads, head_dim]
        "NHD"; with "HND" the axes are [pages, heads, page_size, head_dim]. Any library with DLPack,
        any strides but for the last axis, which is contiguous.
    value_pool : array, or None
        Likewise; its head_dim may differ. None for latent rows (MLA).
    lookup_table : uint32 [B, columns]
        Page ids of each row in logical order; ids from ``pages`` on mean "unassigned".
    cache_lengths : uint32 [B]
        Tokens of each row before this step.
    layout : {"NHD", "HND"}

    Raises
    ------
    ValueError
        Another layout, or a rank that is not 4.
    TypeError
        Something that is no array in host memory.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.zeros((2, 1, 4, 3), np.float32)  # [pages, heads, page_size, head_dim]
    >>> table, lengths = np.array([[1]], np.uint32), np.array([2], np.uint32)
    >>> batch = PagedBatch(pool, None, table, lengths, layout="HND")
    >>> ops.append(batch, 0, np.ones((1, 1, 3), np.float32), None, np.array([0, 1], np.uint32))
    >>> pool[1, 0].sum(axis=-1).tolist()
    [0.0, 0.0, 3.0, 0.0]
    """

    key_pool: Any
    value_pool: Any
    lookup_table: Any
    cache_lengths: Any
    layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, must be one of {', '.join(_LAYOUTS)}")
        for name in ("key_pool", "value_pool"):
            pool = getattr(self, name)
            if pool is not None and host_array(pool, name).ndim != 4:
                raise ValueError(f"{name} has shape {tuple(pool.shape)}, must have 4 axes")


@dataclass(frozen=True, slots=True)
class LayerPools:
    """Hold one layer of a pool as arrays [pages, page_size, heads, dim], and its batch.

    Attributes
    ----------
    pools : list of array
        Keys, then values; keys alone for latent rows.
    scales : list of float32 array [pages, page_size, heads, groups], or None
        Of each pool.
    lookup_table : uint32 [B, columns]
    cache_lengths : uint32 [B]
    """

    pools: list[NDArray[Any]]
    scales: list[NDArray[np.float32]] | None
    lookup_table: NDArray[np.uint32]
    cache_lengths: NDArray[np.uint32]


def layer_pools(inputs: RaggedKVCacheInputs | PagedBatch, layer: SupportsIndex) -> LayerPools:
    """Take one layer out of what an operation was given.

    Raises
    ------
    IndexError
        A layer that the pool does not have; a PagedBatch has layer 0.
    ValueError
        Inputs without a pool.
    TypeError
        Something else.
    """
    if isinstance(inputs, PagedBatch):
        return _of_batch(inputs, layer)
    if not isinstance(inputs, RaggedKVCacheInputs):
        raise TypeError(
            f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs or PagedBatch"
        )
    if inputs.blocks is None:
        raise ValueError(
            "the inputs have no pool (blocks=None); pass kvcore.PagedBatch over your own"
        )
    return LayerPools(
        _layer_of(inputs.blocks, "blocks", layer),
        None if inputs.kv_scales is None else _layer_of(inputs.kv_scales, "kv_scales", layer),
        inputs.lookup_table,
        inputs.cache_lengths,
    )


def _layer_of(arrays: Any, name: str, layer: SupportsIndex) -> list[NDArray[Any]]:
    """Answer one layer of each kv entry of arrays [pages, kv_dim, layers, page_size, ...]."""
    parts = list(arrays) if isinstance(arrays, tuple) else [arrays]
    seen = [host_array(part, name) for part in parts]
    index = _index(layer, seen[0].shape[2])
    return [part[:, kv, index] for part in seen for kv in range(part.shape[1])]


def _index(layer: SupportsIndex, count: int) -> int:
    index = operator.index(layer)
    if not 0 <= index < count:
        raise IndexError(f"layer is {index}, must be at least 0 and below {count}, the layers")
    return index


def _of_batch(batch: PagedBatch, layer: SupportsIndex) -> LayerPools:
    _index(layer, 1)
    given = [("key_pool", batch.key_pool), ("value_pool", batch.value_pool)]
    pools = [host_array(pool, name) for name, pool in given if pool is not None]
    if batch.layout == "HND":
        pools = [pool.transpose(0, 2, 1, 3) for pool in pools]
    return LayerPools(
        pools,
        None,
        host_array(batch.lookup_table, "lookup_table"),
        host_array(batch.cache_lengths, "cache_lengths"),
    )
