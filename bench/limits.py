# SPDX-License-Identifier: Apache-2.0
"""Measure the lower limits of the work: comparing, copying or reading the bytes once.

The benches use these limits for the same number of bytes in the same state: hot (the
same bytes again and again) or cold (distinct buffers in random order, together far
larger than the CPU caches), in fresh or in recycled memory.

``memcmp`` runs in a native loop: comparing two lists of equal but distinct
``bytes`` calls memcmp once per pair. A list of two-byte pairs gives the loop's own
cost, which is subtracted. ``memcpy`` and ``memchr`` go through ctypes with
prepared arguments; the time of the same call over zero bytes is subtracted. The empty
call takes about 700 ns and varies by 100 ns, so both limits start at 32 KiB.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from harness import Row, main, make_row, undisturbed

TOKEN_BYTES = 4
_COLD_BYTES = 192 << 20
_libc = ctypes.CDLL(None)


Call = Callable[..., Any]
Arguments = list[tuple[object, ...]]


def _libc_call(name: str) -> Call:
    call = getattr(_libc, name)
    call.restype = ctypes.c_void_p
    return cast("Call", call)


_memcpy = _libc_call("memcpy")
_memchr = _libc_call("memchr")


def _compare_ns(left: list[bytes], right: list[bytes]) -> int:
    start = perf_counter_ns()
    same = left == right
    spent = perf_counter_ns() - start
    assert same
    return spent


def _per_pair(left: list[bytes], right: list[bytes]) -> list[float]:
    return [_compare_ns(left, right) / len(left)]


def _loop_ns(count: int) -> float:
    """Return the ns of the comparing loop itself, per pair."""
    one, other = [b"ab"] * count, [bytes(bytearray(b"ab"))] * count
    return min(_compare_ns(one, other) for _ in range(15)) / count


def _twin(data: bytes) -> bytes:
    return bytes(memoryview(data))


def memcmp_hot(size: int, repeats: int = 15) -> list[float]:
    """Measure memcmp of the same ``size`` bytes again and again, us per call."""
    count = max(8, min(20_000, (16 << 20) // size))
    data = random.Random(1).randbytes(size)
    left, right = [data] * count, [_twin(data)] * count
    idle = _loop_ns(count)
    _compare_ns(left, right)
    spent = undisturbed([lambda: [_compare_ns(left, right)]] * repeats)
    return [max(s / count - idle, 0.0) / 1e3 for s in spent]


def memcmp_cold(size: int, prompts: int = 10_000, sample: int = 20_000) -> list[float]:
    """Measure memcmp of distinct pairs of ``size`` bytes in random order, us per call.

    Both sides of a pair are cold: each of ``prompts`` pairs is compared at most once.
    """
    rng = random.Random(2)
    block = rng.randbytes(1 << 20) * (size // (1 << 20) + 2)
    starts = [rng.randrange(1 << 20) for _ in range(prompts)]
    left = [block[s : s + size] for s in starts]
    right = [block[s : s + size] for s in starts]
    order = list(range(prompts))
    rng.shuffle(order)
    order = order[: min(prompts, sample)]
    count = max(1, len(order) // 10)
    idle = _loop_ns(count)
    parts = [order[i : i + count] for i in range(0, len(order), count)]
    runs = [([left[i] for i in part], [right[i] for i in part]) for part in parts]
    spent = undisturbed(partial(_per_pair, a, b) for a, b in runs)
    return [max(s - idle, 0.0) / 1e3 for s in spent]


def _slots(size: int, total: int) -> list[int]:
    """Return shuffled offsets of ``size``-byte slots in ``total`` bytes, multiples of 4096."""
    pitch = (size + 4095) // 4096 * 4096
    offsets = list(range(0, total - size + 1, pitch))
    random.Random(3).shuffle(offsets)
    return offsets


def _ctypes_ns(call: Call, arguments: Arguments) -> float:
    start = perf_counter_ns()
    for item in arguments:
        call(*item)
    return (perf_counter_ns() - start) / len(arguments)


def _per_call(call: Call, arguments: Arguments, repeats: int) -> list[float]:
    """Return the us of prepared calls, less the same calls over zero bytes."""
    empty = [(*item[:-1], ctypes.c_size_t(0)) for item in arguments]
    idle = min(_ctypes_ns(call, empty) for _ in range(3))
    spent = undisturbed([lambda: [_ctypes_ns(call, arguments)]] * repeats)
    return [max(s - idle, 0.0) / 1e3 for s in spent]


def _copies(target: int, source: int, size: int, slots: list[int]) -> Arguments:
    length = ctypes.c_size_t(size)
    pairs = zip(slots, reversed(slots), strict=True)
    return [(ctypes.c_void_p(target + a), ctypes.c_void_p(source + b), length) for a, b in pairs]


def memcpy_hot(size: int, repeats: int = 15) -> list[float]:
    """Measure memcpy of the same bytes again and again, us per call."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    item = _copies(target.ctypes.data, source.ctypes.data, size, [0])
    return _per_call(_memcpy, item * max(8, min(2000, (64 << 20) // size)), repeats)


def memcpy_cold(size: int, repeats: int = 5) -> list[float]:
    """Measure memcpy between distinct cold buffers in recycled memory, us per call."""
    source, target = np.ones(_COLD_BYTES, np.uint8), np.ones(_COLD_BYTES, np.uint8)
    slots = _slots(size, _COLD_BYTES)[:20_000]
    return _per_call(_memcpy, _copies(target.ctypes.data, source.ctypes.data, size, slots), repeats)


def memcpy_fresh(size: int) -> list[float]:
    """Measure memcpy of cold bytes into pages that were never touched, us per call."""
    source = np.ones(_COLD_BYTES, np.uint8)
    samples = []
    for _ in range(3):
        with mmap.mmap(-1, _COLD_BYTES) as target:
            view = (ctypes.c_char * _COLD_BYTES).from_buffer(target)
            slots = _slots(size, _COLD_BYTES)
            copies = _copies(ctypes.addressof(view), source.ctypes.data, size, slots)
            samples += _per_call(_memcpy, copies, 1)
            del view
    return samples


def read_us(size: int, *, hot: bool, repeats: int = 7) -> list[float]:
    """Measure reading ``size`` bytes once (memchr for an absent byte), us per call."""
    data = np.ones(size if hot else max(size, _COLD_BYTES), np.uint8)
    slots = [0] * 200 if hot else _slots(size, data.size)
    length, absent = ctypes.c_size_t(size), ctypes.c_int(2)
    base = data.ctypes.data
    return _per_call(_memchr, [(ctypes.c_void_p(base + s), absent, length) for s in slots], repeats)


def stream_reader(data: Any) -> Callable[[], object]:
    """Return a call that reads an array of ones once (memchr for an absent byte)."""
    absent = ctypes.c_int(2)
    return lambda: _memchr(ctypes.c_void_p(data.ctypes.data), absent, ctypes.c_size_t(data.nbytes))


def sha256_us(size: int, repeats: int = 15) -> list[float]:
    """Measure SHA-256 of ``size`` bytes with OpenSSL, again and again, us per call."""
    data = random.Random(4).randbytes(size)
    count = max(8, min(2000, (16 << 20) // size))
    spent = undisturbed([lambda: [_hash_ns(data, count)]] * repeats)
    return [s / count / 1e3 for s in spent]


def _hash_ns(data: bytes, count: int) -> int:
    start = perf_counter_ns()
    for _ in range(count):
        hashlib.sha256(data).digest()
    return perf_counter_ns() - start


def memcmp_limit(tokens: int, *, prompts: int = 0) -> float:
    """Return the median us of comparing ``tokens`` tokens: hot, or cold over ``prompts``."""
    size = tokens * TOKEN_BYTES
    return statistics.median(memcmp_cold(size, prompts) if prompts else memcmp_hot(size))


class ColdCopies:
    """Copy ``tokens`` cold tokens into recycled memory, one copy per call, each at a new place.

    The copies and the measured work run in turn, so that both see the same speed of the machine.
    """

    def __init__(self, tokens: int) -> None:
        self.samples: list[float] = []
        self._buffers = np.ones(_COLD_BYTES, np.uint8), np.ones(_COLD_BYTES, np.uint8)
        source, target = (buffer.ctypes.data for buffer in self._buffers)
        size = tokens * TOKEN_BYTES
        self._copies = cycle(_copies(target, source, size, _slots(size, _COLD_BYTES)))
        empty = _copies(target, source, 0, [0])
        self._idle = min(_ctypes_ns(_memcpy, empty) for _ in range(20))

    def __call__(self) -> None:
        """Time one copy."""
        spent = _ctypes_ns(_memcpy, [next(self._copies)])
        self.samples.append(max(spent - self._idle, 0.0) / 1e3)

    @property
    def limit(self) -> float:
        """The median us of the copies up to now."""
        return statistics.median(self.samples)


class ColdReads:
    """Read uncached bytes, each call at a new place; calls and measured work run in turn."""

    def __init__(self, total: int = _COLD_BYTES) -> None:
        self._data = np.ones(total, np.uint8)
        self._at = 0

    def __call__(self, size: int) -> None:
        """Read ``size`` bytes; after the last byte, start again at the first byte."""
        while size:
            part = min(size, self._data.size - self._at)
            begin = self._data.ctypes.data + self._at
            _memchr(ctypes.c_void_p(begin), ctypes.c_int(2), ctypes.c_size_t(part))
            self._at = (self._at + part) % self._data.size
            size -= part


class PieceCopies:
    """Copy the first tokens of a page to other pages, in all layers of K and V, in a bare loop.

    Parameters
    ----------
    blocks : array [pages, kv, layers, page_size, heads, head_dim]
    source : int
        The page that is copied again and again.
    tokens : int
    """

    def __init__(self, blocks: Any, source: int, *, tokens: int) -> None:
        seen = blocks.view(f"u{blocks.itemsize}")
        self._source = seen[source, :, :, :tokens]
        self._targets = [seen[page, :, :, :tokens] for page in range(len(seen)) if page != source]
        self._nothing = seen[source, :, :, :0]

    def samples(self, rounds: int, size: int) -> list[float]:
        """Return us per copy, less a copy of zero tokens, over runs of ``size`` copies."""
        targets = cycle(self._targets)
        runs = [[next(targets) for _ in range(size)] for _ in range(rounds)]
        return undisturbed(partial(self._run, run) for run in runs)

    def _run(self, targets: list[Any]) -> list[float]:
        idle = min(self._clock(self._nothing, [self._nothing] * len(targets)) for _ in range(3))
        return [max(self._clock(self._source, targets) - idle, 0) / len(targets) / 1e3]

    @staticmethod
    def _clock(source: Any, targets: list[Any]) -> int:
        copy = np.copyto
        start = perf_counter_ns()
        for target in targets:
            copy(target, source)
        return perf_counter_ns() - start


def blocks_of_memory(size: int) -> NDArray[np.uint8]:
    """Return memory that is present and page aligned, as O_DIRECT requires."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = 1
    return memory


class DirectFile:
    """Read and write a file without the system's page cache, on persistent threads.

    The constructor writes the whole file once. OSError if the file system has no O_DIRECT.

    Parameters
    ----------
    path : Path
    total, piece : int
        Bytes of the file, and of one read or write.
    threads : int
    """

    def __init__(self, path: Path, total: int, piece: int, threads: int) -> None:
        self._places = range(0, total - piece + 1, piece)
        self._piece, self._next = piece, 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(threads)
        self._memory = blocks_of_memory(max(piece, 16 << 20)).reshape(-1, piece)
        for at in range(0, total, self._memory.size):
            self._run(os.pwritev, range(at, min(total, at + self._memory.size), piece))

    def close(self) -> None:
        """End the threads and close the file."""
        self._pool.shutdown()
        os.close(self._file)

    def read(self, size: int) -> None:
        """Read ``size`` bytes in pieces at random places."""
        self._run(os.preadv, random.sample(self._places, size // self._piece))

    def write(self, size: int) -> None:
        """Write ``size`` bytes in consecutive pieces."""
        begin, self._next = self._next, self._next + size // self._piece
        count = len(self._places)
        self._run(os.pwritev, [self._places[i % count] for i in range(begin, self._next)])

    def _run(self, call: Call, places: Sequence[int]) -> None:
        def move(i: int, at: int) -> int:
            return int(call(self._file, [self._memory[i % len(self._memory)]], at))

        moved = sum(self._pool.map(move, range(len(places)), places))
        assert moved == len(places) * self._piece


class Products:
    """Multiply and add within the CPU caches; the calls and the measured work run in turn.

    numpy's product of float32 matrices gives the rate that the machine reaches. For the rate of
    one thread, set OPENBLAS_NUM_THREADS=1 before the process starts.
    """

    _N = 512
    COUNT = _N**3  # multiply-adds per call

    def __init__(self) -> None:
        self._a, self._b, self._c = (np.ones((self._N, self._N), np.float32) for _ in range(3))

    def __call__(self) -> None:
        """Multiply two matrices."""
        np.matmul(self._a, self._b, out=self._c)


def read_bandwidth() -> float:
    """Return the stream-read bandwidth of data far larger than the CPU caches, in GB/s."""
    return _COLD_BYTES / min(read_us(_COLD_BYTES, hot=False)) / 1e3


def measure(options: Namespace) -> list[Row]:
    """Measure every limit once."""
    rows = []
    for tokens in (64, 256, 2048, 8192, 32_768, 131_072):
        size = tokens * TOKEN_BYTES
        name = f"{tokens} tokens ({size // 1024 or size / 1024} KiB)"
        prompts = max(400, min(10_000, (_COLD_BYTES // 2) // size))
        cases = [
            ("memcmp.hot", memcmp_hot(size)),
            ("memcmp.cold", memcmp_cold(size, prompts)),
        ]
        if size >= 32 << 10:
            cases += [
                ("memcpy.hot", memcpy_hot(size)),
                ("memcpy.cold", memcpy_cold(size)),
                ("read.hot", read_us(size, hot=True)),
                ("read.cold", read_us(size, hot=False)),
            ]
        rows += [make_row(f"limit.{k}.{tokens}", f"{k}, {name}", s) for k, s in cases]
    big = 131_072 * TOKEN_BYTES
    fresh = memcpy_fresh(big)
    rows.append(make_row("limit.memcpy.fresh.131072", "memcpy.fresh, 512 KiB", fresh))
    if not options.quick:
        cold = memcmp_cold(64 * TOKEN_BYTES, 1_000_000, 200_000)
        rows.append(make_row("limit.memcmp.cold1m.64", "memcmp.cold, 64 tokens in 1M", cold))
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
