# SPDX-License-Identifier: Apache-2.0
"""The dtypes a KV cache can be stored in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["NARROW", "WIDE", "itemsize", "narrowed", "numpy_dtype"]

#: Dtypes of the K and V that callers pass.
WIDE = ("float32", "float16", "bfloat16")
#: Dtypes that K and V are quantised to.
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")

_ITEMSIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

_LARGEST_FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def itemsize(name: str) -> int:
    """Return the bytes of one element; raise ValueError for a dtype that caches do not store."""
    if name not in _ITEMSIZES:
        raise ValueError(f"dtype is {name!r}, must be one of {', '.join(_ITEMSIZES)}")
    return _ITEMSIZES[name]


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype; bfloat16 and float8 come from ml_dtypes, imported on demand."""
    itemsize(name)
    if name in ("float32", "float16", "int8"):
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def narrowed(value: float, dtype: np.dtype[Any]) -> Any:
    """Return the nearest element of a cache dtype, ties to even.

    Values beyond the range of float8 or int8 become the nearest finite element. NaN stays NaN.

    Raises
    ------
    ValueError
        `value` is NaN, and the dtype is int8.
    """
    if dtype.name in WIDE:
        with np.errstate(over="ignore"):
            return dtype.type(value)
    if dtype.name == "int8":
        if math.isnan(value):
            raise ValueError("NaN has no int8 element; store a number")
        return dtype.type(round(min(max(value, -128.0), 127.0)))
    largest = _LARGEST_FP8[dtype.name]
    return dtype.type(value if math.isnan(value) else min(max(value, -largest), largest))
