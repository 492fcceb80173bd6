# SPDX-License-Identifier: Apache-2.0
"""View one layer's pools, from a manager or from a caller in any layout, as operations do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.host import HOST
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array, call_array, place_of
from kvcore.native.contexts import place_finder
from kvcore.ops.latent import latent_fp8_parts
from kvcore.ops.nvfp4 import checked_blocks, has_block_scales, seen_pair
from kvcore.support.arguments import number
from kvcore.support.dtypes import NARROW

__all__ = [
    "AXES",
    "NO_BATCH",
    "LayerPools",
    "OwnArrays",
    "Transfer",
    "latent_transfers",
    "own_arrays",
    "place_of_layer",
    "plain_transfers",
]

#: Layouts of a pool, and their number of axes.
AXES = {"NHD": 4, "HND": 4, "MLA": 3, "MLA_FP8": 3}

#: Table and lengths of layers that are in no batch yet.
NO_BATCH = np.empty((0, 0), np.uint32), np.empty(0, np.uint32)

#: The arguments of kernels for each pool: the name of the tokens, the pool, its scales [pages,
#: page_size, heads, groups], the scales of its heads [heads], and the tokens.
Transfer = tuple[str, NDArray[Any], Any, Any, NDArray[Any]]


class LayerPools(NamedTuple):
    """Hold one layer of a pool as arrays [pages, page_size, heads, dim], and its batch.

    Attributes
    ----------
    pools : list of array
        Keys, then values. For latent rows: the rows, then the ends of the keys if these are stored
        in a separate array.
    scales : list of float32 array [pages, page_size, heads, groups], or None
        Scales of each pool; the ends of latent keys have no scales. In nvfp4 float8_e4m3fn.
    lookup_table : uint32 [B, columns]
    cache_lengths : uint32 [B]
    is_latent : bool
        Values are the first elements of the keys (MLA).
    factors : list of float32 array [heads], or None
        For each pool, the scale of all its tokens, if the caller passed scales per head or one
        scale.
    window, chunk : int or None
        Number of tokens that the layer's queries read, if its group limits it.
    owner : int or None
        The layer that writes the K and V, if this layer reads those of another layer.
    loads : LayerLoads or None
        Loads from the host tier that still write this layer's part of some pages.
    position : int
        Index of the layer within a page.
    global_scales : (float or array, float or array) or None
        Global scales of K and V in nvfp4, whose pools are uint8 [pages, page_size, heads, dim / 2].
    parts : tuple of (array or None)
        Keys, values, ends of keys, scales of keys and of values, as attention reads them.
    """

    pools: list[NDArray[Any]]
    scales: list[NDArray[np.float32]] | None
    lookup_table: NDArray[np.uint32]
    cache_lengths: NDArray[np.uint32]
    is_latent: bool = False
    factors: list[NDArray[np.float32]] | None = None
    window: int | None = None
    chunk: int | None = None
    owner: int | None = None
    loads: Any = None
    position: int = 0
    global_scales: tuple[Any, Any] | None = None
    parts: tuple[Any, ...] = ()

    def with_tables(self, lookup_table: Any, cache_lengths: Any) -> LayerPools:
        """Return the same pools with the pages and lengths of another batch."""
        return self.in_batch(
            any_array(lookup_table, "lookup_table", self.lookup_table),
            any_array(cache_lengths, "cache_lengths", self.cache_lengths),
        )

    def in_batch(
        self, lookup_table: NDArray[np.uint32], cache_lengths: NDArray[np.uint32]
    ) -> LayerPools:
        """Return the same pools with a table and lengths, given as ``any_array`` returns them."""
        return LayerPools._make((*self[:2], lookup_table, cache_lengths, *self[4:]))

    def width(self, i: int) -> int:
        """Return the number of elements of a head of a pool."""
        return int(self.pools[i].shape[3]) * (1 if self.global_scales is None else 2)

    def with_parts(self) -> LayerPools:
        """Return the same pools with their `parts`."""
        k, second = self.pools[0], self.pools[1] if len(self.pools) == 2 else None
        v, rope = (None, second) if self.is_latent else (second, None)
        scales: list[Any] = self.scales or []
        if self.factors is not None:
            pairs = zip(self.factors, self.pools, strict=False)
            scales = [np.broadcast_to(f[:, None], (*pool.shape[:3], 1)) for f, pool in pairs]
        k_scales, v_scales, *_ = *scales, None, None
        return self._replace(parts=(k, v, rope, k_scales, v_scales))


def _other_place(
    pools: LayerPools, stream: Any, named: Sequence[tuple[Any, ...]], beside: Sequence[Any]
) -> Place:
    """Find the place of a call that has a stream, or an array of a GPU."""
    arrays = {
        "pool": pools.pools,
        "scales": pools.scales,
        "factors": pools.factors,
        "lookup_table": pools.lookup_table,
        "cache_lengths": pools.cache_lengths,
        **{each[0]: each[-1] for each in named},
    }
    place = place_of(stream, arrays, (*beside, pools.global_scales))
    if pools.loads is not None:
        pools.loads.wait(pools.position, place.stream)  # type: ignore[attr-defined]
    return place


#: Returns the device of all arrays of a layer and a call: (pools, stream, named=(), beside=()).
#: `named` holds the arrays of the call as tuples (name, ..., array); see ``place_of``. The stream
#: of the device waits for the pending loads of the layer.
place_of_layer = place_finder(HOST, _other_place)


def latent_transfers(pools: LayerPools, k: Any, v: Any) -> list[Transfer]:
    """Return the transfer of each pool of latent rows, for the tokens `k` of a call."""
    if v is not None:
        raise ValueError("v is given for a pool of latent rows, which has no values; pass None")
    return plain_transfers(pools, ("k", "v"), [call_array(k, "k")])


def plain_transfers(
    pools: LayerPools, names: tuple[str, str], arrays: list[NDArray[Any]]
) -> list[Transfer]:
    """Return the transfer of each pool, without scales: latent keys may be stored in two pools."""
    if len(arrays) < len(pools.pools):
        keys = arrays[0]
        first, second = (pool.shape[3] for pool in pools.pools)
        if keys.ndim != 3 or keys.shape[2] != first + second:
            raise ValueError(
                f"{names[0]} has shape {keys.shape}, must be (tokens, 1, {first} + {second}): the "
                f"latent part, then the one that positions rotate"
            )
        names, arrays = (names[0], names[0]), [keys[:, :, :first], keys[:, :, first:]]
    zipped = zip(names, pools.pools, arrays, strict=False)
    return [(name, pool, None, None, array) for name, pool, array in zipped]


class OwnArrays(NamedTuple):
    """Hold a caller's arrays of one layer; ``PagedBatch`` documents each."""

    key_pool: Any
    value_pool: Any
    key_scales: Any
    value_scales: Any
    layout: str
    global_scales: Any = None


def own_arrays(given: OwnArrays, table: Any, lengths: Any) -> LayerPools:
    """View the arrays of one layer, and a batch in them, as operations do.

    Raises
    ------
    ValueError, TypeError
        Arrays that do not fit.
    """
    scales: list[NDArray[np.float32]] | None
    factors: list[NDArray[np.float32]] | None
    if has_block_scales(given.key_scales) or has_block_scales(given.value_scales):
        return _nvfp4(given, table, lengths)
    if given.global_scales is not None:
        raise ValueError(
            "global_scales are given without key_scales and value_scales of float8_e4m3fn; they "
            "are for pools in nvfp4"
        )
    if given.layout == "MLA_FP8":
        pools, scales = _latent_fp8(given)
        factors, is_latent = None, True
    else:
        pools = [_with_heads(given.key_pool, "key_pool", given.layout)]
        is_latent = given.value_pool is None or given.layout == "MLA"
        if given.value_pool is not None:
            pools.append(_with_heads(given.value_pool, "value_pool", given.layout))
        scales, factors = _scales(given, pools[:1] if is_latent else pools)
    table, lengths = any_array(table, "lookup_table"), any_array(lengths, "cache_lengths")
    return LayerPools(pools, scales, table, lengths, is_latent, factors).with_parts()


def _nvfp4(given: OwnArrays, table: Any, lengths: Any) -> LayerPools:
    """View pools of codes with block scales."""
    if given.layout not in ("NHD", "HND"):
        raise ValueError(f"layout is {given.layout!r}, must be 'NHD' or 'HND' for nvfp4")
    pools, scales = [], []
    for name in ("key", "value"):
        of_pool, of_scales = getattr(given, f"{name}_pool"), getattr(given, f"{name}_scales")
        if of_pool is None or of_scales is None:
            raise ValueError(f"{name}_pool or {name}_scales are None, nvfp4 needs both")
        pools.append(_with_heads(of_pool, f"{name}_pool", given.layout))
        seen = _with_heads(of_scales, f"{name}_scales", given.layout)
        scales.append(checked_blocks(pools[-1], seen, f"{name}_scales"))
    step = any_array(table, "lookup_table"), any_array(lengths, "cache_lengths")
    found = LayerPools(pools, scales, *step, global_scales=seen_pair(given.global_scales))
    return found.with_parts()


def _latent_fp8(given: OwnArrays) -> tuple[list[Any], list[Any]]:
    for name in ("value_pool", "key_scales", "value_scales"):
        if getattr(given, name) is not None:
            raise ValueError(f"{name} is given with layout 'MLA_FP8', whose rows hold everything")
    codes, rotated, scales = latent_fp8_parts(any_array(given.key_pool, "key_pool"))
    return [codes, rotated], [scales]


def _with_heads(given: Any, name: str, layout: str) -> Any:
    """View an array in any layout as [pages, page_size, heads, dim]."""
    array = any_array(given, name)
    if array.ndim != AXES[layout]:
        raise ValueError(f"{name} has shape {array.shape}, must have {AXES[layout]} axes")
    if layout == "MLA":
        return array[:, :, None]
    return array.transpose(0, 2, 1, 3) if layout == "HND" else array


def _scales(
    arrays: OwnArrays, pools: list[NDArray[Any]]
) -> tuple[list[NDArray[np.float32]] | None, list[NDArray[np.float32]] | None]:
    """Return the scales of tokens, or the scales of heads."""
    given = [("key_scales", arrays.key_scales), ("value_scales", arrays.value_scales)]
    if arrays.key_scales is None and arrays.value_scales is None:
        return None, None
    if len(pools) == 1 and arrays.value_scales is not None:
        raise ValueError("value_scales are given for latent rows, whose values have key_scales")
    pairs = zip(given, pools, strict=False)
    found = [_scale(scale, name, pool, arrays.layout) for (name, scale), pool in pairs]
    kinds = {array.ndim for array in found}
    if len(kinds) != 1:
        raise ValueError(
            "key_scales and value_scales differ in kind; both must be per token, "
            "or both one per head or a number"
        )
    return (found, None) if kinds == {4} else (None, found)


def _scale(given: Any, name: str, pool: NDArray[Any], layout: str) -> Any:
    """Return scales [pages, page_size, heads, groups] or [heads]; None means 1."""
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
    """Copy factors to the pool's device, for any stream; the host waits for the copy."""
    if isinstance(pool, np.ndarray) or not isinstance(factors, np.ndarray):
        return factors
    place = place_of(None, {"pool": pool})
    copied = place.from_host(factors, "key_scales or value_scales")
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
