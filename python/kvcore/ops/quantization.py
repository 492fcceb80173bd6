# SPDX-License-Identifier: Apache-2.0
"""Convert wide values to narrow codes, and back."""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_writable
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.ops.nvfp4 import BLOCK, SCALES, global_scale_at
from kvcore.ops.options import Options, array_at, documents_options
from kvcore.support.arguments import integer, pair_of
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

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
    global_scale: Any = 1.0,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    threads: int = 1,
) -> tuple[Any, Any]:
    """Quantise values: ``x`` is about ``values * scales``, in nvfp4 also times `global_scale`.

    Parameters
    ----------
    x : array float32, float16 or bfloat16 [..., n]
        An array that is not in C order is copied first.
    dtype : {"float8_e4m3fn", "float8_e5m2", "int8", "nvfp4"}
    granularity : int, "head" or "tensor"
        Number of elements of the last axis per scale (the length of the axis gives a scale per
        token and head), "head" for a scale per index of the second-last axis, or "tensor" for one
        scale. 16 for nvfp4, whose last axis consists of whole blocks.
    global_scale : float or array float32 of one element
        For nvfp4: an additional scale of all elements. A scale on a GPU is read on the device,
        again in each replay of a captured graph.
    out : (array, array), optional
        Arrays for values and scales, in C order.

    Returns
    -------
    values : array `dtype` [..., n]
    scales : array float32 [..., n / granularity], [heads] or [1]
        Both in the library of `x`, or `out`. In nvfp4 values are uint8 [..., n / 2], two codes in a
        byte, with the code of the even index in the lower half, and scales are float8_e4m3fn [...,
        n / 16].

    Raises
    ------
    ValueError
        A granularity that does not divide the last axis, a wrong `dtype`, an `out` of a wrong shape
        or order, or an `out` that shares memory with `x`; a `global_scale` that is not finite and
        positive, or that is given for a dtype other than nvfp4.
    TypeError
        An `x` or `out` of a wrong dtype, a granularity that is neither int nor str.

    Notes
    -----
    A scale is the largest finite magnitude of its group over the largest value of `dtype` (127 for
    int8), at least 1e-12; a code is ``x * (1 / scale)`` to the nearest, ties to even. The scale
    ignores infinities and NaN. An infinity becomes the last code of its sign, in int8 127 and -128;
    NaN stays NaN, in int8 it becomes 0. The codes are the same on every processor, with every
    instruction set. The call reads `x` twice (from cache if a group fits) and writes the codes.

    nvfp4 has the codes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign (e2m1). A block's scale is its largest
    finite magnitude over ``6 * global_scale`` to the nearest float8_e4m3fn, at least 2^-9 and at
    most 448; a code is ``x * (1 / (scale * global_scale))`` to the nearest, ties to the even code.
    Each of these steps is rounded to float32. A magnitude above 6, or an infinity, becomes 6 with
    its sign; NaN becomes 0. The format is defined in NVIDIA's "Introducing NVFP4 for Efficient and
    Accurate Low-Precision Inference" (2025); its codes are defined in OCP's Microscaling formats.

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
    place = options.place({"x": given_x}, out, global_scale)
    source = place.contiguous(given_x, "x")
    _typed("x", source, WIDE)
    narrow = _one_of("dtype", dtype, (*NARROW, "nvfp4"))
    given = (None, None) if out is None else pair_of("out", out)
    if narrow == "nvfp4":
        made = _blocks(place, source, granularity, given, global_scale, options)
        return options.result(place, x, *made)  # type: ignore[no-any-return]
    _refuse_global(global_scale, narrow)
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
    global_scale: Any = 1.0,
    out: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> Any:
    """Return ``values * scales``, in nvfp4 also times `global_scale`.

    Parameters
    ----------
    values : array float8_e4m3fn, float8_e5m2 or int8 [..., n], or uint8 [..., n / 2]
        uint8 values are codes of nvfp4.
    scales : array float32 [..., groups], [heads] or [1]
        As ``quantize`` returns them: one per group of the last axis, one per index of the
        second-last axis, or one for all elements. In nvfp4 float8_e4m3fn [..., n / 16].
    global_scale : float or array float32 of one element
        For nvfp4, the same as for ``quantize``.
    dtype : {"float32", "float16", "bfloat16"}
    out : array `dtype` [..., n], optional
        Array for the result, in C order.

    Returns
    -------
    array `dtype` [..., n]
        In the library of `values`, or `out`.

    Raises
    ------
    ValueError
        Scales of a wrong shape, a wrong `dtype`, an `out` that shares memory with an input; a
        `global_scale` that ``quantize`` refuses.
    TypeError
        Arrays of other dtypes.

    Notes
    -----
    The product is rounded once, to the nearest, ties to even. In nvfp4 it is
    ``code * (scale * global_scale)``, with both products rounded to float32.
    """
    options = Options(stream, threads, out)
    given = any_array(values, "values"), any_array(scales, "scales")
    place = options.place({"values": given[0], "scales": given[1]}, out, global_scale)
    codes = place.contiguous(given[0], "values")
    factors = place.contiguous(given[1], "scales")
    _typed("values", codes, (*NARROW, "uint8"))
    wide = _one_of("dtype", dtype, WIDE)
    if codes.dtype.name == "uint8":
        target = _values_of_blocks(place, codes, factors, (wide, out), global_scale, options)
        return options.result(place, values, target)
    _refuse_global(global_scale, codes.dtype.name)
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


def _refuse_global(global_scale: Any, dtype: str) -> None:
    if isinstance(global_scale, float | int) and global_scale == 1:
        return
    raise ValueError(f"global_scale is given for {dtype}, must be left out except for nvfp4")


def _blocks(
    place: Place,
    source: NDArray[Any],
    granularity: SupportsIndex | str,
    given: tuple[Any, Any],
    global_scale: Any,
    options: Options,
) -> tuple[Any, Any]:
    """Return codes and scales of nvfp4."""
    if granularity != BLOCK or isinstance(granularity, bool):
        raise ValueError(f"granularity is {granularity!r}, must be {BLOCK} for nvfp4")
    n = source.shape[-1] if source.shape else 1
    if n % BLOCK:
        raise ValueError(
            f"x has shape {source.shape}, must have whole blocks of {BLOCK} along its last axis "
            f"for nvfp4; pad it"
        )
    lead = source.shape[:-1]
    factor = global_scale_at(place, global_scale)
    codes = _target(place, "out[0]", given[0], (*lead, n // 2), "uint8")
    scales = _target(place, "out[1]", given[1], (*lead, n // BLOCK), SCALES)
    last = place.launch_args(options.threads)
    place.kernels.quantize_nvfp4(source, codes, scales, factor, *last)
    return codes, scales


def _values_of_blocks(
    place: Place,
    codes: NDArray[Any],
    scales: NDArray[Any],
    target: tuple[str, Any],
    global_scale: Any,
    options: Options,
) -> Any:
    """Return the values of nvfp4 as an array of a wide dtype."""
    _typed("scales", scales, (SCALES,))
    is_whole = bool(codes.shape) and codes.shape[-1] * 2 % BLOCK == 0
    wanted = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK) if is_whole else "whole blocks"
    if scales.shape != wanted:
        raise ValueError(
            f"scales has shape {scales.shape} for nvfp4 values of shape {codes.shape}, must be "
            f"{wanted}: one for each {BLOCK} elements, which are {BLOCK // 2} bytes"
        )
    factor = global_scale_at(place, global_scale)
    wide, out = target
    made = _target(place, "out", out, (*codes.shape[:-1], 2 * codes.shape[-1]), wide)
    last = place.launch_args(options.threads)
    place.kernels.dequantize_nvfp4(codes, scales, made, factor, *last)
    return made


def _target(place: Place, name: str, given: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return the array for a result."""
    if given is None:
        kind = np.dtype(np.uint8) if dtype == "uint8" else numpy_dtype(dtype)
        return place.empty(shape, kind, "the values")
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
