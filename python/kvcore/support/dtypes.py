# SPDX-License-Identifier: Apache-2.0
"""The dtypes a KV cache can be stored in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore import _core

__all__ = ["FROM_ML_DTYPES", "NARROW", "WIDE", "itemsize", "narrowed", "numpy_dtype"]

# The table is DTypeTraits of dtype.hpp.
_ITEMSIZES = {name: size for name, size, _ in _core.dtypes()}
_LARGEST = {name: largest for name, _, largest in _core.dtypes()}

#: Dtypes of the K and V that callers pass.
WIDE = tuple(name for name, size in _ITEMSIZES.items() if size > 1)
#: Dtypes that K and V are quantised to.
NARROW = tuple(name for name, size in _ITEMSIZES.items() if size == 1)
#: Dtypes that numpy has not: they come from ml_dtypes.
FROM_ML_DTYPES = tuple(name for name in _ITEMSIZES if not hasattr(np, name))


def itemsize(name: str) -> int:
    """Return the bytes of one element; raise ValueError for a dtype that caches do not store."""
    if name not in _ITEMSIZES:
        raise ValueError(f"dtype is {name!r}, must be one of {', '.join(_ITEMSIZES)}")
    return _ITEMSIZES[name]


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype; bfloat16 and float8 come from ml_dtypes, imported on demand."""
    itemsize(name)
    if name not in FROM_ML_DTYPES:
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
    largest = _LARGEST[dtype.name]
    return dtype.type(value if math.isnan(value) else min(max(value, -largest), largest))
