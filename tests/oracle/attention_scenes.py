# SPDX-License-Identifier: Apache-2.0
"""Batches whose pools hold random K and V for their tokens, and poison everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import kvcore
from attention_oracle import Floats, attend
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

DTYPES = (*WIDE, *NARROW)


@dataclass
class Scene:
    """A batch of rows with `cached` and `new` tokens.

    `shared` lists groups (rows, pages): the rows of a group hold the same first pages. The longest
    group is last.
    """

    cached: Sequence[int]
    new: Sequence[int]
    page: int = 16
    heads: int = 2
    group: int = 2
    dim: int = 16
    v_dim: int | None = None  # None: the same as dim
    dtype: str = "float32"
    q_dtype: str = "float32"
    layout: str = "NHD"
    scales: str = "none"  # "tokens", "heads", "number"
    shared: Sequence[tuple[Sequence[int], int]] = ()
    seed: int = 0
    batch: kvcore.PagedBatch = field(init=False)
    q: Any = field(init=False)
    offsets: npt.NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.table, used, self.num_pages = self._place()
        parts = [self._pool(dim, used) for dim in (self.dim, self.v_dim or self.dim)]
        (self.keys, k_pool, k_scales), (self.values, v_pool, v_scales) = parts
        lengths = np.array(self.cached, np.uint32)
        self.batch = kvcore.PagedBatch(
            k_pool, v_pool, self.table, lengths, self.layout, k_scales, v_scales
        )
        self.offsets = np.concatenate([[0], np.cumsum(self.new)]).astype(np.uint32)
        # q is a view into a fused QKV array.
        fused = self.rng.normal(size=(int(self.offsets[-1]), self.q_heads + 3, self.dim + 5))
        self.q = fused.astype(numpy_dtype(self.q_dtype))[:, 1 : 1 + self.q_heads, 2 : 2 + self.dim]

    @property
    def q_heads(self) -> int:
        return self.heads * self.group

    @property
    def lengths(self) -> list[int]:
        return [a + b for a, b in zip(self.cached, self.new, strict=True)]

    def _place(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], int]:
        """Return a table of scattered pages, and a mask of the pool's tokens in this table."""
        columns = [-(-length // self.page) for length in self.lengths]
        num_pages = sum(columns) + 3
        ids = iter(self.rng.permutation(num_pages))
        table = np.full((len(columns), max(columns, default=0) + 1), num_pages + 7, np.uint32)
        for row, count in enumerate(columns):
            table[row, :count] = [next(ids) for _ in range(count)]
        for rows, count in self.shared:
            table[list(rows), :count] = table[rows[0], :count]
        used = np.zeros((num_pages, self.page), bool)
        for row, length in enumerate(self.lengths):
            at = np.arange(length)
            used[table[row, at // self.page], at % self.page] = True
        return table, used, num_pages

    def _pool(self, dim: int, used: npt.NDArray[np.bool_]) -> tuple[Any, Any, Any]:
        """Return the values in float64, and the pool that holds them with its scales."""
        kind, shape = numpy_dtype(self.dtype), (self.num_pages, self.page, self.heads, dim)
        if self.dtype == "int8":
            codes = self.rng.integers(-127, 128, shape).astype(kind)
        else:
            codes = self.rng.normal(size=shape).astype(kind)
        codes[~used] = np.full(1, 0xFF, np.uint8).repeat(kind.itemsize).view(kind)[0]
        scales, given = self._scales(shape)
        given = self._laid_out(given) if np.ndim(given) == 4 else given
        return codes.astype(np.float64) * scales, self._laid_out(codes), given

    def _scales(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the scales as [pages, page_size, heads, dim], and in the form for a batch."""
        step = np.float32(1 / 64 if self.dtype == "int8" else 1)
        if self.scales == "none":
            return 1.0, None
        if self.scales == "number":
            return step, float(step)
        if self.scales == "heads":
            per_head = (step * self.rng.uniform(0.5, 1, self.heads)).astype(np.float32)
            return per_head[:, None], per_head
        groups = shape[3] // next(n for n in (8, 5, 1) if shape[3] % n == 0)
        per_token = (step * self.rng.uniform(0.5, 1, (*shape[:3], groups))).astype(np.float32)
        return per_token.repeat(shape[3] // groups, axis=3), per_token

    def _laid_out(self, array: Any) -> Any:
        return array.transpose(0, 2, 1, 3).copy() if self.layout == "HND" else array

    def _rows(self, pool: Floats) -> list[Floats]:
        at = [np.arange(length) for length in self.lengths]
        return [
            pool[self.table[b, i // self.page], i % self.page].astype(float)
            for b, i in enumerate(at)
        ]

    def expected(self, q: Any = None, v_dim: int | None = None, **rule: Any) -> Any:
        """Return the oracle's result for `q`, by default the scene's q."""
        values = [rows[..., :v_dim] for rows in self._rows(self.values)]
        return attend(
            self.q if q is None else q, self._rows(self.keys), values, self.offsets, **rule
        )

    def leave_behind(self, window: int | None = None, chunk: int | None = None) -> None:
        """Write invalid page ids to all table entries that no token of a row reads."""
        for row, (cached, new) in enumerate(zip(self.cached, self.new, strict=True)):
            skipped = 0 if window is None else max(0, cached + 1 - window)
            if chunk is not None:
                skipped = max(skipped, cached - cached % chunk)
            columns = skipped // self.page if new else None
            self.table[row, :columns] = self.rng.choice([self.num_pages, 2**31, 2**32 - 1])

    def groups(self) -> list[kvcore.SharedPrefix]:
        """Return the shared prefixes in a manager's order: the longest first."""
        found = [
            kvcore.SharedPrefix(
                tuple(rows), min(pages * self.page, *(self.cached[r] for r in rows))
            )
            for rows, pages in self.shared
        ]
        return found[::-1]

    def pool_bytes(self) -> bytes:
        pools = self.batch.key_pool, self.batch.value_pool
        return b"".join(pool.tobytes() for pool in pools if pool is not None)


@st.composite
def scenes(draw: st.DrawFn, pages: Sequence[int] = (1, 3, 16, 24, 48)) -> Scene:
    """Draw a batch; `pages` are the possible page sizes."""
    page = draw(st.sampled_from(pages))
    rows = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(DTYPES))
    kinds = ["number", "heads", "tokens"] if dtype == "int8" else ["none", "heads", "tokens"]
    most = 2 * min(page, 48) + 2
    return Scene(
        cached=draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)),
        new=draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 17]), min_size=rows, max_size=rows)),
        page=page,
        heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16])),
        dim=draw(st.sampled_from([1, 7, 16, 59, 64, 80, 96, 112, 128])),
        v_dim=draw(st.sampled_from([None, None, 5, 33, 128])),
        dtype=dtype,
        q_dtype=draw(st.sampled_from(WIDE)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        scales=draw(st.sampled_from(kinds)) if dtype in NARROW else "none",
        seed=draw(st.integers(0, 2**32)),
    )


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the mask of the tokens, and the function from scores to weights."""
    options = {
        "scale": st.sampled_from([0.05, 0.3]),
        "causal": st.booleans(),
        "window": st.integers(1, 60),
        "chunk": st.integers(1, 60),
        "soft_cap": st.sampled_from([0.5, 5.0, 50.0]),
    }
    return {name: draw(values) for name, values in options.items() if draw(st.booleans())}


def on_device(machine: Any, scene: Scene) -> tuple[kvcore.PagedBatch, Any]:
    """Return the scene's batch and queries on device 1; q stays a view into a fused QKV."""
    batch = scene.batch

    def put(array: Any) -> Any:
        return machine.array(array, 1) if isinstance(array, np.ndarray) else array

    fused = machine.array(scene.q.base, 1)
    q = fused[:, 1 : 1 + scene.q_heads, 2 : 2 + scene.dim]
    moved = kvcore.PagedBatch(  # global scales may stay in host memory
        put(batch.key_pool),
        put(batch.value_pool),
        put(scene.table),
        put(batch.cache_lengths),
        batch.layout,
        put(batch.key_scales),
        put(batch.value_scales),
        global_scales=batch.global_scales,
    )
    return moved, q
