# SPDX-License-Identifier: Apache-2.0
"""Compare putting and getting batches of pages with the Mooncake store and with Mooncake's client.

The bench starts a master and a holder on this machine and uses loopback. Mooncake listens on every
interface, so the bench restarts itself in its own network namespace. The store uses pages in memory
of `new_buffer`, as a manager does. The client uses registered memory in the same process. They run
in turn. Without Mooncake the bench measures no row.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from harness import Row, main, make_row, plain_row
from kvcore.stores import MooncakeStore

_BATCHES = ((64 << 10, 64), (256 << 10, 64), (1 << 20, 16))
_PORT = 50_051
_HERE = "127.0.0.1"


def _begin_alone() -> None:
    """Restart this program in a network namespace with only loopback, unless it has one."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        up = 'ip link set lo up && exec "$0" "$@"'
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", up, sys.executable, *sys.argv])


@contextmanager
def _servers() -> Iterator[None]:
    found = find_spec("mooncake")
    assert found is not None
    assert found.origin is not None
    programs = Path(found.origin).parent
    master = ["mooncake_master", f"--rpc_port={_PORT}", f"--rpc_address={_HERE}"]
    master += ["--rpc_interface=lo", f"--metrics_host={_HERE}"]
    holder = ["mooncake_client", f"--host={_HERE}", f"--port={_PORT + 1}"]
    holder += [f"--master_server_address={_HERE}:{_PORT}", "--metadata_server=P2PHANDSHAKE"]
    holder += ["--global_segment_size=512MB"]
    running = []
    try:
        for port, (name, *words) in ((_PORT, master), (_PORT + 1, holder)):
            running.append(
                subprocess.Popen(
                    [str(programs / name), *words],
                    env={**os.environ, "MC_TCP_BIND_ADDRESS": _HERE},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            for _ in range(1000):
                with contextlib.suppress(OSError):
                    socket.create_connection((_HERE, port)).close()
                    break
                time.sleep(0.01)
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def _bare_client() -> Any:
    from mooncake.store import MooncakeDistributedStore

    os.environ["MC_TCP_BIND_ADDRESS"] = _HERE
    client = MooncakeDistributedStore()
    master = f"{_HERE}:{_PORT}"
    assert client.setup(_HERE, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    return client


class _Batch:
    """Pages of one size, and two clients that store and read them."""

    def __init__(self, store: MooncakeStore, client: Any, size: int, count: int) -> None:
        self._store, self._client = store, client
        self._keys = [i.to_bytes(32, "big") for i in range(count)]
        self._names = [f"bare:{key.hex()}" for key in self._keys]
        self._pages: list[Any] = [store.new_buffer(size) for _ in range(count)]
        for i, page in enumerate(self._pages):
            page[:] = np.random.default_rng(i).integers(0, 256, size, np.uint8)
        self._bare = np.array(self._pages)
        client.register_buffer(self._bare.ctypes.data, self._bare.nbytes)
        self._places = [page.ctypes.data for page in self._bare]
        self._sizes = [size] * count

    def close(self) -> None:
        self.forget()
        self._client.unregister_buffer(self._bare.ctypes.data)

    def put(self) -> None:
        assert self._store.put_from(self._keys, self._pages).result() == len(self._keys)

    def get(self) -> None:
        assert self._store.get_into(self._keys, self._pages).result() == len(self._keys)

    def put_bare(self) -> None:
        assert not any(self._client.batch_put_from(self._names, self._places, self._sizes))

    def get_bare(self) -> None:
        found = self._client.batch_get_into(self._names, self._places, self._sizes)
        assert found == self._sizes

    def forget(self) -> None:
        """Remove the pages: a put does not store a page that Mooncake already has."""
        self._store.remove(self._keys)
        self._client.batch_remove(self._names, True)


def _us(call: Callable[[], None]) -> float:
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1e3


def _rows(batch: _Batch, size: int, count: int, rounds: int) -> Iterator[Row]:
    calls = {"put": (batch.put, batch.put_bare), "get": (batch.get, batch.get_bare)}
    spent: dict[str, list[list[float]]] = {verb: [[], []] for verb in calls}
    for i in range(rounds):
        batch.forget()
        for verb, pair in calls.items():
            for k in ((0, 1), (1, 0))[i % 2]:
                spent[verb][k].append(_us(pair[k]))
    for verb, (ours, bare) in spent.items():
        limit = statistics.median(bare)
        yield make_row(
            f"shared.mooncake.{verb}.{size}",
            f"Mooncake: {verb} {count} pages of {size >> 10} KiB",
            ours,
            limit=limit,
            limit_name="its client",
            note=f"{size * count / statistics.median(ours) / 1e3:.2f} GB/s",
        )


def measure(options: Namespace) -> list[Row]:
    """Measure batches by page size."""
    if find_spec("mooncake") is None or shutil.which("unshare") is None:
        return [plain_row("shared.mooncake.none", "mooncake or unshare is missing", 0.0, "")]
    _begin_alone()
    rows: list[Row] = []
    with _servers():
        client = _bare_client()
        with closing(MooncakeStore(f"mooncake://{_HERE}:{_PORT}?timeout=30")) as store:
            for size, count in _BATCHES:
                with closing(_Batch(store, client, size, count)) as batch:
                    rows += _rows(batch, size, count, 5 if options.quick else 40)
    return rows


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
