# SPDX-License-Identifier: Apache-2.0
"""Pools in nvfp4, a batch over them, and the expected contents after writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore import PagedBatch
from kvcore.support.dtypes import numpy_dtype
from nvfp4_oracle import drawn, encoded

__all__ = ["Pools"]

TABLE, LENGTHS, NEW = [[4, 1, 0], [2, 9, 9], [5, 3, 6]], [5, 0, 3], [2, 0, 4]
PAGE, PAGES = 3, 7


def _strided(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Return random bytes as every second page of a longer array, with gaps between heads."""
    kind = numpy_dtype(dtype) if dtype != "uint8" else np.dtype(np.uint8)
    pages, size, heads, width = shape
    raw = np.random.default_rng(seed).integers(
        0, 256, (2 * pages, size, heads + 1, width + 8), np.uint8
    )
    return raw.view(kind)[::2, :, :heads, :width]


@dataclass
class Pools:
    """The pools of a layer, filled with random bytes.

    Attributes
    ----------
    dims : (int, int)
        Elements of a head of K and of V.
    is_strided : bool
        The pools are views into larger arrays, with gaps that no call may write to.
    """

    heads: int = 2
    dims: tuple[int, int] = (48, 48)
    layout: str = "NHD"
    is_strided: bool = False
    global_scales: Any = None
    arrays: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arrays = {}
        for i, (name, dim) in enumerate(zip(("key", "value"), self.dims, strict=True)):
            for j, (what, width, dtype) in enumerate(
                [("pool", dim // 2, "uint8"), ("scales", dim // 16, "float8_e4m3fn")]
            ):
                shape = PAGES, PAGE, self.heads, width
                array = _strided(shape, dtype, 4 * i + j)
                self.arrays[f"{name}_{what}"] = array if self.is_strided else array.copy()

    def in_layout(self, array: Any) -> Any:
        return array.transpose(0, 2, 1, 3) if self.layout == "HND" else array

    def batch(self, put: Any = None) -> PagedBatch:
        """Make a batch over the arrays, or over `put(array)` for each array."""
        put = put or (lambda array: array)
        made = {name: put(self.in_layout(array)) for name, array in self.arrays.items()}
        table, lengths = np.array(TABLE, np.uint32), np.array(LENGTHS, np.uint32)
        return PagedBatch(
            **made,
            lookup_table=put(table),
            cache_lengths=put(lengths),
            layout=self.layout,
            global_scales=self.global_scales,
        )

    def tokens(self, count: int, dtype: str = "float32", seed: int = 50) -> tuple[Any, Any]:
        k, v = (drawn((count, self.heads, dim), dtype, seed + i) for i, dim in enumerate(self.dims))
        return k, v

    def places(self, lengths: Any = LENGTHS, new: Any = NEW) -> list[tuple[int, int]]:
        """Return the page and the entry of each new token."""
        return [
            (TABLE[row][token // PAGE], token % PAGE)
            for row, (first, count) in enumerate(zip(lengths, new, strict=True))
            for token in range(first, first + count)
        ]

    def expected(self, k: Any, v: Any, places: Any) -> dict[str, Any]:
        """Return the arrays after tokens are written to `places`; None stands for padding."""
        found = {name: array.copy() for name, array in self.arrays.items()}
        for i, (name, tokens) in enumerate((("key", k), ("value", v))):
            given = (1.0, 1.0) if self.global_scales is None else self.global_scales
            scale = float(np.asarray(given[i]).reshape(-1)[0])
            codes, scales = encoded(tokens, scale)
            for at, place in enumerate(places):
                if place is not None:
                    found[f"{name}_pool"][place] = codes[at]
                    found[f"{name}_scales"][place] = scales[at]
        return found
