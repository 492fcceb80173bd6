# SPDX-License-Identifier: Apache-2.0
"""Compare moving pages and tokens between layouts with memcpy, on one thread.

Pages are scattered in pools of 512 MiB, which are allocated as kvcore allocates its own pools. Each
sample moves 16 MiB. It is followed by a sample of its limit: memcpy (or memset) of the same number
of bytes in one piece, at another place of the same pools. Times are CPU time of the thread: they
include waiting for memory, but not the time in which another process has the processor.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time_ns
from typing import Any

import ml_dtypes
import numpy as np

from harness import Row, main, make_row, undisturbed
from kvcore import PagedBatch, ops
from kvcore.backends.arrays import present_zeros
from kvcore.ops import PoolLayout

_POOL_BYTES = 512 << 20
_STEP_BYTES = 16 << 20
_SHAPES = {
    "max": "pklth",
    "layer_first_nhd": "klpth",
    "layer_first_hnd": "klpht",
    "page_first": "kptlh",
    "page_first_direct": "kplth",
    "page_head": "kphtl",
}

_Call = Callable[[], object]


def _us(call: _Call) -> float:
    start = thread_time_ns()
    call()
    return (thread_time_ns() - start) / 1e3


def against(
    key: str, work: str, calls: Sequence[_Call], limits: Sequence[_Call], name: str = "memcpy"
) -> Row:
    """Time calls and their limits in turn."""
    least: list[float] = []

    def part(call: _Call, limit: _Call) -> list[float]:
        mine, other = _us(call), _us(limit)
        least.append(other)
        return [mine]

    spent = undisturbed(partial(part, *pair) for pair in zip(calls, limits, strict=True))
    return make_row(key, work, spent, limit=float(np.median(least)), limit_name=name)


@dataclass(frozen=True)
class _Sizes:
    layers: int = 8
    page: int = 16
    heads: int = 8
    dim: int = 128

    @property
    def layer_bytes(self) -> int:
        """The bytes of K and V of a page in one layer, in bfloat16."""
        return 2 * 2 * self.page * self.heads * self.dim

    @property
    def pages(self) -> int:
        return _POOL_BYTES // (self.layer_bytes * self.layers)

    @property
    def text(self) -> str:
        return f"{self.layers} layers, {self.heads} heads of {self.dim} bf16, page {self.page}"


class _Pools:
    """The memory of two caches, seen in any layout."""

    def __init__(self) -> None:
        self.bytes = [present_zeros((_POOL_BYTES,), np.dtype(np.uint8)) for _ in range(2)]

    def seen(self, i: int, name: str, sizes: _Sizes) -> PoolLayout:
        """Return the first or second memory as a cache in a layout."""
        elements = self.bytes[i].view(ml_dtypes.bfloat16)
        if name == "vllm":
            keys, values = elements.reshape(2, sizes.layers, sizes.pages, sizes.heads, -1)
            inner = (sizes.dim // 8, sizes.page, 8)
            packed = (
                keys.reshape(*keys.shape[:3], *inner),
                values.reshape(*values.shape[:3], sizes.dim, sizes.page),
            )
            return PoolLayout(packed, name)
        counts = {"p": sizes.pages, "k": 2, "l": sizes.layers, "t": sizes.page, "h": sizes.heads}
        shape = [counts[axis] for axis in _SHAPES[name]]
        return PoolLayout(elements.reshape(*shape, sizes.dim), name)

    def memcpy(self, i: int) -> _Call:
        begin = i * _STEP_BYTES % (_POOL_BYTES - _STEP_BYTES)
        end = begin + _STEP_BYTES
        return partial(np.copyto, self.bytes[1][begin:end], self.bytes[0][begin:end])

    def memset(self, i: int) -> _Call:
        begin = i * _STEP_BYTES % (_POOL_BYTES - _STEP_BYTES)
        return partial(self.bytes[1][begin : begin + _STEP_BYTES].fill, 3)


def scattered(pages: int, count: int, i: int, seed: int) -> Any:
    """Return distinct pages, with different pages in each round."""
    order = np.random.default_rng(seed).permutation(pages)
    return np.resize(np.roll(order, -i * count), count)


def _move(pools: _Pools, names: tuple[str, str], sizes: _Sizes, rounds: int, by: str) -> Row:
    """Measure moving scattered pages, in all layers at once or in one layer."""
    source, target = (pools.seen(i, name, sizes) for i, name in enumerate(names))
    one = by == "layer"
    count = min(sizes.pages, _STEP_BYTES // (sizes.layer_bytes * (1 if one else sizes.layers)))
    ids = [[scattered(sizes.pages, count, i, seed) for seed in (5, 6)] for i in range(rounds)]

    def move(i: int) -> None:
        ops.transfer(source, target, *ids[i], layers=i % sizes.layers if one else None)

    key = f"transfer.{names[0]}.{names[1]}.{by}.{sizes.page}.{sizes.heads}x{sizes.dim}"
    work = f"{names[0]} to {names[1]}, {'one' if one else 'all'} of {sizes.text}"
    calls = [partial(move, i) for i in range(rounds)]
    return against(key, work, calls, [pools.memcpy(i) for i in range(rounds)])


def _starts(pools: _Pools, sizes: _Sizes, rounds: int) -> Row:
    """Measure copying the first tokens of pages within a pool."""
    pool = pools.seen(1, "max", sizes)
    tokens = max(1, sizes.page * 3 // 4)
    count = _STEP_BYTES // (sizes.layer_bytes * sizes.layers * tokens // sizes.page)
    copies = [
        np.column_stack([*ids.reshape(2, -1), np.full(count, tokens)])
        for ids in (scattered(sizes.pages, 2 * count, i, 7) for i in range(rounds))
    ]
    calls = [partial(ops.copy_partial, pool, each) for each in copies]
    work = f"copy_partial, {tokens} tokens of {sizes.text}"
    limits = [pools.memcpy(i) for i in range(rounds)]
    return against(f"transfer.copy_partial.{sizes.page}", work, calls, limits)


def _appends(pools: _Pools, sizes: _Sizes, rounds: int, layout: str) -> Row:
    """Measure writing tokens of fused rows to slots of scattered pages of one layer."""
    inner = (sizes.page, sizes.heads) if layout == "NHD" else (sizes.heads, sizes.page)
    elements = pools.bytes[1].view(ml_dtypes.bfloat16).reshape(2, -1, *inner, sizes.dim)
    none = np.zeros((0, 0), np.uint32), np.zeros(0, np.uint32)
    batch = PagedBatch(elements[0], elements[1], *none, layout=layout)
    tokens = _STEP_BYTES // (4 * sizes.heads * sizes.dim)
    shape = (tokens, 4 * sizes.heads, sizes.dim)
    fused = present_zeros(shape, np.dtype(ml_dtypes.bfloat16))
    k, v = fused[:, -2 * sizes.heads : -sizes.heads], fused[:, -sizes.heads :]
    pages = len(elements[0])
    slots = [
        (
            scattered(pages, tokens // sizes.page, i, 8)[:, None] * sizes.page
            + np.arange(sizes.page)
        ).ravel()
        for i in range(rounds)
    ]
    calls = [partial(ops.append_slots, batch, 0, k, v, each) for each in slots]
    work = f"append_slots, fused rows to {layout} of {sizes.heads} heads, page {sizes.page}"
    limits = [pools.memcpy(i) for i in range(rounds)]
    key = f"transfer.append_slots.{layout}.{sizes.page}.{sizes.heads}x{sizes.dim}"
    return against(key, work, calls, limits)


def _fills(pools: _Pools, sizes: _Sizes, rounds: int) -> Row:
    pool = pools.seen(1, "max", sizes).arrays
    count = _STEP_BYTES // (sizes.layer_bytes * sizes.layers)
    ids = [scattered(sizes.pages, count, i, 9) for i in range(rounds)]
    calls = [partial(ops.fill_pages, pool, each, 0xFF) for each in ids]
    work = f"fill_pages, {sizes.layer_bytes * sizes.layers // 1024} KiB each"
    limits = [pools.memset(i) for i in range(rounds)]
    return against(f"transfer.fill.{sizes.page}", work, calls, limits, "memset")


def measure(options: Namespace) -> list[Row]:
    """Measure moves between layouts, then moves within a pool."""
    rounds = 3 if options.quick else 32
    pools = _Pools()
    usual, single = _Sizes(), _Sizes(page=1)
    latent = _Sizes(layers=16, page=1, heads=1, dim=128)
    moves = [
        (("max", "page_first_direct"), usual, "pages"),
        (("max", "page_first_direct"), usual, "layer"),
        (("layer_first_nhd", "page_first_direct"), usual, "layer"),
        (("layer_first_nhd", "page_first"), usual, "pages"),
        (("layer_first_nhd", "max"), single, "pages"),
        (("layer_first_nhd", "max"), latent, "pages"),
        (("layer_first_nhd", "layer_first_hnd"), usual, "pages"),
        (("max", "page_head"), usual, "pages"),
        (("max", "vllm"), usual, "pages"),
        (("vllm", "max"), usual, "pages"),
        (("vllm", "vllm"), usual, "pages"),
    ]
    rows = [_move(pools, names, sizes, rounds, by) for names, sizes, by in moves]
    rows += [_starts(pools, sizes, rounds) for sizes in (usual, single)]
    rows += [_appends(pools, usual, rounds, layout) for layout in ("NHD", "HND")]
    rows += [_appends(pools, sizes, rounds, "NHD") for sizes in (single, latent)]
    rows += [_fills(pools, sizes, rounds) for sizes in (usual, single, latent)]
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
