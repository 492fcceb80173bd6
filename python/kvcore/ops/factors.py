# SPDX-License-Identifier: Apache-2.0
"""Check the scales of heads that a call passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.support.dtypes import WIDE

__all__ = ["head_factors"]


def head_factors(place: Place, scale: Any, heads: int) -> Any:
    """Return one factor for each head on the pool's device; values on a GPU are not checked."""
    if is_on_gpu(scale):
        factors = any_array(scale, "scale")
        if factors.shape != (heads,):
            raise ValueError(f"scale has shape {factors.shape}, must be ({heads},) on a GPU")
        return place.checked(factors, "scale")
    values = _numbers(scale)
    is_shaped = values.shape in ((), (1,), (heads,))
    if not is_shaped or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"scale is {scale!r}, must be positive and finite, one or one per head")
    return place.factors(values, heads, "scale")


def _numbers(scale: Any) -> NDArray[np.float32]:
    """Return numbers as float32; raise TypeError for other values."""
    values = np.asarray(scale)
    if values.dtype.kind not in "iuf" and values.dtype.name not in WIDE:
        is_huge = values.dtype.kind == "O" and all(type(each) is int for each in values.flat)
        if not is_huge:
            raise TypeError(f"scale has dtype {values.dtype}, must be numbers")
        values = np.full(values.shape, np.inf)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
