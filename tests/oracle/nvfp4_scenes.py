# SPDX-License-Identifier: Apache-2.0
"""Batches of attention with pools in nvfp4, and poison at all places that no row may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import kvcore
from attention_scenes import Scene
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_oracle import decoded

__all__ = ["Nvfp4Scene", "nvfp4_scenes"]


@dataclass
class Nvfp4Scene(Scene):
    """A batch like Scene's, whose `dim` and `v_dim` are whole blocks."""

    dtype: str = "nvfp4"
    global_scales: tuple[Any, Any] = (0.75, 0.02)

    def __post_init__(self) -> None:
        self._made = 0
        super().__post_init__()
        given = self.batch
        self.batch = kvcore.PagedBatch(
            *(given.key_pool, given.value_pool, self.table, given.cache_lengths, self.layout),
            *(given.key_scales, given.value_scales),
            global_scales=self.global_scales,
        )

    def _pool(self, dim: int, used: npt.NDArray[np.bool_]) -> tuple[Any, Any, Any]:
        shape = self.num_pages, self.page, self.heads
        codes = self.rng.integers(0, 256, (*shape, dim // 2), np.uint8)
        # Values of about 1, with scales between 0.25 and 1.
        kind = numpy_dtype("float8_e4m3fn")
        scales = self.rng.uniform(0.25, 1, (*shape, dim // 16)).astype(kind)
        codes[~used] = 0xFF
        scales.view(np.uint8)[~used] = 0x7F  # NaN
        scale = float(np.asarray(self.global_scales[self._made]).reshape(-1)[0])
        self._made += 1
        values = decoded(codes, scales, "float32", scale).astype(np.float64)
        return values, self._laid_out(codes), self._laid_out(scales)


@st.composite
def nvfp4_scenes(draw: st.DrawFn, pages: Sequence[int] = (1, 3, 16, 24)) -> Nvfp4Scene:
    """Draw a batch; `pages` are the possible page sizes."""
    page = draw(st.sampled_from(pages))
    rows = draw(st.integers(0, 3))
    most = 2 * min(page, 48) + 2
    return Nvfp4Scene(
        cached=draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)),
        new=draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 17]), min_size=rows, max_size=rows)),
        page=page,
        heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16])),
        dim=draw(st.sampled_from([16, 48, 64, 80, 112, 128])),
        v_dim=draw(st.sampled_from([None, None, 32, 128])),
        q_dtype=draw(st.sampled_from(WIDE)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        seed=draw(st.integers(0, 2**32)),
    )
