# SPDX-License-Identifier: Apache-2.0
"""The pool of a KVCoreCache: its size from the free memory, its shape from the first K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.device import Device
from kvcore.groups import AttentionGroup, FullAttention, SlidingWindow, bundles
from kvcore.integrations.transformers.memory import free_memory
from kvcore.paged import PagedKVCacheManager
from kvcore.params import KVCacheParams, require_count
from kvcore.pools import shard_shapes
from kvcore.sizing import chosen_pages, pages_per_replica
from kvcore.support.dtypes import numpy_dtype

__all__ = ["PoolPlan"]

_MOST_TOKENS = 1 << 20  # of a pool without a given size
_MOST_ROWS = 1 << 20  # unclaimed rows cost nothing


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of the pool, before the shape of its pages is known.

    Parameters
    ----------
    windows : tuple of int or None
        For each layer that writes K and V, the number of tokens that it keeps; None for all.
    page_size : int
        Tokens per page.
    num_pages : int, optional
    available_cache_memory : int, optional
        Bytes of the pool; give this or `num_pages`, not both. Without both, the pool has half of
        the free memory, at most 2**20 tokens.

    Raises
    ------
    ValueError, TypeError
    """

    windows: tuple[int | None, ...]
    page_size: int
    num_pages: int | None
    available_cache_memory: int | None

    def __post_init__(self) -> None:
        require_count(page_size=self.page_size)
        if self.num_pages is not None:
            require_count(num_pages=self.num_pages)
        if self.num_pages is not None and self.available_cache_memory is not None:
            raise ValueError(
                f"num_pages is {self.num_pages} and available_cache_memory "
                f"{self.available_cache_memory}, at most one may be given; leave one out"
            )

    def params(self, dtype: str, heads: int, k_dim: int, v_dim: int) -> KVCacheParams:
        """Return the params of pages with K [heads, k_dim] and V [heads, v_dim] per token."""
        return KVCacheParams(
            dtype,
            n_kv_heads=heads,
            head_dim=k_dim,
            v_head_dim=None if v_dim == k_dim else v_dim,
            num_layers=len(self.windows),
            page_size=self.page_size,
            groups=self._groups(),
        )

    def _groups(self) -> list[AttentionGroup] | None:
        if not any(self.windows):
            return None
        spans = sorted(set(self.windows), key=lambda span: span or 0)  # full layers first
        layers = {s: [i for i, span in enumerate(self.windows) if span == s] for s in spans}
        return [
            FullAttention(each) if span is None else SlidingWindow(each, span)
            for span, each in layers.items()
        ]

    def manager(self, params: KVCacheParams, device: Device) -> PagedKVCacheManager:
        """Make the manager and its pool on a device.

        Raises
        ------
        CapacityError
            The memory does not hold one page.
        MemoryError
            A GPU has less free memory than the pool needs.

        Notes
        -----
        In host memory the pool is address space: the system assigns memory when a page is first
        written. On a GPU the call takes all memory of the pool.
        """
        pages = self._pages(params, device)
        return PagedKVCacheManager(
            params,
            max_batch_size=_MOST_ROWS,
            max_seq_len=min(pages * params.page_size, 2**31 - 1),
            devices=[device],
            num_pages=pages,
            blocks=[_address_space(params, pages)] if device.kind == "cpu" else "allocate",
        )

    def _pages(self, params: KVCacheParams, device: Device) -> int:
        if self.num_pages is not None or self.available_cache_memory is not None:
            return chosen_pages(params, self.available_cache_memory, self.num_pages)
        affordable = pages_per_replica(params, free_memory(device) // 2)
        tables = len(bundles(params))
        return max(1, min(affordable, tables * (_MOST_TOKENS // params.page_size)))


def _address_space(params: KVCacheParams, pages: int) -> Any:
    shapes = shard_shapes(params, pages)
    arrays: list[Any] = [np.empty(shape, numpy_dtype(params.dtype)) for shape in shapes]
    return arrays[0] if len(arrays) == 1 else tuple(arrays)
