# SPDX-License-Identifier: Apache-2.0
"""Arrays of random bytes: every bit pattern of a dtype, in rows that may be strided."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvcore.support.dtypes import numpy_dtype


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return elements of any bits, including NaN and infinities."""
    kind = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=np.uint8)
    return raw.view(kind)


def fused(rng: np.random.Generator, tokens: int, heads: int, dims: list[int], dtype: str) -> Any:
    """Return K and V cut out of one fused array [tokens, heads, sum of dims + 3]."""
    whole = random_bytes(rng, (tokens, heads, sum(dims) + 3), dtype)
    return [whole[:, :, a:b] for a, b in pairwise(np.cumsum([1, *dims]))]
