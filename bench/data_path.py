# SPDX-License-Identifier: Apache-2.0
"""Compare moving and quantising K and V with moving the bytes, on one thread.

Data are far apart in pools larger than the CPU caches. The pools begin on a cache line, as a
manager's pools do. Sources and destinations are recycled, so no first touch of memory is timed.
Each sample of an operation is followed by a sample of its limit: memcpy of the same bytes, or
reading and writing the number of bytes that the operation reads and writes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import ml_dtypes
import numpy as np

from harness import Row, main, make_row, undisturbed
from kvcore import PagedBatch, ops
from kvcore.backends.arrays import present_zeros
from limits import stream_reader

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


def _key(name: str, threads: int) -> str:
    return name if threads == 1 else f"{name}.{threads}"


class _Scene:
    """Pools with scattered pages of batches, and contiguous memory of the same size."""

    def __init__(self, page: int, dtype: Any) -> None:
        kind = np.dtype(dtype)
        self.token_bytes = _HEADS * _DIM * kind.itemsize
        pages = _POOL_BYTES // 2 // (self.token_bytes * page)
        self.pools = [present_zeros((pages, page, _HEADS, _DIM), kind) for _ in range(2)]
        for pool in self.pools:
            pool.view(np.uint8).fill(1)
        order = np.random.default_rng(5).permutation(pages).astype(np.uint32)
        columns = _LENGTH // page
        count = pages // (columns * _ROWS)
        self.tables = order[: count * columns * _ROWS].reshape(count, _ROWS, columns)
        shape = (_ROWS * _LENGTH, _HEADS, _DIM)
        self.tokens = [present_zeros(shape, kind) for _ in range(2)]
        self.flat = [present_zeros((self.pools[0].nbytes,), np.dtype(np.uint8)) for _ in range(2)]
        for array in (*self.tokens, *self.flat):
            array.view(np.uint8).fill(1)
        self.offsets = np.arange(_ROWS + 1, dtype=np.uint32) * np.uint32(_LENGTH)
        self.bytes = self.tokens[0].nbytes

    def batch(self, i: int, length: int) -> PagedBatch:
        table = self.tables[i % len(self.tables)]
        lengths = np.full(_ROWS, length, np.uint32)
        return PagedBatch(self.pools[0], self.pools[1], table, lengths)

    def memcpy(self, i: int, *, out: bool) -> Callable[[], object]:
        """Return a memcpy of K and V between the tokens and a place in other memory."""
        begin = i * self.bytes % (self.flat[0].nbytes - self.bytes)
        places = [flat[begin : begin + self.bytes] for flat in self.flat]
        tokens = [token.reshape(-1).view(np.uint8) for token in self.tokens]

        def copy() -> None:
            for place, token in zip(places, tokens, strict=True):
                np.copyto(token if out else place, place if out else token)

        return copy


def _moves(page: int, rounds: int, threads: int = 1) -> list[Row]:
    scene = _Scene(page, ml_dtypes.bfloat16)
    label = f"{_ROWS} x {_LENGTH} tokens, 8 heads of 128 bf16, page {page}, {threads} thread"
    (k, v), offsets = scene.tokens, scene.offsets

    def append(i: int) -> None:
        ops.append(scene.batch(i, 0), 0, k, v, offsets, threads=threads)

    def scatter(i: int) -> None:
        ops.scatter(scene.batch(i, _LENGTH), 0, k, v, offsets, threads=threads)

    def gather(i: int) -> None:
        ops.gather(scene.batch(i, _LENGTH), 0, out=(k, v), threads=threads)

    jobs = [("append", append, False), ("scatter", scatter, False), ("gather", gather, True)]
    key = _key(f"{page}", threads)
    return [
        _against(
            f"data.{name}.{key}",
            f"{name} {label}",
            _calls(call, rounds),
            [scene.memcpy(i, out=out) for i in range(rounds)],
            "memcpy",
        )
        for name, call, out in jobs
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


class _Limit:
    """A call that reads and writes the byte counts of an operation, in other memory."""

    def __init__(self, size: int) -> None:
        self._memory = [np.full(size, 1, np.uint8) for _ in range(2)]
        self._at = 0

    def __call__(self, read: int, written: int) -> Callable[[], object]:
        source, target = self._memory
        at = self._at = (self._at + 1) % 7
        begin = at * (len(source) - max(read, written)) // 7 & -64
        written_part = target[begin : begin + written]
        reader = stream_reader(source[begin : begin + read])

        def run() -> None:
            reader()
            written_part.fill(at)

        return run


def _calls(call: Callable[[int], object], rounds: int) -> list[Callable[[], object]]:
    return [partial(call, i) for i in range(rounds)]


_NAME = "reading + writing"

# The key and the description of a job, the call of a round, bytes read and written.
_Job = tuple[str, str, Callable[[int], object], int, int]


def _converting(key: str, jobs: Sequence[_Job], limit: _Limit, rounds: int) -> list[Row]:
    """Time each job, with reading and writing the same number of bytes as the limit."""
    return [
        _against(
            f"data.{name}.{key}",
            work,
            _calls(call, rounds),
            [limit(read, written) for _ in range(rounds)],
            _NAME,
        )
        for name, work, call, read, written in jobs
    ]


def _quantised(wide: str, narrow: str, rounds: int, tokens: int, threads: int = 1) -> list[Row]:
    """Quantise and dequantise contiguous arrays, with a scale per token and head or per head."""
    kind = np.dtype(getattr(ml_dtypes, wide, wide))
    x = np.random.default_rng(7).normal(size=(tokens, _HEADS, _DIM)).astype(kind)
    values, scales = ops.quantize(x, narrow, _DIM)
    of_heads = ops.quantize(x, narrow, "head")[1]
    back = np.ones_like(x)
    limit = _Limit(2 * x.nbytes)
    small, large = values.nbytes + scales.nbytes, x.nbytes
    own: dict[str, Any] = {"threads": threads}
    key = _key(f"{wide}.{narrow}", threads)
    label = f"{wide} to {narrow}, {threads} thread"

    def quantize(_: int) -> None:
        ops.quantize(x, narrow, _DIM, out=(values, scales), **own)

    def by_head(_: int) -> None:
        ops.quantize(x, narrow, "head", out=(values, of_heads), **own)

    def dequantize(_: int) -> None:
        ops.dequantize(values, scales, wide, out=back, **own)

    jobs = [
        ("quantize", f"quantise {label}, per token and head", quantize, large, small),
        ("quantize_head", f"quantise {label}, per head", by_head, 2 * large, values.nbytes),
        ("dequantize", f"dequantise {label}", dequantize, small, large),
    ]
    return _converting(key, jobs, limit, rounds)


def _converted(page: int, wide: str, narrow: str, rounds: int, threads: int = 1) -> list[Row]:
    """Append to pools of codes and scales, and gather from these pools."""
    scene = _Scene(page, getattr(ml_dtypes, narrow, narrow))
    scale_pools = [np.ones((*pool.shape[:3], 1), np.float32) for pool in scene.pools]
    kind = np.dtype(getattr(ml_dtypes, wide, wide))
    rng = np.random.default_rng(8)
    k, v = (rng.normal(size=(*t.shape, 1))[..., 0].astype(kind) for t in scene.tokens)
    limit = _Limit(_POOL_BYTES // 2)
    large = 2 * k.nbytes
    small = 2 * (scene.bytes + 4 * _HEADS * len(k))

    def batch(i: int, length: int) -> PagedBatch:
        plain = scene.batch(i, length)
        return replace(plain, key_scales=scale_pools[0], value_scales=scale_pools[1])

    def append(i: int) -> None:
        ops.append(batch(i, 0), 0, k, v, scene.offsets, threads=threads)

    def gather(i: int) -> None:
        ops.gather(batch(i, _LENGTH), 0, out=(k, v), threads=threads)

    key = _key(f"{page}.{wide}.{narrow}", threads)
    label = f"{_ROWS} x {_LENGTH} tokens, page {page}, {threads} thread"
    jobs = [
        ("append", f"append {wide} to {narrow}, {label}", append, large, small),
        ("gather", f"gather {narrow} as {wide}, {label}", gather, small, large),
    ]
    return _converting(key, jobs, limit, rounds)


def measure(options: Namespace) -> list[Row]:
    """Measure moves at three page sizes, page copies, quantising, and moves that convert."""
    rounds = 4 if options.quick else 48
    rows = [row for page in (1, 16, 128) for row in _moves(page, rounds)]
    rows += _moves(16, rounds, threads=2)
    rows.append(_page_copies(rounds))
    tokens = 4_096 if options.quick else 32_768
    for wide in ("float32", "bfloat16"):
        for narrow in ("float8_e4m3fn", "float8_e5m2", "int8"):
            rows += _quantised(wide, narrow, rounds // 2, tokens)
        for narrow in ("float8_e4m3fn", "int8"):
            for page in (16, 128):
                rows += _converted(page, wide, narrow, rounds // 2)
    rows += _quantised("bfloat16", "float8_e4m3fn", rounds // 2, tokens, threads=2)
    rows += _converted(16, "bfloat16", "float8_e4m3fn", rounds // 2, threads=2)
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
