# SPDX-License-Identifier: Apache-2.0
"""Caches of random bytes in every layout, and their rows by page and layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.ops import PoolLayout
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

DTYPES = (*WIDE, *NARROW)

#: The axes as letters: page, kv, layer, token, head.
SHAPES = {
    "max": "pklth",
    "layer_first_nhd": "klpth",
    "layer_first_nhd_paired": "lpkth",
    "layer_first_hnd": "klpht",
    "layer_first_hnd_paired": "lpkht",
    "page_first": "kptlh",
    "page_first_direct": "kplth",
    "page_head": "kphtl",
    "page_unified": "plkth",
}
NAMES = [*SHAPES, "vllm"]
FORMS = ("one", "pair", "layers", "pair of layers")


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return random elements at an odd address."""
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = rng.integers(0, 256, size + 7, dtype=np.uint8)
    start = int(rng.integers(0, 7))
    return np.frombuffer(raw.data, kind, count=size // kind.itemsize, offset=start).reshape(shape)


class Cache:
    """A cache of random bytes, and the expected result of a transfer from it."""

    def __init__(
        self, rng: np.random.Generator, name: str, form: str, sizes: dict[str, int], dtype: str
    ) -> None:
        self.name, self.dims = name, [sizes["d"], sizes["e"]] if sizes["e"] else [sizes["d"]]
        if name == "vllm":
            x = 16 // numpy_dtype(dtype).itemsize
            start = [sizes[a] for a in "lph"]
            shapes = [(*start, sizes["d"] // x, sizes["t"], x), (*start, sizes["e"], sizes["t"])]
        elif form in ("one", "layers") and len(set(self.dims)) == 1:
            counts = sizes | {"k": len(self.dims)}
            shapes = [(*(counts[a] for a in SHAPES[name]), sizes["d"])]
        else:
            alone = SHAPES[name].replace("k", "")
            shapes = [(*(sizes[a] for a in alone), dim) for dim in self.dims]
        self.arrays = [random_bytes(rng, shape, dtype) for shape in shapes]
        self.pool = PoolLayout(self._form(form), name)

    def _form(self, form: str) -> Any:
        parts = self.arrays
        if "layers" in form:
            axes = self._axes(len(parts) == 1 and len(self.dims) == 2)
            at = axes.index("l")
            parts = [list(np.moveaxis(part, at, 0)) for part in parts]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _axes(self, with_kv: bool) -> str:
        if self.name == "vllm":
            return "lph"
        axes = SHAPES[self.name]
        one = len(self.arrays) == 1 and self.arrays[0].ndim == 6
        return axes if with_kv or one else axes.replace("k", "")

    def rows(self, kv: int) -> Any:
        """Return K or V as [page, layer, token, head, dim], a view or a copy; `put` writes."""
        if self.name == "vllm":
            if kv == 0:
                moved = self.arrays[0].transpose(1, 0, 4, 2, 3, 5)
                return moved.reshape(*moved.shape[:4], -1)
            return self.arrays[1].transpose(1, 0, 4, 2, 3)
        axes = self._axes(with_kv=False)
        array = self.arrays[0] if len(self.arrays) == 1 else self.arrays[kv]
        if "k" in axes:
            array = np.take(array, kv, axis=axes.index("k"))
            axes = axes.replace("k", "")
        return array.transpose(*(axes.index(a) for a in "plth"), -1)

    def put(self, kv: int, page: int, layer: int, rows: Any) -> None:
        """Store [token, head, dim] in one page of one layer."""
        if self.name == "vllm":
            if kv == 0:
                x = self.arrays[0].shape[-1]
                split = rows.reshape(*rows.shape[:2], -1, x).transpose(1, 2, 0, 3)
                self.arrays[0][layer, page] = split
            else:
                self.arrays[1][layer, page] = rows.transpose(1, 2, 0)
            return
        axes = self._axes(with_kv=False)
        array = self.arrays[0] if len(self.arrays) == 1 else self.arrays[kv]
        index = tuple({"p": page, "l": layer, "k": kv}.get(a, slice(None)) for a in axes)
        left = [a for a in axes if a in "th"]
        array[index] = rows if left == ["t", "h"] else rows.swapaxes(0, 1)

    def bytes(self) -> list[bytes]:
        return [array.tobytes() for array in self.arrays]
