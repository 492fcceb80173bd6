# SPDX-License-Identifier: Apache-2.0
"""Narrow codes for wide values, and back."""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

from numpy.typing import NDArray

from kvcore.arguments import integer, pair_of
from kvcore.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.dtypes import NARROW, WIDE, numpy_dtype
from kvcore.ops.options import Options, array_at, documents_options

__all__ = ["dequantize", "quantize"]


def _one_of(name: str, dtype: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(dtype, str):
        raise TypeError(f"{name} is a {type(dtype).__name__}, must be a str")
    if dtype not in allowed:
        raise ValueError(f"{name} is {dtype!r}, must be one of {', '.join(allowed)}")
    return dtype


def _typed(name: str, array: NDArray[Any], allowed: tuple[str, ...]) -> str:
    if array.dtype.name not in allowed:
        raise TypeError(f"{name} has dtype {array.dtype}, must be one of {', '.join(allowed)}")
    return array.dtype.name


@documents_options
def quantize(
    x: Any,
    dtype: str,
    granularity: SupportsIndex | str,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    threads: int = 1,
) -> tuple[Any, Any]:
    """Quantise values, so that ``x`` is about ``values * scales``.

    Parameters
    ----------
    x : array float32, float16 or bfloat16 [..., n]
        Copied first where it is not in C order.
    dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}
    granularity : int, "head" or "tensor"
        Elements of the last axis per scale, its length for one per token and head; or one scale
        for each index of the last but one axis; or one for all.
    out : (array, array), optional
        Where values and scales go, in C order.

    Returns
    -------
    values : array `dtype` [..., n]
    scales : array float32 [..., n / granularity], [heads] or [1]
        Both in the library of `x`, or `out`.

    Raises
    ------
    ValueError
        A granularity that does not divide the last axis, another `dtype`, an `out` of another shape
        or order, or that shares memory with `x`.
    TypeError
        An `x` or `out` of another dtype, a granularity that is neither int nor str.

    Notes
    -----
    A scale is the largest finite magnitude of its group over the largest value of `dtype` (127 for
    int8), at least 1e-12; a code is ``x * (1 / scale)`` to the nearest, ties to even. Infinities
    and NaN do not count for the scale. An infinity takes the last code of its sign, in int8 127 and
    -128; NaN stays NaN, in int8 it is 0. The codes are the same on every processor, whatever its
    instruction set. Costs reading `x` twice (from cache where a group fits) and writing the codes.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> values, scales = ops.quantize(np.array([[1.0, -2.0, 0.5]], np.float32), "int8", 3)
    >>> values.tolist(), round(float(scales[0, 0]), 4)
    ([[64, -127, 32]], 0.0157)
    """
    options = Options(stream, threads, out)
    given_x = any_array(x, "x")
    place = options.place({"x": given_x}, out)
    source = place.contiguous(given_x, "x")
    _typed("x", source, WIDE)
    narrow = _one_of("dtype", dtype, NARROW)
    given = (None, None) if out is None else pair_of("out", out)
    codes = _target(place, "out[0]", given[0], source.shape, narrow)
    if isinstance(granularity, str):
        shape: tuple[int, ...] = _head_rows(source.shape, granularity)
        scales = _target(place, "out[1]", given[1], shape[1:2], "float32")
    else:
        group = _group(source.shape, granularity)
        groups = (*source.shape[:-1], source.shape[-1] // group)
        scales = _target(place, "out[1]", given[1], groups, "float32")
        shape = scales.size, group
    place.kernels.quantize(shape, source, codes, scales, *place.launch_args(options.threads))
    return options.result(place, x, codes, scales)  # type: ignore[no-any-return]


@documents_options
def dequantize(
    values: Any,
    scales: Any,
    dtype: str,
    *,
    out: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> Any:
    """Return ``values * scales``.

    Parameters
    ----------
    values : array float8_e4m3fn, float8_e5m2 or int8 [..., n]
    scales : array float32 [..., groups], [heads] or [1]
        As ``quantize`` returns them: groups of the last axis, one for each index of the last but
        one axis, or one for all.
    dtype : {"float32", "float16", "bfloat16"}
    out : array `dtype` [..., n], optional
        Where the result goes, in C order.

    Returns
    -------
    array `dtype` [..., n]
        In the library of `values`, or `out`.

    Raises
    ------
    ValueError
        Scales of another shape, another `dtype`, an `out` that shares memory with what is read.
    TypeError
        Arrays of other dtypes.

    Notes
    -----
    The product is rounded once, to the nearest, ties to even.
    """
    options = Options(stream, threads, out)
    given = any_array(values, "values"), any_array(scales, "scales")
    place = options.place({"values": given[0], "scales": given[1]}, out)
    codes = place.contiguous(given[0], "values")
    factors = place.contiguous(given[1], "scales")
    _typed("values", codes, NARROW)
    wide = _one_of("dtype", dtype, WIDE)
    _typed("scales", factors, ("float32",))
    target = _target(place, "out", out, codes.shape, wide)
    if factors.ndim == codes.ndim and factors.shape[:-1] == codes.shape[:-1]:
        shape: tuple[int, ...] = factors.size, _group_of_scales(codes.shape, factors.shape)
    else:
        shape = _head_rows(codes.shape, "tensor" if factors.shape == (1,) else "head")
        if factors.shape != shape[1:2]:
            raise ValueError(_bad_scales(codes.shape, factors.shape))
    place.kernels.dequantize(shape, codes, factors, target, *place.launch_args(options.threads))
    return options.result(place, values, target)


def _target(place: Place, name: str, given: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return the array that a result goes to."""
    if given is None:
        return place.empty(shape, numpy_dtype(dtype), "the values")
    array = array_at(place, given, name)
    _typed(name, array, (dtype,))
    if array.shape != shape or not (array.flags.c_contiguous and is_writable(array)):
        raise ValueError(
            f"{name} has shape {array.shape}, must be {shape}, writable and in C order"
        )
    return array


def _bad_scales(values: tuple[int, ...], scales: tuple[int, ...]) -> str:
    return (
        f"scales has shape {scales} for values of shape {values}, must be "
        f"{(*values[:-1], 'groups')}, one per head, or (1,)"
    )


def _group(shape: tuple[int, ...], granularity: SupportsIndex) -> int:
    group = integer("granularity", granularity)
    if not shape or group < 1 or shape[-1] % group:
        raise ValueError(
            f"granularity is {group}, must be at least 1 and divide the last axis of x, "
            f"whose shape is {shape}"
        )
    return group


def _group_of_scales(values: tuple[int, ...], scales: tuple[int, ...]) -> int:
    groups = scales[-1]
    if groups == 0 and values[-1] == 0:
        return 1
    if groups == 0 or values[-1] % groups:
        raise ValueError(_bad_scales(values, scales))
    return values[-1] // groups


def _head_rows(shape: tuple[int, ...], granularity: str) -> tuple[int, int, int]:
    """Return rows, heads and elements of a head."""
    if granularity not in ("head", "tensor"):
        raise ValueError(f"granularity is {granularity!r}, must be an int, 'head' or 'tensor'")
    if granularity == "tensor":
        return math.prod(shape[:-1]), 1, shape[-1] if shape else 1
    if len(shape) < 2:
        raise ValueError(f"x has shape {shape}, must have an axis of heads before the last one")
    return math.prod(shape[:-2]), shape[-2], shape[-1]
