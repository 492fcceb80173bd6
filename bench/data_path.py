# SPDX-License-Identifier: Apache-2.0
"""Ask what moving and quantising K and V costs beside the bytes themselves, one thread.

Data lie far apart in pools larger than the caches; sources and destinations are recycled,
so no first touch is timed. Each sample of an operation is followed by one of its limit:
memcpy of the same bytes, or reading and writing as many as the operation reads and writes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import ml_dtypes
import numpy as np

from harness import Row, main, make_row, undisturbed
from kvcore import PagedBatch, ops
from limits import fill_us, read_us

_HEADS, _DIM = 8, 128
_POOL_BYTES = 512 << 20
_LENGTH = 2048
_ROWS = 4


def _us(call: Callable[[], object]) -> float:
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1e3


def _against(
    key: str,
    work: str,
    calls: Sequence[Callable[[], object]],
    limits: Sequence[Callable[[], object]],
    name: str,
) -> Row:
    """Time calls and their limits by turns."""
    least: list[float] = []

    def part(call: Callable[[], object], limit: Callable[[], object]) -> list[float]:
        mine, other = _us(call), _us(limit)
        least.append(other)
        return [mine]

    spent = undisturbed(partial(part, *pair) for pair in zip(calls, limits, strict=True))
    return make_row(key, work, spent, limit=float(np.median(least)), limit_name=name)


class _Scene:
    """Hold pools in which batches of pages lie scattered, and memory of the same size."""

    def __init__(self, page: int, dtype: Any) -> None:
        kind = np.dtype(dtype)
        self.token_bytes = _HEADS * _DIM * kind.itemsize
        pages = _POOL_BYTES // 2 // (self.token_bytes * page)
        self.pools = [np.zeros((pages, page, _HEADS, _DIM), kind) for _ in range(2)]
        for pool in self.pools:
            pool.view(np.uint8).fill(1)
        order = np.random.default_rng(5).permutation(pages).astype(np.uint32)
        columns = _LENGTH // page
        count = pages // (columns * _ROWS)
        self.tables = order[: count * columns * _ROWS].reshape(count, _ROWS, columns)
        shape = (_ROWS * _LENGTH, _HEADS, _DIM)
        self.tokens = [np.ones(shape, kind) for _ in range(2)]
        self.flat = [np.full(self.pools[0].nbytes, 1, np.uint8) for _ in range(2)]
        self.offsets = np.arange(_ROWS + 1, dtype=np.uint32) * np.uint32(_LENGTH)
        self.bytes = self.tokens[0].nbytes

    def batch(self, i: int, length: int) -> PagedBatch:
        table = self.tables[i % len(self.tables)]
        lengths = np.full(_ROWS, length, np.uint32)
        return PagedBatch(self.pools[0], self.pools[1], table, lengths)

    def memcpy(self, i: int, *, out: bool) -> Callable[[], object]:
        """Copy as many bytes of K and of V between the tokens and a place in as large a pool."""
        begin = i * self.bytes % (self.flat[0].nbytes - self.bytes)
        places = [flat[begin : begin + self.bytes] for flat in self.flat]
        tokens = [token.reshape(-1).view(np.uint8) for token in self.tokens]

        def copy() -> None:
            for place, token in zip(places, tokens, strict=True):
                np.copyto(token if out else place, place if out else token)

        return copy


def _moves(page: int, rounds: int) -> list[Row]:
    scene = _Scene(page, ml_dtypes.bfloat16)
    label = f"{_ROWS} x {_LENGTH} tokens, 8 heads of 128 bf16, page {page}"
    (k, v), offsets = scene.tokens, scene.offsets

    def append(i: int) -> None:
        ops.append(scene.batch(i, 0), 0, k, v, offsets)

    def gather(i: int) -> None:
        ops.gather(scene.batch(i, _LENGTH), 0, out=(k, v))

    appends = [partial(append, i) for i in range(rounds)]
    gathers = [partial(gather, i) for i in range(rounds)]
    into = [scene.memcpy(i, out=False) for i in range(rounds)]
    out = [scene.memcpy(i, out=True) for i in range(rounds)]
    return [
        _against(f"data.append.{page}", f"append {label}", appends, into, "memcpy"),
        _against(f"data.gather.{page}", f"gather {label}", gathers, out, "memcpy"),
    ]


def _page_copies(rounds: int) -> Row:
    """Copy 128 pages of 128 KiB, scattered."""
    pool = np.full((_POOL_BYTES >> 17, 1 << 17), 1, np.uint8)
    order = np.random.default_rng(6).permutation(len(pool))
    other = np.full(pool.shape, 1, np.uint8)

    def pairs(i: int) -> Any:
        at = i * 256 % (len(pool) - 256)
        return order[at : at + 256].reshape(128, 2)

    def copy(i: int) -> None:
        ops.copy_pages(pool, pairs(i))

    def memcpy(i: int) -> None:
        at = i * 128 % (len(pool) - 256)
        np.copyto(other[at : at + 128], other[at + 128 : at + 256])

    calls = [partial(copy, i) for i in range(rounds)]
    limits = [partial(memcpy, i) for i in range(rounds)]
    return _against("data.copy_pages", "copy 128 pages of 128 KiB", calls, limits, "memcpy")


def _quantised(wide: str, narrow: str, rounds: int, tokens: int) -> list[Row]:
    kind = np.dtype(getattr(ml_dtypes, wide, wide))
    x = np.random.default_rng(7).normal(size=(tokens, _HEADS, _DIM)).astype(kind)
    values, scales = ops.quantize(x, narrow, _DIM)
    back_to = np.ones_like(x)
    codes, written = values.nbytes + scales.nbytes, x.nbytes
    one = min(read_us(x.nbytes, hot=False)) + fill_us(codes)
    back = min(read_us(codes, hot=False)) + fill_us(written)
    label = f"{wide} to {narrow}, a scale per token and head"
    quantised = undisturbed(
        lambda: [_us(lambda: ops.quantize(x, narrow, _DIM, out=(values, scales)))]
        for _ in range(rounds)
    )
    widened = undisturbed(
        lambda: [_us(lambda: ops.dequantize(values, scales, wide, out=back_to))]
        for _ in range(rounds)
    )
    name = "reading + writing"
    return [
        make_row(
            f"data.quantize.{wide}.{narrow}",
            f"quantise {label}",
            quantised,
            limit=one,
            limit_name=name,
        ),
        make_row(
            f"data.dequantize.{wide}.{narrow}",
            f"dequantise {label}",
            widened,
            limit=back,
            limit_name=name,
        ),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure the moves at three page sizes, page copies, and quantising."""
    rounds = 4 if options.quick else 48
    rows = [row for page in (1, 16, 128) for row in _moves(page, rounds)]
    rows.append(_page_copies(rounds))
    tokens = 4_096 if options.quick else 32_768
    for wide in ("float32", "bfloat16"):
        for narrow in ("float8_e4m3fn", "int8"):
            rows += _quantised(wide, narrow, rounds // 4, tokens)
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
