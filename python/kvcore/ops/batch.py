# SPDX-License-Identifier: Apache-2.0
"""What an operation works on: one layer's pools, the page table and the lengths of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.inputs import RaggedKVCacheInputs
from kvcore.arguments import integer, number
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array, place_of
from kvcore.backends.shards import layer_rows
from kvcore.dtypes import NARROW
from kvcore.groups.layers import LayerPlace
from kvcore.ops.latent import latent_fp8_parts
from kvcore.ops.options import Options

__all__ = ["LayerPools", "PagedBatch", "layer_pools"]

_AXES = {"NHD": 4, "HND": 4, "MLA": 3, "MLA_FP8": 3}


class LayerPools(NamedTuple):
    """Hold one layer of a pool as arrays [pages, page_size, heads, dim], and its batch.

    Attributes
    ----------
    pools : list of array
        Keys, then values. Of latent rows: the rows, then what their keys end with where that is
        stored apart.
    scales : list of float32 array [pages, page_size, heads, groups], or None
        Of each pool; the ends of latent keys have none.
    lookup_table : uint32 [B, columns]
    cache_lengths : uint32 [B]
    is_latent : bool
        Values are the first elements of the keys (MLA).
    factors : list of float32 array [heads], or None
        Of each pool: the scale of all its tokens, where the caller keeps it.
    window, chunk : int or None
        Tokens that the layer's queries read, where its group says so.
    """

    pools: list[NDArray[Any]]
    scales: list[NDArray[np.float32]] | None
    lookup_table: NDArray[np.uint32]
    cache_lengths: NDArray[np.uint32]
    is_latent: bool = False
    factors: list[NDArray[np.float32]] | None = None
    window: int | None = None
    chunk: int | None = None

    def parts(self) -> tuple[NDArray[Any] | None, ...]:
        """Return keys, values, ends of keys, scales of keys and of values; None for none."""
        k, second = self.pools[0], self.pools[1] if len(self.pools) == 2 else None
        v, rope = (None, second) if self.is_latent else (second, None)
        return k, v, rope, self._view_of_scales(0), self._view_of_scales(1)

    def place(self, options: Options, **more: Any) -> Place:
        """Return where all arrays lie, those of the call included."""
        arrays = {
            "pool": self.pools,
            "scales": self.scales,
            "factors": self.factors,
            "lookup_table": self.lookup_table,
            "cache_lengths": self.cache_lengths,
            **more,
        }
        return options.place(arrays)

    def _view_of_scales(self, i: int) -> NDArray[np.float32] | None:
        if self.factors is not None and i < len(self.factors):
            shape = *self.pools[i].shape[:3], 1
            return np.broadcast_to(self.factors[i][:, None], shape)
        return None if self.scales is None or i >= len(self.scales) else self.scales[i]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Name the pools of one layer, of any affine layout, and the pages of a batch in them.

    Parameters
    ----------
    key_pool : array [pages, page_size, heads, head_dim]
        "NHD"; with "HND" the axes are [pages, heads, page_size, head_dim], with "MLA" they are
        [pages, page_size, dim]: latent rows, which are keys and values. Any library with DLPack, in
        host memory or on a GPU, any strides but for the last axis, which is contiguous.
    value_pool : array, or None
        Likewise; its head_dim may differ. None where values are the first elements of the keys.
        With "MLA" the ends of the keys (rope) [pages, page_size, rope_dim], or None where they are
        part of the rows; ``append`` takes whole keys and ``gather`` returns them in both cases.
    lookup_table : uint32 [B, columns]
        Page ids of each row in logical order; ids from ``pages`` on mean "unassigned".
    cache_lengths : uint32 [B]
        Tokens of each row before this step.
    layout : {"NHD", "HND", "MLA", "MLA_FP8"}
        "MLA_FP8": latent rows uint8 [pages, page_size, 656], which hold 512 float8_e4m3fn, their 4
        float32 scales and 64 bfloat16 that positions rotate.
    key_scales : array float32 like `key_pool`, array float32 [heads] or float, optional
        Of a float8 or int8 pool: a stored code times its scale is the value. The last axis has an
        entry for each group of elements; ``append`` writes such scales and only reads others.
    value_scales : likewise, optional
        Of the same kind as `key_scales`; None with "MLA".

    Raises
    ------
    ValueError
        Another layout, another rank, scales that do not fit the pool or each other.
    TypeError
        Something that is no array, scales of another dtype.

    Notes
    -----
    All arrays are in host memory, or all on one GPU; `key_scales` and `value_scales` of a pool on a
    GPU may come from the host, which waits until they are copied.

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
    key_scales: Any = None
    value_scales: Any = None
    _pools: LayerPools = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout not in _AXES:
            raise ValueError(f"layout is {self.layout!r}, must be one of {', '.join(_AXES)}")
        object.__setattr__(self, "_pools", _of_batch(self))


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
        _index(layer, 1)
        return inputs._pools  # noqa: SLF001
    if not isinstance(inputs, RaggedKVCacheInputs):
        raise TypeError(
            f"inputs are a {type(inputs).__name__}, must be RaggedKVCacheInputs or PagedBatch"
        )
    if inputs.blocks is None:
        raise ValueError(
            "the inputs have no pool (blocks=None); pass kvcore.PagedBatch over your own"
        )
    if inputs._layers is not None:  # noqa: SLF001
        return _of_bundle(inputs, inputs._layers[integer("layer", layer)])  # noqa: SLF001
    pools = _layer_of(inputs.blocks, "blocks", layer)
    scales = inputs.kv_scales
    return LayerPools(
        pools,
        None if scales is None else _layer_of(scales, "kv_scales", layer),
        any_array(inputs.lookup_table, "lookup_table"),
        any_array(inputs.cache_lengths, "cache_lengths"),
        is_latent=len(pools) == 1,
    )


def _of_bundle(inputs: RaggedKVCacheInputs, place: LayerPlace) -> LayerPools:
    """Take out a layer that shares pages with others of its group."""
    pools = _rows_of(inputs.blocks, "blocks", place, 1)
    scales = None
    if inputs.kv_scales is not None:
        first = any_array(_parts(inputs.blocks)[0], "blocks")
        groups = any_array(_parts(inputs.kv_scales)[0], "kv_scales")
        scales = _rows_of(inputs.kv_scales, "kv_scales", place, first.shape[-1] // groups.shape[-1])
    return LayerPools(
        pools,
        scales,
        any_array(inputs.tables[place.bundle], "tables"),
        any_array(inputs.cache_lengths, "cache_lengths"),
        is_latent=len(pools) == 1,
        window=place.window,
        chunk=place.chunk,
    )


def _parts(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def _rows_of(arrays: Any, name: str, place: LayerPlace, per_entry: int) -> list[NDArray[Any]]:
    """See a layer's rows in each kv entry; a last-axis entry stands for so many elements."""
    seen = [any_array(part, name) for part in _parts(arrays)]
    entries = [part[:, kv, place.position] for part in seen for kv in range(part.shape[1])]
    widths = place.widths if len(place.widths) == len(entries) else place.widths[:1] * len(entries)
    return [
        layer_rows(rows, (place.page_size, place.heads, width // per_entry))
        for rows, width in zip(entries, widths, strict=True)
    ]


def _layer_of(arrays: Any, name: str, layer: SupportsIndex) -> list[NDArray[Any]]:
    """Return one layer of each kv entry of arrays [pages, kv_dim, layers, page_size, ...]."""
    parts = list(arrays) if isinstance(arrays, tuple) else [arrays]
    seen = [any_array(part, name) for part in parts]
    for part in seen:
        if part.ndim != 6:
            raise ValueError(f"{name} has shape {part.shape}, must have 6 axes")
    index = _index(layer, seen[0].shape[2])
    return [part[:, kv, index] for part in seen for kv in range(part.shape[1])]


def _index(layer: SupportsIndex, count: int) -> int:
    index = integer("layer", layer)
    if not 0 <= index < count:
        raise IndexError(f"layer is {index}, must be at least 0 and below {count}, the layers")
    return index


def _of_batch(batch: PagedBatch) -> LayerPools:
    if batch.layout == "MLA_FP8":
        return _of_latent_fp8(batch)
    pools = [_with_heads(batch.key_pool, "key_pool", batch.layout)]
    is_latent = batch.value_pool is None or batch.layout == "MLA"
    if batch.value_pool is not None:
        pools.append(_with_heads(batch.value_pool, "value_pool", batch.layout))
    scaled = pools[:1] if is_latent else pools
    scales, factors = _scales(batch, scaled)
    table = any_array(batch.lookup_table, "lookup_table")
    lengths = any_array(batch.cache_lengths, "cache_lengths")
    return LayerPools(pools, scales, table, lengths, is_latent, factors)


def _of_latent_fp8(batch: PagedBatch) -> LayerPools:
    for name in ("value_pool", "key_scales", "value_scales"):
        if getattr(batch, name) is not None:
            raise ValueError(f"{name} is given with layout 'MLA_FP8', whose rows hold everything")
    codes, rotated, scales = latent_fp8_parts(any_array(batch.key_pool, "key_pool"))
    table = any_array(batch.lookup_table, "lookup_table")
    lengths = any_array(batch.cache_lengths, "cache_lengths")
    return LayerPools([codes, rotated], [scales], table, lengths, is_latent=True)


def _with_heads(given: Any, name: str, layout: str) -> Any:
    """See an array in any layout as [pages, page_size, heads, dim]."""
    array = any_array(given, name)
    if array.ndim != _AXES[layout]:
        raise ValueError(f"{name} has shape {array.shape}, must have {_AXES[layout]} axes")
    if layout == "MLA":
        return array[:, :, None]
    return array.transpose(0, 2, 1, 3) if layout == "HND" else array


def _scales(
    batch: PagedBatch, pools: list[NDArray[Any]]
) -> tuple[list[NDArray[np.float32]] | None, list[NDArray[np.float32]] | None]:
    """Return the scales of tokens, or those of heads."""
    given = [("key_scales", batch.key_scales), ("value_scales", batch.value_scales)]
    if batch.key_scales is None and batch.value_scales is None:
        return None, None
    if len(pools) == 1 and batch.value_scales is not None:
        raise ValueError("value_scales are given for latent rows, whose values have key_scales")
    pairs = zip(given, pools, strict=False)
    found = [_scale(scale, name, pool, batch.layout) for (name, scale), pool in pairs]
    kinds = {array.ndim for array in found}
    if len(kinds) != 1:
        raise ValueError(
            "key_scales and value_scales differ in kind; both must be per token, "
            "or both one per head or a number"
        )
    return (found, None) if kinds == {4} else (None, found)


def _scale(given: Any, name: str, pool: NDArray[Any], layout: str) -> Any:
    """Return scales [pages, page_size, heads, groups] or [heads]; None is 1."""
    if pool.dtype.name not in NARROW:
        raise TypeError(
            f"{name[:-7]}_pool has dtype {pool.dtype}, must be one of {', '.join(NARROW)} "
            f"where scales are given"
        )
    heads = pool.shape[2]
    if given is None or isinstance(given, float | int):
        given = np.full(heads, 1.0 if given is None else number(name, given), np.float32)
    array = any_array(given, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} has dtype {array.dtype}, must be float32")
    if array.ndim != 1:
        return _checked_scales(_with_heads(array, name, layout), name, pool)
    is_readable = isinstance(array, np.ndarray)
    if array.shape != (heads,) or (is_readable and not (np.isfinite(array) & (array > 0)).all()):
        raise ValueError(f"{name} is {given!r}, must be positive and finite, one for each head")
    return _where_pool_is(pool, array)


def _where_pool_is(pool: Any, factors: NDArray[np.float32]) -> Any:
    """Return factors where a pool is, for any stream: on a GPU the host waits for the copy."""
    if isinstance(pool, np.ndarray) or not isinstance(factors, np.ndarray):
        return factors
    place = place_of(None, {"pool": pool})
    copied = place.from_host(factors)
    place.wait()
    return copied


def _checked_scales(
    scales: NDArray[np.float32], name: str, pool: NDArray[Any]
) -> NDArray[np.float32]:
    groups = scales.shape[3]
    if scales.shape[:3] != pool.shape[:3] or groups < 1 or pool.shape[3] % groups:
        raise ValueError(
            f"{name} are {scales.shape} as [pages, page_size, heads, groups] for a pool of "
            f"{pool.shape}; all axes but the last must agree, and groups divide its last"
        )
    return scales
