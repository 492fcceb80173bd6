# SPDX-License-Identifier: Apache-2.0
"""Describe the memory layout of whole caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore.backends.protocol import Tensor
from kvcore.backends.selection import any_array, zeros_on
from kvcore.support.arguments import integer
from kvcore.support.dtypes import numpy_dtype

__all__ = ["PACKED", "PoolLayout", "tensors_of"]

PACKED = "vllm"
_AXES = _core.layout_axes()
_UNIT = 16  # bytes of K that vLLM keeps together


@dataclass(frozen=True, slots=True, eq=False)
class PoolLayout:
    """Describe the memory of a whole cache and the layout of its elements.

    Parameters
    ----------
    arrays : array, pair of arrays, or lists of arrays
        Arrays of any DLPack library. The elements of a head are contiguous; all other strides are
        free. One array has the axes of `layout`, followed by head_dim. A tuple holds K and V,
        without the axis `kv` (or with one of length 1). A list has an array for each layer, without
        the axis `layer`. One array without the axis `kv` has keys only, as latent rows (MLA).
    layout : str
        - "max": [page, kv, layer, token, head], what kvcore allocates
        - "layer_first_nhd": [kv, layer, page, token, head]; "layer_first_hnd": head before token
        - "layer_first_nhd_paired": [layer, page, kv, token, head]; "layer_first_hnd_paired"
        - "page_first": [kv, page, token, layer, head]
        - "page_first_direct": [kv, page, layer, token, head]
        - "page_head": [kv, page, head, token, layer]
        - "page_unified": [page, layer, kv, token, head]
        - "vllm": a tuple; K [layer, page, head, head_dim / x, token, x] with x = 16 / itemsize, V
          [layer, page, head, head_dim, token], or lists of them

    Attributes
    ----------
    pages, layers, page_size, heads, head_dim, v_head_dim : int
        Sizes; `v_head_dim` is 0 if the cache has keys only.
    dtype : numpy.dtype

    Raises
    ------
    ValueError
        An unknown layout, axes that do not match the layout, sizes of K, V or layers that differ.
    TypeError
        An argument that is not an array, or arrays of several dtypes.

    Examples
    --------
    >>> from kvcore import ops
    >>> sizes = dict(pages=4, layers=2, page_size=3, heads=1, head_dim=8, dtype="float32")
    >>> device, host = (ops.PoolLayout.allocate(n, **sizes) for n in ("max", "page_first_direct"))
    >>> device.arrays[2] = 7
    >>> ops.transfer(device, host, [2], [0])
    >>> host.arrays.shape, float(host.arrays[:, 0].min()), float(host.arrays[:, 1:].max())
    ((2, 4, 2, 3, 1, 8), 7.0, 0.0)
    """

    arrays: Any
    layout: str
    pages: int = field(init=False)
    layers: int = field(init=False)
    page_size: int = field(init=False)
    heads: int = field(init=False)
    head_dim: int = field(init=False)
    v_head_dim: int = field(init=False)
    dtype: np.dtype[Any] = field(init=False)
    _tensors: list[Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str):
            raise TypeError(f"layout is a {type(self.layout).__name__}, must be a str")
        if self.layout != PACKED and self.layout not in _AXES:
            raise ValueError(_unknown(self.layout))
        tensors = _packed(self.arrays) if self.layout == PACKED else _affine(self)
        _check_alike(tensors)
        pages, page_size, heads, *dims = _sizes(tensors, is_packed=self.layout == PACKED)
        found = {
            "pages": pages,
            "layers": _count_layers(tensors[0], 6 if self.layout == PACKED else 5),
            "page_size": page_size,
            "heads": heads,
            "head_dim": dims[0],
            "v_head_dim": dims[1] if len(dims) == 2 else 0,
            "dtype": tensors[0][0].dtype,
            "_tensors": tensors,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def allocate(
        cls,
        layout: str,
        *,
        pages: int,
        layers: int,
        page_size: int,
        heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> PoolLayout:
        """Allocate a cache of zeros.

        Parameters
        ----------
        layout : str
        pages, layers, page_size, heads, head_dim : int
        v_head_dim : int, optional
            `head_dim` by default, which gives one array; 0 gives keys only; for any other size
            `arrays` is a pair.
        dtype : str
            A dtype as in KVCacheParams.
        device : str
            "cpu"; "cuda:0" and higher; "pinned": host memory that GPUs can read and write.

        Returns
        -------
        PoolLayout

        Raises
        ------
        ValueError
            An unknown layout, dtype or device, a negative size, a head_dim that vLLM's layout
            cannot split.
        KVCacheError
            No GPU is available: "CUDA unavailable: " and the reason.
        """
        for name, value in (("layout", layout), ("dtype", dtype), ("device", device)):
            if not isinstance(value, str):
                raise TypeError(f"{name} is a {type(value).__name__}, must be a str")
        if layout != PACKED and layout not in _AXES:
            raise ValueError(_unknown(layout))
        kind = numpy_dtype(dtype)
        sizes = {"page": pages, "layer": layers, "token": page_size, "head": heads}
        counts = {axis: _size(f"count of axis {axis}", n) for axis, n in sizes.items()}
        head_dim = _size("head_dim", head_dim)
        values = head_dim if v_head_dim is None else _size("v_head_dim", v_head_dim)
        if layout == PACKED:
            shapes = _packed_shapes(counts, head_dim, values, kind.itemsize)
        else:
            shapes = _shapes(_AXES[layout], counts, head_dim, values)
        arrays = [zeros_on(device, shape, kind) for shape in shapes]
        return cls(arrays[0] if len(arrays) == 1 else tuple(arrays), layout)


def tensors_of(pool: PoolLayout) -> list[Tensor]:
    """Return K, and V if the cache has it, each as an array or as one array per layer."""
    return pool._tensors  # noqa: SLF001


# ---- inside --------------------------------------------------------------------------------------


def _unknown(layout: str) -> str:
    return f"layout is {layout!r}, must be one of {', '.join([*_AXES, PACKED])}"


def _size(name: str, value: Any) -> int:
    return integer(name, value, 0, 2**31 - 1)


def _affine(pool: PoolLayout) -> list[Tensor]:
    """Return K, and V if present: [pages, layers, page_size, heads, dim], or a list by layer."""
    parts = pool.arrays if isinstance(pool.arrays, tuple) else (pool.arrays,)
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"arrays is a tuple of {len(parts)}, must be a pair: K and V")
    tensors = [tensor for part in parts for tensor in _of_part(part, pool.layout)]
    if len(tensors) != len(parts) and len(parts) != 1:
        raise ValueError("a tuple of arrays is K and V; neither may have both along its axis kv")
    return tensors


def _of_part(part: Any, layout: str) -> list[Tensor]:
    if not isinstance(part, list):
        return [[array] for array in _by_kv(part, _AXES[layout])]
    axes = tuple(axis for axis in _AXES[layout] if axis != "layer")
    by_layer = [_by_kv(array, axes) for array in part]
    if len({len(found) for found in by_layer}) != 1:
        raise ValueError("a list of arrays has one for each layer, all with the same axes")
    return [list(tensor) for tensor in zip(*by_layer, strict=True)]


def _by_kv(given: Any, axes: tuple[str, ...]) -> list[NDArray[Any]]:
    """Return K, and V if the array has it."""
    array = any_array(given, "an array of the pool")
    named = axes if array.ndim == len(axes) + 1 else tuple(a for a in axes if a != "kv")
    if array.ndim != len(named) + 1:
        raise ValueError(
            f"an array of the pool has shape {array.shape}, must be [{', '.join(axes)}, head_dim]"
        )
    order = [named.index(a) for a in ("page", "layer", "token", "head") if a in named]
    if "kv" not in named:
        return [array.transpose(*order, -1)]
    kv = named.index("kv")
    if array.shape[kv] not in (1, 2):
        raise ValueError(
            f"an array of the pool has shape {array.shape}, must have 1 or 2 along axis {kv}: kv"
        )
    moved = array.transpose(kv, *order, -1)
    return [moved[i] for i in range(array.shape[kv])]


def _packed(arrays: Any) -> list[Tensor]:
    """Return K and V as [pages, layers, heads, units, page_size, elements of a unit]."""
    if not isinstance(arrays, tuple) or len(arrays) != 2:
        raise ValueError("the arrays of layout 'vllm' must be a tuple: K and V")
    named = (("K", arrays[0], 6), ("V", arrays[1], 5))
    tensors = [_packed_tensor(*each) for each in named]
    unit = tensors[0][0].shape[-1] * tensors[0][0].itemsize
    if unit != _UNIT:
        raise ValueError(f"the last axis of K has {unit} bytes, must have {_UNIT}")
    return tensors


def _packed_tensor(name: str, part: Any, rank: int) -> Tensor:
    """Return K, or V with units of one element; `rank` is the rank of the whole array."""
    is_list = isinstance(part, list)
    seen = [any_array(array, f"{name} of the pool") for array in (part if is_list else [part])]
    for array in seen:
        if array.ndim != rank - is_list:
            raise ValueError(f"{name} has shape {array.shape}, must have {rank - is_list} axes")
    if name == "V":
        seen = [array[..., None] for array in seen]
    return seen if is_list else [seen[0].swapaxes(0, 1)]


def _sizes(tensors: list[Tensor], *, is_packed: bool) -> tuple[int, ...]:
    """Return pages, page_size, heads and the dims of K and V."""
    found = set()
    dims = []
    for tensor in tensors:
        shape = tensor[0].shape
        if is_packed:
            found.add((shape[0], shape[-2], shape[-4]))
            dims.append(shape[-3] * shape[-1])
        else:
            found.add((shape[0], shape[-3], shape[-2]))
            dims.append(shape[-1])
    if len(found) != 1:
        raise ValueError(f"K and V differ in pages, page_size or heads: {sorted(found)}")
    return (*found.pop(), *dims)


def _count_layers(tensor: Tensor, rank: int) -> int:
    return int(tensor[0].shape[1]) if tensor[0].ndim == rank else len(tensor)


def _check_alike(tensors: list[Tensor]) -> None:
    arrays = [array for tensor in tensors for array in tensor]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"the arrays of a pool have dtypes {names}; must be one dtype")
    for tensor in tensors:
        if len({(array.shape, array.strides) for array in tensor}) != 1:
            raise ValueError("the layers of a pool differ in shape or strides, must be alike")


def _shapes(
    axes: Sequence[str], counts: dict[str, int], head_dim: int, values: int
) -> list[tuple[int, ...]]:
    if values == head_dim:
        both = counts | {"kv": 2}
        return [(*(both[axis] for axis in axes), head_dim)]
    alone = tuple(counts[axis] for axis in axes if axis != "kv")
    return [(*alone, dim) for dim in (head_dim, values) if dim]


def _packed_shapes(
    counts: dict[str, int], head_dim: int, values: int, itemsize: int
) -> list[tuple[int, ...]]:
    unit = _UNIT // itemsize
    if head_dim % unit:
        raise ValueError(f"head_dim is {head_dim}, must be a multiple of {unit}: 16 bytes")
    start = (counts["layer"], counts["page"], counts["head"])
    page_size = counts["token"]
    return [(*start, head_dim // unit, page_size, unit), (*start, values, page_size)]
