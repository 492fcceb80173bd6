# SPDX-License-Identifier: Apache-2.0
"""Compare attention over pages with reading K and V once, and with torch.

Pages are scattered in pools far larger than the CPU caches. The pools begin on a cache line, as a
manager's pools do. Each sample is followed by a sample of each limit. One limit reads the number of
bytes of K and V that attention must read. If more than two query heads share K and V, a second
limit does the multiply-adds that attention needs, at the rate of a matrix product (see
limits.py). A row shows the larger limit. torch's scaled_dot_product_attention runs over contiguous
K and V in the same memory, once without a gather and once after a gather. Without torch its rows
are left out. Times are CPU time of the thread, which excludes other processes. The rows of two
threads use wall-clock time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import ml_dtypes
import numpy as np

import kvcore
from harness import Row, main, make_row, plain_row, undisturbed
from kvcore import PagedBatch, ops
from kvcore.apps.cli.machine import isa_level
from kvcore.backends.arrays import present_zeros
from limits import ColdReads, Products

_HEADS, _DIM = 8, 128
_SINGLE_THREAD = "OPENBLAS_NUM_THREADS"
_PATIENCE_S = 2.0
_SLOWER = 1.25
_TORCH = importlib.util.find_spec("torch") is not None
_LEVELS = ("baseline", "x86-64-v3", "x86-64-v4")


def _us(call: Callable[[], object], clock: Callable[[], int] = thread_time_ns) -> float:
    start = clock()
    call()
    return (clock() - start) / 1e3


@dataclass(frozen=True)
class _Shape:
    """The shape of a decode step: rows of the same length, one new token per row."""

    dtype: str = "bfloat16"
    page: int = 16
    group: int = 1
    length: int = 4096

    @property
    def key(self) -> str:
        return f"{self.dtype}.page{self.page}.g{self.group}.{self.length}"

    @property
    def text(self) -> str:
        pages = f"pages of {self.page}"
        return f"{self.dtype}, groups of {self.group}, {self.length} tokens, {pages}"


class _Pool:
    """K and V of one dtype, seen as pages of any size or as contiguous sequences."""

    def __init__(self, dtype: str, total: int) -> None:
        self.dtype = dtype
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        some = np.random.default_rng(5).normal(size=1 << 18)
        codes = (some * 40 if dtype == "int8" else some).astype(kind)
        count = total // 2 // (_HEADS * _DIM * kind.itemsize) * _HEADS * _DIM
        self.flat = [present_zeros((count,), kind) for _ in range(2)]
        for flat in self.flat:
            flat[:] = np.resize(codes, count)
        self.tokens = count // (_HEADS * _DIM)
        self.scales = np.full((self.tokens, _HEADS, 1), 1 / 64, np.float32)
        self.token_bytes = 2 * _HEADS * _DIM * kind.itemsize
        if dtype == "int8":
            self.token_bytes += 2 * _HEADS * 4

    def batches(self, shape: _Shape, step_bytes: int) -> list[PagedBatch]:
        """Return batches of about `step_bytes` in scattered pages; together they cover the pool."""
        columns = -(-shape.length // shape.page)
        rows = max(1, step_bytes // (shape.length * self.token_bytes))
        pages = self.tokens // shape.page
        order = np.random.default_rng(6).permutation(pages).astype(np.uint32)
        count = max(1, pages // (rows * columns))
        tables = order[: count * rows * columns].reshape(count, rows, columns)
        lengths = np.full(rows, shape.length - 1, np.uint32)
        pools = [flat.reshape(-1, _HEADS, _DIM) for flat in self.flat]
        k, v = (p[: pages * shape.page].reshape(pages, shape.page, _HEADS, _DIM) for p in pools)
        scales = self.scales[: pages * shape.page].reshape(pages, shape.page, _HEADS, 1)
        given = (scales, scales) if self.dtype == "int8" else (None, None)
        return [PagedBatch(k, v, table, lengths, "NHD", *given) for table in tables]

    def contiguous(self, rows: int, length: int) -> list[list[Any]]:
        """Return torch tensors K and V [rows, heads, length, dim] that together cover the pool."""
        import torch

        size = rows * _HEADS * length * _DIM
        shape = (rows, _HEADS, length, _DIM)
        found = []
        for at in range(0, self.flat[0].size - size + 1, size):
            bits = [flat[at : at + size].view(f"u{flat.itemsize}") for flat in self.flat]
            kind = getattr(torch, self.dtype)
            found.append([torch.from_numpy(b).view(kind).reshape(shape) for b in bits])
        return found


def _queries(tokens: int, heads: int, dtype: str) -> Any:
    wide = dtype if dtype in ("float32", "float16", "bfloat16") else "float32"
    x = np.random.default_rng(7).normal(size=(tokens, heads, _DIM))
    return x.astype(np.dtype(getattr(ml_dtypes, wide, wide)))


def _limited(
    key: str, work: str, samples: Sequence[tuple[float, ...]], names: tuple[str, ...], **more: Any
) -> Row:
    """Make a row of samples (own, limit, ...).

    A sample whose limits took more than `_SLOWER` times their shortest time is left out: the
    machine was slow.
    """
    least = min(sum(sample[1:]) for sample in samples)
    kept = [sample for sample in samples if sum(sample[1:]) <= _SLOWER * least]
    own, *limits = ([*column] for column in zip(*kept, strict=True))
    found = [statistics.median(limit) for limit in limits]
    most = max(found)
    return make_row(key, work, own, limit=most, limit_name=names[found.index(most)], **more)


class _Bench:
    """The measurements, with the sizes of a full or a quick run."""

    def __init__(self, options: Namespace) -> None:
        self.quick = options.quick
        self.length = 512 if self.quick else 4096
        self.rounds = 3 if self.quick else 16
        self.step_bytes = (4 if self.quick else 32) << 20
        self.pool_bytes = (32 if self.quick else 384) << 20
        self.reads = ColdReads(self.pool_bytes // 2)
        self.products = Products()

    def samples(self, call: Callable[[int], tuple[float, ...]], rounds: int = 0) -> Any:
        parts = (lambda i=i: [call(i)] for i in range(rounds or self.rounds))
        return undisturbed(parts, _PATIENCE_S)

    def _reading(self, size: int) -> float:
        return _us(lambda: self.reads(size))

    def _multiplying(self, count: int) -> float:
        return _us(self.products) * count / self.products.COUNT

    def decode(self, pool: _Pool, shape: _Shape, prefix: str = "attention.decode") -> Row:
        """Measure one new token per row against reading the K and V of the row."""
        batches = pool.batches(shape, self.step_bytes)
        rows = len(batches[0].cache_lengths)
        q = _queries(rows, _HEADS * shape.group, pool.dtype)
        out, offsets = np.empty_like(q), np.arange(rows + 1, dtype=np.uint32)
        tokens = rows * shape.length

        def sample(i: int) -> tuple[float, ...]:
            batch = batches[i % len(batches)]
            own = _us(lambda: ops.attention(batch, 0, q, offsets, out=out))
            limits = [self._reading(tokens * pool.token_bytes)]
            if shape.group > 2:
                limits.append(self._multiplying(tokens * _HEADS * shape.group * 2 * _DIM))
            return own, *limits

        label = f"decode {shape.text}, {rows} rows"
        names = "stream read", "multiply-adds"
        return _limited(f"{prefix}.{shape.key}", label, self.samples(sample), names)

    def threads(self, pool: _Pool, shape: _Shape) -> Row:
        """Measure how much faster two threads are than one."""
        batches = pool.batches(shape, self.step_bytes)
        rows = len(batches[0].cache_lengths)
        q = _queries(rows, _HEADS * shape.group, pool.dtype)
        offsets = np.arange(rows + 1, dtype=np.uint32)

        def sample(i: int) -> tuple[float, ...]:
            batch, other = batches[i % len(batches)], batches[(i + 1) % len(batches)]
            alone = partial(ops.attention, batch, 0, q, offsets)
            both = partial(ops.attention, other, 0, q, offsets, threads=2)
            return _us(alone, perf_counter_ns), _us(both, perf_counter_ns)

        one, two = map(statistics.median, zip(*self.samples(sample), strict=True))
        label = f"two threads compared with one, {shape.text}"
        return plain_row(f"attention.threads.{shape.key}", label, one / two, "x", self.rounds)

    def beside_torch(self, pool: _Pool, shape: _Shape) -> list[Row]:
        """Measure decoding, and torch over contiguous K and V of the same shape."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        torch.set_num_threads(1)
        attend = partial(scaled_dot_product_attention, enable_gqa=shape.group > 1)
        batches = pool.batches(shape, self.step_bytes)
        rows = len(batches[0].cache_lengths)
        dense = pool.contiguous(rows, shape.length)
        q = _queries(rows, _HEADS * shape.group, pool.dtype)
        bits = torch.from_numpy(q.view(f"u{q.itemsize}")).view(getattr(torch, pool.dtype))
        torch_q, offsets = bits[:, :, None], np.arange(rows + 1, dtype=np.uint32)
        lengths = np.full(rows, shape.length, np.uint32)
        into = tuple(np.ones((rows * shape.length, _HEADS, _DIM), q.dtype) for _ in range(2))

        def gathered(i: int) -> None:
            ops.gather(batches[i % len(batches)], 0, lengths=lengths, out=into)
            views = [torch.from_numpy(x.view(f"u{x.itemsize}")).view(torch_q.dtype) for x in into]
            k, v = (x.reshape(rows, -1, _HEADS, _DIM).transpose(1, 2) for x in views)
            attend(torch_q, k, v)

        def sample(i: int) -> tuple[float, ...]:
            k, v = dense[(i + 1) % len(dense)]
            own = _us(lambda: ops.attention(batches[i % len(batches)], 0, q, offsets))
            other = _us(lambda: attend(torch_q, k, v))
            return own, other, _us(lambda: gathered(i + 2))

        own, plain, behind = zip(*self.samples(sample), strict=True)
        return [
            _limited(
                f"attention.{key}.{shape.key}",
                f"decode compared with {name}, {shape.text}",
                [*zip(own, times, strict=True)],
                (name,),
            )
            for key, name, times in (
                ("torch", "torch SDPA", plain),
                ("gather", "gather + torch SDPA", behind),
            )
        ]

    def prefill(self, pool: _Pool, group: int) -> list[Row]:
        """Measure a chunk of 512 tokens at the end of a prompt of 4096 tokens."""
        new, length = (64, 512) if self.quick else (512, 4096)
        shape = _Shape(pool.dtype, 16, group, length)
        (batch, *_) = pool.batches(shape, 1)
        lengths = np.array([length - new], np.uint32)
        batch = PagedBatch(batch.key_pool, batch.value_pool, batch.lookup_table, lengths)
        q, offsets = _queries(new, _HEADS * group, pool.dtype), np.array([0, new], np.uint32)
        seen = new * (length - new) + new * (new + 1) // 2
        work = seen * _HEADS * group * 2 * _DIM

        def sample(_: int) -> tuple[float, ...]:
            own = _us(lambda: ops.attention(batch, 0, q, offsets))
            return own, self._multiplying(work), *beside()

        beside = self._torch_prefill(pool, q, length) if _TORCH else tuple
        found = self.samples(sample, 3 if self.quick else 5)
        label = f"prefill {new} tokens after {length - new}, {pool.dtype}, groups of {group}"
        key = f"{pool.dtype}.g{group}"
        own, limit, *other = zip(*found, strict=True)
        pairs = [*zip(own, limit, strict=True)]
        rows = [_limited(f"attention.prefill.{key}", label, pairs, ("multiply-adds",))]
        for times in other:
            pairs = [*zip(own, times, strict=True)]
            key = f"attention.prefill.torch.{key}"
            rows.append(_limited(key, f"{label}, compared with torch", pairs, ("torch SDPA",)))
        return rows

    def _torch_prefill(self, pool: _Pool, q: Any, length: int) -> Callable[[], tuple[float]]:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        torch.set_num_threads(1)
        k, v = pool.contiguous(1, length)[0]
        bits = torch.from_numpy(q.view(f"u{q.itemsize}")).view(k.dtype)
        queries = bits.transpose(0, 1)[None]
        new = len(q)
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        call = partial(scaled_dot_product_attention, queries, k, v, attn_mask=mask, enable_gqa=True)
        return lambda: (_us(call),)

    def cascade(self, pool: _Pool, group: int) -> list[Row]:
        """Measure rows that share a long prefix; each row has some tokens of its own."""
        prefix, own, rows = (512, 32, 8) if self.quick else (8192, 128, 64)
        shape = _Shape(pool.dtype, 16, group, own)
        (batch, *_) = pool.batches(shape, rows * own * pool.token_bytes)
        (long, *_) = pool.batches(_Shape(pool.dtype, 16, group, prefix), 1)
        common = np.broadcast_to(long.lookup_table[:1], (rows, prefix // 16))
        table = np.concatenate([common, batch.lookup_table[:rows]], axis=1)
        lengths = np.full(rows, prefix + own - 1, np.uint32)
        batch = PagedBatch(batch.key_pool, batch.value_pool, table, lengths)
        shared = [kvcore.SharedPrefix(tuple(range(rows)), prefix)]
        q = _queries(rows, _HEADS * group, pool.dtype)
        offsets = np.arange(rows + 1, dtype=np.uint32)
        work = rows * (prefix + own) * _HEADS * group * 2 * _DIM
        size = (prefix + rows * own) * pool.token_bytes

        def sample(_: int) -> tuple[float, ...]:
            once = _us(lambda: ops.cascade_attention(batch, 0, q, offsets, shared))
            flat = _us(lambda: ops.attention(batch, 0, q, offsets))
            return once, self._reading(size), self._multiplying(work), flat

        found = self.samples(sample, 3 if self.quick else 5)
        label = (
            f"{rows} rows of {prefix} shared and {own} own tokens, {pool.dtype}, groups of {group}"
        )
        key = f"attention.cascade.{pool.dtype}.g{group}"
        names = "stream read", "multiply-adds"
        gain = statistics.median(x[3] for x in found) / statistics.median(x[0] for x in found)
        return [
            _limited(key, label, [x[:3] for x in found], names),
            plain_row(f"{key}.gain", f"flat / shared: {label}", gain, "x", len(found)),
        ]

    def small_call(self, pool: _Pool) -> Row:
        """Measure the cost of a call that reads almost no bytes."""
        (batch, *_) = pool.batches(_Shape(pool.dtype, 16, 1, 16), 1)
        q, offsets = _queries(1, _HEADS, pool.dtype), np.array([0, 1], np.uint32)
        out = np.empty_like(q)

        def sample(_: int) -> tuple[float, ...]:
            calls = range(200)
            return (
                _us(lambda: [ops.attention(batch, 0, q, offsets, out=out) for _ in calls]) / 200,
            )

        spent = [own for (own,) in self.samples(sample)]
        return make_row("attention.call", "a call: 1 row of 16 tokens, 8 heads", spent)


def level_rows(options: Namespace) -> list[Row]:
    """Measure two decode steps on the instruction set that KVCORE_ISA names."""
    bench = _Bench(options)
    prefix = f"attention.isa.{os.environ['KVCORE_ISA']}"
    return [
        bench.decode(_Pool(dtype, bench.pool_bytes), _Shape(dtype, 16, group, bench.length), prefix)
        for dtype, group in (("float32", 1), ("bfloat16", 4))
    ]


def _levels(options: Namespace) -> list[Row]:
    """Measure every instruction set of this processor, each in its own process."""
    program = f"""
import json, attention
from argparse import Namespace
from dataclasses import asdict
rows = attention.level_rows(Namespace(quick={options.quick}))
print(json.dumps([asdict(row) for row in rows]))
"""
    found = []
    for level in _LEVELS:
        if level != "baseline" and level > isa_level():
            continue
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"KVCORE_ISA": level},
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows = [Row(**row) for row in json.loads(done.stdout)]
        found += [Row(**asdict(row) | {"work": f"{level}: {row.work}"}) for row in rows]
    return found


def _of_dtype(bench: _Bench, dtype: str) -> list[Row]:
    pool = _Pool(dtype, bench.pool_bytes)
    shape = partial(_Shape, dtype, length=bench.length)
    rows = [bench.decode(pool, shape(group=group)) for group in (1, 2, 4, 8)]
    if dtype == "bfloat16":
        rows += [bench.decode(pool, shape(page=p, group=g)) for p in (1, 128) for g in (1, 4)]
        lengths = (128, 1024) if bench.quick else (128, 1024, 32_768)
        rows += [bench.decode(pool, _Shape(group=g, length=n)) for n in lengths for g in (1, 4)]
        rows += bench.cascade(pool, 1) + bench.cascade(pool, 4)
        rows.append(bench.small_call(pool))
    if dtype in ("float32", "bfloat16"):
        rows += [bench.threads(pool, shape(group=g)) for g in (1, 4)]
        rows += bench.prefill(pool, 4)
    if _TORCH and dtype in ("float32", "float16", "bfloat16"):
        rows += [row for g in (1, 4) for row in bench.beside_torch(pool, shape(group=g))]
    return rows


def measure(options: Namespace) -> list[Row]:
    """Measure every dtype, then every instruction set."""
    if not _TORCH:
        print("torch is not installed: the rows of torch are left out", file=sys.stderr)
    bench = _Bench(options)
    dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")
    rows = [row for dtype in dtypes for row in _of_dtype(bench, dtype)]
    return rows + _levels(options)


if __name__ == "__main__":
    if os.environ.get(_SINGLE_THREAD) != "1":  # before numpy starts its threads
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, os.environ | {_SINGLE_THREAD: "1"})
    raise SystemExit(main(measure, __doc__))
