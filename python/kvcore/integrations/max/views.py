# SPDX-License-Identifier: Apache-2.0
"""Views of a batch's KV cache: a view of all layers, and of each layer's keys or values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import require_own_memory
from kvcore.backends.selection import any_array, backend_of, place_of
from kvcore.backends.shards import layer_rows
from kvcore.device import Device
from kvcore.errors import CapacityError
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.params import KVCacheParams, require_params
from kvcore.pools import shard_shapes
from kvcore.support.arguments import MOST_UINT32, integer, integers, number
from kvcore.support.dtypes import narrowed, numpy_dtype

__all__ = [
    "ContinuousBatchingKVCache",
    "ContinuousBatchingKVCacheCollection",
    "FetchContinuousBatchingKVCacheCollection",
    "Guard",
    "KVCacheCollection",
    "KVCacheLayer",
    "PagedKVCacheCollection",
    "PagedKVCacheLayer",
    "PoolPart",
    "host_copy",
    "longest_lengths",
    "on_device",
    "pool_parts",
    "read_element",
    "require_array",
    "require_index",
    "write_element",
]


def host_copy(array: Any) -> NDArray[Any]:
    """Return a numpy array itself, or a copy of a GPU array; wait for its current stream."""
    return place_of(None, {"the array": array}).to_host(array)


def read_element(array: Any, index: tuple[int, ...]) -> Any:
    """Return one element as a numpy scalar; on a GPU the host waits for the current stream."""
    found = array[index]
    return found if isinstance(array, np.ndarray) else host_copy(found)[()]


def write_element(array: Any, index: tuple[int, ...], value: Any) -> None:
    """Write one element, on a GPU in the order of its current stream."""
    if isinstance(array, np.ndarray):
        array[index] = value
        return
    place_of(None, {"the array": array}).copy_into(array[index], np.asarray(value, array.dtype))


def on_device(device: Device, arrays: tuple[NDArray[Any], ...]) -> tuple[Any, ...]:
    """Return host arrays; if the device is a GPU, copy them to it on its current stream."""
    place = backend_of(device.kind).current_place(device.index)
    return tuple(place.from_host(array) for array in arrays)


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One array of a pool, 6-D, and its scales."""

    blocks: NDArray[Any]
    scales: NDArray[np.float32] | None


def require_array(name: str, value: Any, rank: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array as a numpy or cupy array; ValueError for another rank or dtype."""
    array: NDArray[Any] = any_array(value, name)
    if array.ndim != rank or array.dtype != dtype:
        raise ValueError(
            f"{name} has {array.ndim} dimensions and dtype {array.dtype}, must have {rank} and "
            f"{np.dtype(dtype)}"
        )
    return array


def pool_parts(
    blocks: Any, scales: Any, params: KVCacheParams | None
) -> tuple[KVCacheParams, tuple[PoolPart, ...]]:
    """Check a pool and its scales; return them with the params that describe them.

    Parameters
    ----------
    blocks : array [num_blocks, kv_dim, layers, block_size, heads, head_dim], or pair of K and V
    scales : float32 [num_blocks, kv_dim, layers, block_size, heads, groups], or pair, or None
    params : KVCacheParams or None
        If None, derived from the arrays. Layers and block size always come from the arrays.

    Raises
    ------
    ValueError
        The arrays and the params disagree in rank, dtype or shape.
    TypeError
        An argument is no array.
    """
    if blocks is None:
        raise ValueError("blocks is None: a view needs a pool, this manager hands out page ids")
    arrays = [_pool_array(each) for each in (blocks if isinstance(blocks, tuple) else (blocks,))]
    given = scales if isinstance(scales, tuple) else (scales,) * len(arrays)
    if len(arrays) > 2 or len(given) != len(arrays):
        raise ValueError(
            f"blocks holds {len(arrays)} arrays and scales {len(given)}, must both hold one, or "
            f"two if K and V differ in width"
        )
    if params is None:
        params = _described(arrays, given)
    require_params(params)
    if params.groups is None and params.shared is None:
        params = replace(params, num_layers=arrays[0].shape[2], page_size=arrays[0].shape[3])
    _require_shapes(params, arrays)
    typed = [_as_dtype(array, params) for array in arrays]
    return params, tuple(
        PoolPart(array, _checked_scales(scale, array))
        for array, scale in zip(typed, given, strict=True)
    )


def _pool_array(value: Any) -> NDArray[Any]:
    array: NDArray[Any] = any_array(value, "blocks")
    if array.ndim != 6:
        raise ValueError(
            f"blocks has shape {array.shape}, must have 6 dimensions: "
            f"[num_blocks, kv_dim, layers, block_size, heads, head_dim]"
        )
    return array


def _described(arrays: list[NDArray[Any]], scales: tuple[Any, ...]) -> KVCacheParams:
    _, kv_dim, layers, size, heads, width = arrays[0].shape
    granularity = None
    if scales[0] is not None:
        groups = require_array("scales", scales[0], 6, np.float32).shape[5]
        granularity = width // max(1, groups)
    return KVCacheParams(
        dtype=arrays[0].dtype.name,
        n_kv_heads=heads,
        head_dim=width,
        num_layers=layers,
        page_size=size,
        is_mla=kv_dim == 1 and len(arrays) == 1,
        kv_scale_granularity=granularity,
        v_head_dim=arrays[1].shape[-1] if len(arrays) == 2 else None,
    )


def _require_shapes(params: KVCacheParams, arrays: list[NDArray[Any]]) -> None:
    shapes = [array.shape for array in arrays]
    expected = shard_shapes(params, shapes[0][0])
    if shapes != expected:
        raise ValueError(
            f"blocks has shape {shapes}, must be {expected}: "
            f"kv_dim, heads and head_dim are those of the params"
        )


def _as_dtype(array: NDArray[Any], params: KVCacheParams) -> NDArray[Any]:
    dtype = numpy_dtype(params.dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "uV" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)  # a caller's pool may hold only the bits
    raise ValueError(f"blocks has dtype {array.dtype}, must be {dtype} as the params say")


def _checked_scales(value: Any, blocks: NDArray[Any]) -> NDArray[np.float32] | None:
    if value is None:
        return None
    scales = require_array("scales", value, 6, np.float32)
    groups = scales.shape[5]
    if scales.shape[:5] != blocks.shape[:5] or groups == 0 or blocks.shape[5] % groups != 0:
        raise ValueError(
            f"scales has shape {scales.shape}, must be {blocks.shape[:5]} and a number of groups "
            f"that divides {blocks.shape[5]}"
        )
    return scales


# ---- one layer -----------------------------------------------------------------------------------


#: Raises when batch row `row` no longer has `page` at `column` of its table: (row, column, page).
Guard = Callable[[int, int, int], None]


def require_index(name: str, value: SupportsIndex, count: int, what: str) -> int:
    """Return the index as an int; IndexError outside ``0 .. count - 1``, TypeError if no int."""
    index = integer(name, value)
    if not 0 <= index < count:
        raise IndexError(f"{name} is {index}, must be at least 0 and below {count}, the {what}")
    return index


class KVCacheLayer(ABC):
    """A view of the keys or the values of one layer; it neither owns nor copies them.

    Parameters
    ----------
    blocks : array [num_blocks, block_size, heads, dim]
        The layer's part of the pool.
    cache_lengths : uint32 [B]
        Tokens of each sequence before this step.
    lookup_table : uint32
        The blocks of each sequence; ids from ``num_blocks`` on mean "unassigned".
    max_seq_length, max_cache_length : int
        The longest count of new tokens; the longest sum of cached and new tokens.
    scales : float32 [num_blocks, block_size, heads, groups], optional
        A value is the stored element times the scale of its group.
    guard : callable, optional
        Called with (row, column, page) before each access; raises if the row has lost the page.

    Notes
    -----
    ``load`` and ``store`` are for debugging and tests: each call handles one element, and on a GPU
    the host waits for it. Kernels take ``blocks``.
    """

    __slots__ = (
        "_guard",
        "_max_cache_length",
        "_max_seq_length",
        "blocks",
        "cache_lengths",
        "lookup_table",
        "scales",
    )

    def __init__(
        self,
        blocks: NDArray[Any],
        cache_lengths: NDArray[np.uint32],
        lookup_table: NDArray[np.uint32],
        max_seq_length: int,
        max_cache_length: int,
        scales: NDArray[np.float32] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.blocks = blocks
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.scales = scales
        self._max_seq_length = max_seq_length
        self._max_cache_length = max_cache_length
        self._guard = guard

    def load(
        self, bs: SupportsIndex, head: SupportsIndex, tok: SupportsIndex, dim: SupportsIndex
    ) -> Any:
        """Return one element.

        Parameters
        ----------
        bs : int
            Row of the batch.
        head : int
        tok : int
            Position in the sequence, counted in tokens from its start.
        dim : int

        Returns
        -------
        scalar
            The element in the pool's dtype; with scales, float32 multiplied by its scale.

        Raises
        ------
        IndexError
            An index out of range or negative, or a position without a block.
        InvalidHandleError
            After the view was made, the sequence was released or lost the block.
        """
        place = self._locate(bs, head, tok, dim)
        scale = self._scale(place)
        stored = read_element(self.blocks, place)
        return stored if scale is None else np.float32(stored) * scale

    def store(
        self,
        bs: SupportsIndex,
        head: SupportsIndex,
        tok: SupportsIndex,
        dim: SupportsIndex,
        value: SupportsFloat,
    ) -> None:
        """Write one element, rounded to nearest; with scales, divided by its scale.

        A value beyond the range of fp8 or int8 is stored as the largest finite value.

        Raises
        ------
        IndexError, InvalidHandleError
            As for ``load``.
        ValueError
            A scale that is 0 or not finite: write the scale first. NaN into int8. A pool that is
            read-only, or whose elements share memory.
        TypeError
            A value that is no number, or an index that is no int.
        """
        place = self._locate(bs, head, tok, dim)
        scale = self._scale(place)
        stored = number("value", value)
        require_own_memory(self.blocks, "blocks")
        if scale is not None:
            if scale == 0 or not math.isfinite(scale):
                raise ValueError(
                    f"the scale at bs {bs}, head {head}, tok {tok}, dim {dim} is {scale}, must be "
                    f"finite and not 0; write it into the view's scales first"
                )
            stored /= float(scale)
        write_element(self.blocks, place, narrowed(stored, self.blocks.dtype))

    def cache_length(self, batch_idx: SupportsIndex) -> int:
        """Return the tokens that a sequence held before this step; IndexError out of range."""
        row = require_index("batch_idx", batch_idx, len(self.cache_lengths), "rows of the batch")
        return int(read_element(self.cache_lengths, (row,)))

    def empty_cache(self) -> bool:
        """Return true if no sequence of the batch held a token before this step."""
        return not host_copy(self.cache_lengths).any()

    def max_prompt_length(self) -> int:
        """Return the longest count of new tokens in this step."""
        return self._max_seq_length

    def max_context_length(self) -> int:
        """Return the longest sum of cached and new tokens."""
        return self._max_cache_length

    @abstractmethod
    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        """Return a token's column of the table, its page, and its place inside the page."""

    def _locate(
        self, bs: SupportsIndex, head: SupportsIndex, tok: SupportsIndex, dim: SupportsIndex
    ) -> tuple[int, int, int, int]:
        num_blocks, _, heads, width = self.blocks.shape
        row = require_index("bs", bs, len(self.cache_lengths), "rows of the batch")
        column, page, offset = self._entry(row, tok)
        if page >= num_blocks:
            raise IndexError(
                f"tok {tok} of row {row} has no block: entry {column} of its table is {page}, "
                f"the pool has {num_blocks} blocks; reserve the position first"
            )
        place = (
            page,
            offset,
            require_index("head", head, heads, "heads"),
            require_index("dim", dim, width, "elements of a row"),
        )
        if self._guard is not None:
            self._guard(row, column, page)
        return place

    def _scale(self, place: tuple[int, int, int, int]) -> np.float32 | None:
        if self.scales is None:
            return None
        per_group = self.blocks.shape[3] // self.scales.shape[3]
        scale: np.float32 = read_element(self.scales, (*place[:3], place[3] // per_group))
        return scale

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(blocks={self.blocks.shape} {self.blocks.dtype}, "
            f"rows={len(self.cache_lengths)})"
        )


class ContinuousBatchingKVCache(KVCacheLayer):
    """A view of one layer's keys or values in slots, one per sequence; table uint32 [B]."""

    __slots__ = ()

    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        offset = require_index("tok", tok, self.blocks.shape[1], "tokens of a slot")
        return 0, int(read_element(self.lookup_table, (row,))), offset


class PagedKVCacheLayer(KVCacheLayer):
    """A view of one layer's keys or values in pages; table uint32 [B, pages]."""

    __slots__ = ()

    def _entry(self, row: int, tok: SupportsIndex) -> tuple[int, int, int]:
        page_size = self.blocks.shape[1]
        room = self.lookup_table.shape[1] * page_size
        position = require_index("tok", tok, room, "tokens in the table's columns")
        column, offset = divmod(position, page_size)
        return column, int(read_element(self.lookup_table, (row, column))), offset


# ---- all layers ----------------------------------------------------------------------------------


class KVCacheCollection(ABC):
    """A view of one batch's KV cache on one device; it neither owns nor copies the cache.

    Attributes
    ----------
    blocks : array [num_blocks, kv_dim, layers, block_size, heads, head_dim], or pair
        The pool; (K pool, V pool) if V has another width than K.
    cache_lengths : uint32 [B]
        Tokens of each sequence before this step.
    lookup_table : uint32 [B] (slots) or [B, pages]
    max_seq_length : int
        Longest count of new tokens of this step.
    max_cache_length : int
        Longest sum of cached and new tokens.
    scales : float32 [num_blocks, kv_dim, layers, block_size, heads, groups], or pair, or None
    kv_params : KVCacheParams
        The parameters of the pool; `page_size` is the block's size.
    guard : callable or None
        The check of a view that a manager made: it raises InvalidHandleError after a row was
        released or has lost a block.

    Notes
    -----
    Building a view costs the checks of ranks, dtypes and shapes, whatever the size of the batch.
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

    # ---- contents ------------------------------------------------------------------------

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
        """Dtype of the scales; None without scales."""
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
        """Return a view of one layer's keys or latent rows; IndexError for a layer out of range.

        Notes
        -----
        The view's ``blocks`` is 4-D and shares the pool's memory.
        """
        return self._layer(0, 0, layer_idx)

    def get_value_cache(self, layer_idx: SupportsIndex) -> KVCacheLayer:
        """Return a view of the values of one layer.

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
                "its rows are in get_key_cache"
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
    """A view of the KV cache of a batch in which each sequence has one slot.

    Parameters
    ----------
    blocks : array [slots, kv_dim, layers, max_seq_len, heads, head_dim]
    cache_lengths : uint32 [B]
    lookup_table : uint32 [B]
        Slot of each sequence.
    max_seq_length, max_cache_length : int
    scales : float32 [slots, kv_dim, layers, max_seq_len, heads, groups], optional
    kv_params : KVCacheParams, optional
        By default, derived from the arrays.
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
    """A view of the KV cache of a batch whose sequences have pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        The inputs of one device, as fetched.
    kv_params : KVCacheParams, optional
        By default, derived from the arrays.
    guard : callable, or tuple of a callable for each bundle, optional
        See KVCacheCollection.

    Raises
    ------
    ValueError
        Inputs without a pool, or with another rank, dtype or shape.
    TypeError
        `inputs` is no RaggedKVCacheInputs.

    Notes
    -----
    Positions of ``load`` and ``store`` count from the start of the sequence. A store to a
    written position changes it for every sequence that shares the page.

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
    """Return the longest count of new tokens and the longest sum of cached and new tokens.

    Raises
    ------
    CapacityError
        A sequence would be longer than its slot.
    ValueError
        A negative count, or a number of counts other than the number of sequences.
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
    total = cache_lengths + np.minimum(new, MOST_UINT32)  # clamped: the uint32 sum must not wrap
    if total.max() > max_seq_len:
        raise CapacityError(
            f"row {int(total.argmax())} would hold {int(total.max())} tokens, a slot holds "
            f"{max_seq_len}; pass new_tokens=0 to read only"
        )
    return int(new.max()), int(total.max())


class FetchContinuousBatchingKVCacheCollection:
    """Build the view of a batch from the result of ``ContinuousBatchingKVCacheManager.fetch``.

    Parameters
    ----------
    kv_params : KVCacheParams
        The manager's parameters; layers and slot size come from the arrays.

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
            Another rank, dtype or shape than described here and by the params.
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
