# SPDX-License-Identifier: Apache-2.0
"""Compare putting and getting batches of pages with the Redis store and with bare clients.

The bench starts a redis-server on this machine and uses loopback. Without redis-server it measures
no row. The store and two other clients run in turn: redis-py, which works with bytes objects, is
the limit; the note has a bare socket, which gets all sizes in advance and reads a batch into one
piece of memory.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from time import perf_counter_ns

import numpy as np

from harness import Row, main, make_row, plain_row
from kvcore.stores import RedisStore

_BATCHES = ((64 << 10, 64), (256 << 10, 64), (1 << 20, 16))
_HEAD_BYTES = 16  # header before the page in a stored value


@contextmanager
def _server() -> Iterator[int]:
    """Run a server on a free port, without files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder),
                *("--save", "", "--appendonly", "no"),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            for _ in range(500):
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.01)
            yield port
        finally:
            process.kill()
            process.wait()


class _Batch:
    """Pages of one size, and three clients that store and read them."""

    def __init__(self, port: int, size: int, count: int) -> None:
        import redis

        self.store = RedisStore(f"redis://127.0.0.1:{port}?timeout=20&prefix=store")
        self._client = redis.Redis(port=port)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._keys = [i.to_bytes(32, "big") for i in range(count)]
        self._names = [b"bare:" + key.hex().encode() for key in self._keys]
        self._pages = list(np.random.default_rng(1).integers(0, 256, (count, size), np.uint8))
        self._to = [np.ones_like(page) for page in self._pages]
        size += _HEAD_BYTES
        self._value = bytes(size)
        self._all = memoryview(bytearray(count * (size + len(b"$%d\r\n\r\n" % size))))
        self._get = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(n), n) for n in self._names)
        self._stored = b"+OK\r\n" * count

    def close(self) -> None:
        self.store.close()
        self._client.close()
        self._socket.close()

    def put(self) -> None:
        assert self.store.put_from(self._keys, self._pages).result() == len(self._keys)

    def get(self) -> None:
        assert self.store.get_into(self._keys, self._to).result() == len(self._keys)

    def put_bare(self) -> None:
        with self._client.pipeline(transaction=False) as batch:
            for name in self._names:
                batch.set(name, self._value)
            batch.execute()

    def get_bare(self) -> None:
        with self._client.pipeline(transaction=False) as batch:
            for name in self._names:
                batch.get(name)
            assert len(batch.execute()) == len(self._names)

    def put_raw(self) -> None:
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
        pieces: list[bytes] = []
        for name in self._names:
            pieces += [head % (len(name), name, len(self._value)), self._value, b"\r\n"]
        while pieces:
            sent = self._socket.sendmsg(pieces[:512])
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]
        self._read(memoryview(bytearray(len(self._stored))))

    def get_raw(self) -> None:
        self._socket.sendall(self._get)
        self._read(self._all)

    def ask(self) -> None:
        assert self.store.contains([bytes([255]) * 32]) == [False]

    def ask_bare(self) -> None:
        assert self._client.exists(b"nobody") == 0

    def forget(self) -> None:
        """Remove the pages: the store does not put a page that the server already has."""
        self.store.remove(self._keys)

    def _read(self, to: memoryview) -> None:
        while to:
            to = to[self._socket.recv_into(to) :]


def _us(call: Callable[[], None]) -> float:
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1e3


def _rows(batch: _Batch, size: int, count: int, rounds: int) -> Iterator[Row]:
    for verb, calls in (
        ("put", (batch.put, batch.put_bare, batch.put_raw)),
        ("get", (batch.get, batch.get_bare, batch.get_raw)),
    ):
        spent: list[list[float]] = [[] for _ in calls]
        for i in range(rounds):
            for k in range(len(calls)):
                which = (i + k) % len(calls)
                if calls[which] == batch.put:
                    batch.forget()
                spent[which].append(_us(calls[which]))
        ours, bare, raw = (statistics.median(each) for each in spent)
        yield make_row(
            f"shared.{verb}.{size}",
            f"{verb} {count} pages of {size >> 10} KiB",
            spent[0],
            limit=bare,
            limit_name="redis-py",
            note=f"{size * count / ours / 1e3:.2f} GB/s; a socket: {raw / ours:.2f} of the time",
        )


def _miss(batch: _Batch) -> Row:
    """Measure the query for a page that the server does not have: one round trip."""
    asked = [_us(batch.ask) for _ in range(2_000)]
    ping = [_us(batch.ask_bare) for _ in range(2_000)]
    return make_row(
        "shared.miss",
        "ask for a page that is not there",
        asked,
        limit=statistics.median(ping),
        limit_name="redis-py",
    )


def measure(options: Namespace) -> list[Row]:
    """Measure batches by page size, and a miss."""
    if shutil.which("redis-server") is None:
        return [plain_row("shared.none", "redis-server is not installed", 0.0, "")]
    rounds = 5 if options.quick else 25
    rows: list[Row] = []
    with _server() as port:
        for size, count in _BATCHES:
            with closing(_Batch(port, size, count)) as batch:
                rows += _rows(batch, size, count, rounds)
        with closing(_Batch(port, 4096, 1)) as batch:
            rows.append(_miss(batch))
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
