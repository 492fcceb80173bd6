# SPDX-License-Identifier: Apache-2.0
"""Views of a batch's KV cache: all layers, from which each layer's keys and values are taken."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore.backends.shards import layer_rows
from kvcore.errors import CapacityError
from kvcore.integrations.max.elements import host_copy, read_element
from kvcore.integrations.max.layer_views import (
    ContinuousBatchingKVCache,
    Guard,
    KVCacheLayer,
    PagedKVCacheLayer,
    require_index,
)
from kvcore.integrations.max.view_arrays import pool_parts, require_array
from kvcore.params import KVCacheParams, require_params
from kvcore.support.arguments import MOST_UINT32, integer, integers

__all__ = [
    "ContinuousBatchingKVCacheCollection",
    "FetchContinuousBatchingKVCacheCollection",
    "KVCacheCollection",
    "PagedKVCacheCollection",
    "longest_lengths",
]


class KVCacheCollection(ABC):
    """See the KV cache of one batch on one device, without owning or copying it.

    Attributes
    ----------
    blocks : array [num_blocks, kv_dim, layers, block_size, heads, head_dim], or pair
        The pool; (K pool, V pool) when V has a width of its own.
    cache_lengths : uint32 [B]
        Tokens of each sequence before this step.
    lookup_table : uint32 [B] (slots) or [B, pages]
    max_seq_length : int
        Longest count of new tokens of this step.
    max_cache_length : int
        Longest of cached and new tokens together.
    scales : float32 [num_blocks, kv_dim, layers, block_size, heads, groups], or pair, or None
    kv_params : KVCacheParams
        What the pool holds; `page_size` is the block's size.
    guard : callable or None
        Of a view that a manager made: raises InvalidHandleError once a row was released or has lost
        a block.

    Notes
    -----
    Building one costs the checks of ranks, dtypes and shapes, independent of the batch.
    """

    name_str: ClassVar[str]
    CacheType: ClassVar[type[KVCacheLayer]]
    _table_rank: ClassVar[int]

    def __init__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        max_seq_length: SupportsIndex,
        max_cache_length: SupportsIndex,
        scales: Any = None,
        *,
        kv_params: KVCacheParams | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.kv_params, self._parts = pool_parts(blocks, scales, kv_params)
        self.cache_lengths = require_array("cache_lengths", cache_lengths, 1, np.uint32)
        self.lookup_table = require_array("lookup_table", lookup_table, self._table_rank, np.uint32)
        if len(self.cache_lengths) != len(self.lookup_table):
            raise ValueError(
                f"cache_lengths has {len(self.cache_lengths)} rows, lookup_table has "
                f"{len(self.lookup_table)}, must be one per sequence in both"
            )
        self.max_seq_length = integer("max_seq_length", max_seq_length, 0, MOST_UINT32)
        self.max_cache_length = integer("max_cache_length", max_cache_length, 0, MOST_UINT32)
        if guard is not None and not callable(guard):
            raise TypeError(f"guard is a {type(guard).__name__}, must be callable or None")
        self.guard = guard

    # ---- what it holds -------------------------------------------------------------------

    @property
    def blocks(self) -> Any:
        """The pool, one array or a pair."""
        arrays = tuple(part.blocks for part in self._parts)
        return arrays[0] if len(arrays) == 1 else arrays

    @property
    def scales(self) -> Any:
        """The scales, one array or a pair, or None."""
        arrays = tuple(part.scales for part in self._parts)
        if arrays[0] is None:
            return None
        return arrays[0] if len(arrays) == 1 else arrays

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored elements."""
        return self._parts[0].blocks.dtype

    @property
    def scale_dtype(self) -> np.dtype[np.float32] | None:
        """Dtype of the scales, None without."""
        return None if self._parts[0].scales is None else np.dtype(np.float32)

    @property
    def kv_cache_dynamic_shape(self) -> tuple[int, ...]:
        """Shape of one layer's keys: (num_blocks, block_size, heads, head_dim)."""
        shape = self._parts[0].blocks.shape
        return (shape[0], *shape[3:])

    @property
    def kv_cache_dynamic_strides(self) -> tuple[int, ...]:
        """Strides of one layer's keys, in elements."""
        array = self._parts[0].blocks
        return tuple(array.strides[axis] // array.itemsize for axis in (0, 3, 4, 5))

    def cache_length(self, batch_idx: SupportsIndex) -> int:
        """Return the tokens that a sequence held before this step; IndexError out of range."""
        row = require_index("batch_idx", batch_idx, len(self.cache_lengths), "rows of the batch")
        return int(read_element(self.cache_lengths, (row,)))

    # ---- layers --------------------------------------------------------------------------

    def get_key_cache(self, layer_idx: SupportsIndex) -> KVCacheLayer:
        """See the keys of one layer, or its latent rows; IndexError for a layer out of range.

        Notes
        -----
        The view's ``blocks`` is 4-D and shares the pool's memory.
        """
        return self._layer(0, 0, layer_idx)

    def get_value_cache(self, layer_idx: SupportsIndex) -> KVCacheLayer:
        """See the values of one layer.

        Raises
        ------
        IndexError
            A layer out of range.
        ValueError
            The pool holds latent rows (MLA) and no values.
        """
        if self.kv_params.is_mla:
            raise ValueError(
                "the pool holds latent rows (is_mla) and has no value cache; "
                "get_key_cache has the rows"
            )
        part = len(self._parts) - 1
        return self._layer(part, 1 - part, layer_idx)

    def _layer(self, part: int, kv: int, layer_idx: SupportsIndex) -> KVCacheLayer:
        layer = require_index("layer_idx", layer_idx, self.kv_params.num_layers, "layers")
        pool = self._parts[part]
        return self.CacheType(
            pool.blocks[:, kv, layer],
            self.cache_lengths,
            self.lookup_table,
            self.max_seq_length,
            self.max_cache_length,
            None if pool.scales is None else pool.scales[:, kv, layer],
            self.guard,
        )

    def __repr__(self) -> str:
        shapes = " and ".join(str(part.blocks.shape) for part in self._parts)
        return (
            f"{type(self).__name__}(blocks={shapes} {self.dtype}, rows={len(self.cache_lengths)}, "
            f"max_seq_length={self.max_seq_length}, max_cache_length={self.max_cache_length})"
        )


class ContinuousBatchingKVCacheCollection(KVCacheCollection):
    """See the KV cache of a batch whose sequences have one slot each.

    Parameters
    ----------
    blocks : array [slots, kv_dim, layers, max_seq_len, heads, head_dim]
    cache_lengths : uint32 [B]
    lookup_table : uint32 [B]
        Slot of each sequence.
    max_seq_length, max_cache_length : int
    scales : float32 [slots, kv_dim, layers, max_seq_len, heads, groups], optional
    kv_params : KVCacheParams, optional
        Read off the arrays by default.
    guard : callable, optional
        See KVCacheCollection.

    Raises
    ------
    ValueError
        Another rank, dtype or shape; a length below 0 or beyond uint32.
    TypeError
        No array; a length that is no int.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ContinuousBatchingKVCacheCollection
    >>> pool, one = np.zeros((2, 2, 3, 8, 1, 4), np.float32), np.ones(1, np.uint32)
    >>> view = ContinuousBatchingKVCacheCollection(pool, one, one, 1, 2)
    >>> view.get_value_cache(2).store(bs=0, head=0, tok=7, dim=3, value=5)
    >>> float(pool[1, 1, 2, 7, 0, 3])
    5.0
    """

    name_str = "continuous_batching"
    CacheType = ContinuousBatchingKVCache
    _table_rank = 1


class PagedKVCacheCollection(KVCacheCollection):
    """See the KV cache of a batch whose sequences have pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        Of one device, as fetched.
    kv_params : KVCacheParams, optional
        Read off the arrays by default.
    guard : callable, or tuple of one for each bundle, optional
        See KVCacheCollection.

    Raises
    ------
    ValueError
        Inputs without a pool, or with another rank, dtype or shape.
    TypeError
        No inputs.

    Notes
    -----
    Positions of ``load`` and ``store`` count from the start of the sequence. Storing to a position
    that is written already changes it for every sequence that shares the page.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
    >>> params = KVCacheParams("float32", 1, 4, 2, page_size=2)
    >>> mgr = PagedKVCacheManager(params, max_batch_size=4, max_seq_len=64, num_pages=8)
    >>> mgr.external_claim("r1")
    >>> (view,) = mgr.fetch_collection([TextGenerationContext("r1", [10, 11, 12])])
    >>> view.max_seq_length, view.get_key_cache(1).load(bs=0, head=0, tok=2, dim=3).item()
    (3, 0.0)
    """

    name_str = "paged"
    CacheType = PagedKVCacheLayer
    _table_rank = 2

    def __init__(
        self,
        inputs: RaggedKVCacheInputs,
        *,
        kv_params: KVCacheParams | None = None,
        guard: Guard | tuple[Guard, ...] | None = None,
    ) -> None:
        if not isinstance(inputs, RaggedKVCacheInputs):
            raise TypeError(f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs")
        limits = require_array("max_lengths", inputs.max_lengths, 2, np.uint32)
        if limits.shape[0] < 1 or limits.shape[1] != 2:
            raise ValueError(f"max_lengths has shape {limits.shape}, must be (1 or more steps, 2)")
        self._layers = inputs._layers  # noqa: SLF001
        self._tables = inputs.tables
        self._guards = guard if isinstance(guard, tuple) else (guard,) * len(self._tables)
        super().__init__(
            inputs.blocks,
            inputs.cache_lengths,
            inputs.lookup_table,
            limits[0, 0],
            limits[0, 1],
            inputs.kv_scales,
            kv_params=kv_params,
            guard=self._guards[0],
        )

    def _layer(self, part: int, kv: int, layer_idx: SupportsIndex) -> KVCacheLayer:
        if self._layers is None:
            return super()._layer(part, kv, layer_idx)
        layer = require_index("layer_idx", layer_idx, self._layers.num_layers, "layers")
        place = self._layers[layer]
        pool = self._parts[part]
        width = place.widths[min(part + kv, len(place.widths) - 1)]
        shape = place.page_size, place.heads, width
        scales = None
        if pool.scales is not None:
            groups = width * pool.scales.shape[-1] // pool.blocks.shape[-1]
            scales = layer_rows(pool.scales[:, kv, place.position], (*shape[:2], groups))
        return self.CacheType(
            layer_rows(pool.blocks[:, kv, place.position], shape),
            self.cache_lengths,
            self._tables[place.bundle],
            self.max_seq_length,
            self.max_cache_length,
            scales,
            self._guards[place.bundle],
        )


def longest_lengths(
    cache_lengths: NDArray[np.uint32], new_tokens: int | Sequence[int], max_seq_len: int
) -> tuple[int, int]:
    """Return the longest count of new tokens and the longest of cached and new together.

    Raises
    ------
    CapacityError
        A sequence would be longer than its slot.
    ValueError
        A negative count, or not one per sequence.
    TypeError
        Counts that are no integers.
    """
    rows = len(cache_lengths)
    new = integers("new_tokens", new_tokens, 0)
    if new.shape not in ((), (rows,)):
        raise ValueError(
            f"new_tokens has shape {new.shape} for {rows} sequences, must be one number or one each"
        )
    if rows == 0:
        return 0, 0
    total = cache_lengths + np.minimum(new, MOST_UINT32)  # of which the sum does not wrap
    if total.max() > max_seq_len:
        raise CapacityError(
            f"row {int(total.argmax())} would hold {int(total.max())} tokens, a slot holds "
            f"{max_seq_len}; pass new_tokens=0 to read only"
        )
    return int(new.max()), int(total.max())


class FetchContinuousBatchingKVCacheCollection:
    """Build the view of a batch from what ``ContinuousBatchingKVCacheManager.fetch`` hands out.

    Parameters
    ----------
    kv_params : KVCacheParams
        Of the manager; layers and slot size are read off the arrays.

    Examples
    --------
    >>> import kvcore
    >>> params = kvcore.KVCacheParams("float32", 1, 4, 2)
    >>> mgr = kvcore.ContinuousBatchingKVCacheManager(params, 4, 16, 2, ["cpu"])
    >>> fetch = kvcore.FetchContinuousBatchingKVCacheCollection(params)
    >>> fetch(*mgr.fetch(mgr.claim(2))[0], new_tokens=[3, 5]).max_cache_length
    5
    """

    def __init__(self, kv_params: KVCacheParams) -> None:
        require_params(kv_params)
        self.kv_params = kv_params

    def __call__(
        self,
        blocks: Any,
        cache_lengths: Any,
        lookup_table: Any,
        is_cache_empty: Any,
        new_tokens: int | Sequence[int] = 1,
    ) -> ContinuousBatchingKVCacheCollection:
        """Build the view.

        Parameters
        ----------
        blocks : array [slots, kv_dim, layers, max_seq_len, heads, head_dim]
        cache_lengths, lookup_table : uint32 [B]
        is_cache_empty : bool [1]
        new_tokens : int or sequence of int [B]
            Tokens that the step adds to each sequence.

        Raises
        ------
        ValueError
            Another rank, dtype or shape than these and the params'.
        CapacityError
            A sequence would be longer than its slot.
        """
        flag = require_array("is_cache_empty", is_cache_empty, 1, np.bool_)
        if flag.shape != (1,):
            raise ValueError(f"is_cache_empty has shape {flag.shape}, must be (1,)")
        made = ContinuousBatchingKVCacheCollection(
            blocks, cache_lengths, lookup_table, 0, 0, kv_params=self.kv_params
        )
        made.max_seq_length, made.max_cache_length = longest_lengths(
            host_copy(made.cache_lengths), new_tokens, made.kv_params.page_size
        )
        return made
