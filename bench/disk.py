# SPDX-License-Identifier: Apache-2.0
"""Compare putting and getting pages of the disk store with raw reads and writes of the disk.

A batch is 16 MiB of pages of 256 KiB or 1 MiB, at random places of a full store of 512 MiB: each
new page evicts a page. Each batch is followed by raw reads or writes of the same number of bytes,
in pieces of the same size, by the same number of threads, in another file of the same directory.
These bypass the page cache of the system. Times are wall-clock times, because both sides wait for
the disk. The limit of the checksum is a read of the same bytes.

``KVCORE_BENCH_DIR`` names a directory on the disk to measure. The default is the system's directory
for temporary files.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter_ns

from harness import Row, main, make_row
from kvcore import _core
from kvcore.stores import DiskStore
from limits import ColdReads, DirectFile, blocks_of_memory
from transfer import against

_BYTES = 512 << 20
_STEP = 16 << 20
_THREADS = (1, 4)
_BLOCK = 4096


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


class _Filled:
    """A full store, and memory for a batch."""

    def __init__(self, folder: Path, page_bytes: int, threads: int) -> None:
        self.page_bytes = page_bytes
        self.pages = _BYTES // page_bytes
        self.store = DiskStore(
            f"disk:{folder}:{self.pages * (page_bytes + _BLOCK) + _BLOCK}",
            page_bytes=page_bytes,
            fingerprint=bytes(32),
            threads=threads,
        )
        self._count = _STEP // page_bytes
        self._buffers = list(blocks_of_memory(_STEP).reshape(self._count, page_bytes))
        self._next = 0
        while self._next < self.pages:
            self.put()

    def put(self) -> None:
        """Store a batch of new pages."""
        keys = [_key(self._next + i) for i in range(self._count)]
        self._next += self._count
        assert self.store.put_from(keys, self._buffers).result() == self._count

    def get(self) -> None:
        """Read a batch of stored pages."""
        numbers = random.sample(range(self._next - self.pages, self._next), self._count)
        keys = [_key(number) for number in numbers]
        assert self.store.get_into(keys, self._buffers).result() == self._count


def _us(call: Callable[[], None]) -> float:
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1e3


def _by_turns(
    key: str, work: str, call: Callable[[], None], limit: Callable[[], None], rounds: int
) -> Row:
    """Time a call and its limit; the call runs first in half of the rounds."""
    spent: list[float] = []
    least: list[float] = []
    for i in range(rounds):
        for is_limit in (i % 2 == 0, i % 2 == 1):
            (least if is_limit else spent).append(_us(limit if is_limit else call))
    return make_row(key, work, spent, limit=statistics.median(least), limit_name="raw O_DIRECT")


def _pages(folder: Path, page_bytes: int, threads: int, rounds: int) -> list[Row]:
    name = f"{page_bytes >> 10}.{threads}"
    work = f"pages of {page_bytes >> 10} KiB, {threads} threads, {_STEP >> 20} MiB"
    filled = _Filled(folder / f"store.{name}", page_bytes, threads)
    with closing(DirectFile(folder / f"raw.{name}", _BYTES, page_bytes, threads)) as raw:
        verbs: list[tuple[str, Callable[[], None], Callable[[int], None]]] = [
            ("put", filled.put, raw.write),
            ("get", filled.get, raw.read),
        ]
        rows = [
            _by_turns(f"disk.{verb}.{name}", f"{verb} {work}", call, partial(limit, _STEP), rounds)
            for verb, call, limit in verbs
        ]
    filled.store.close()
    return rows


def _checksum(rounds: int) -> Row:
    data = blocks_of_memory(_STEP)
    read = ColdReads(_STEP)
    return against(
        "disk.crc32c",
        f"CRC-32C of {_STEP >> 20} MiB",
        [partial(_core.crc32c, data)] * rounds,
        [partial(read, _STEP)] * rounds,
        "read",
    )


def measure(options: Namespace) -> list[Row]:
    """Measure the checksum, then pages of each size with one thread and with several."""
    random.seed(1)
    rounds = 4 if options.quick else 32
    rows = [_checksum(rounds)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCORE_BENCH_DIR")) as folder:
        for page_bytes in (256 << 10, 1 << 20):
            for threads in _THREADS:
                rows += _pages(Path(folder), page_bytes, threads, rounds)
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
