# SPDX-License-Identifier: Apache-2.0
"""Run the client of a Mooncake store in a process that kvcore starts and ends.

    python mooncake_process.py CONNECTION MEMORY SETTINGS

The client needs its own process, because only a process can be killed after a time-out: the
client's `setup` and `close` wait for a master with Python's lock held, its reads of a holder that
hangs take a minute, and a call after `close` is a memory fault (all seen with 0.3.13). The process
sends a message after it has connected, answers requests ``(number, verb, *arguments)`` with
``(number, error, result)`` in any order, and ends with the connection. This file imports no module
of kvcore.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from mmap import mmap
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

#: Pieces of memory that form a value: the begin and the bytes of each piece.
Pieces = Sequence[tuple[int, int]]

_CALLS = 4  # at a time
_LOCAL_BYTES = 16 << 20  # of the client's own; values use the shared memory


class Client:
    """Hold Mooncake's client, and the shared memory for values."""

    def __init__(self, memory: int, settings: dict[str, Any]) -> None:
        import numpy as np
        from mooncake.store import MooncakeDistributedStore

        shared = np.frombuffer(mmap(memory, settings["bytes"]), np.uint8)
        self._shared, self._first = shared, int(shared.ctypes.data)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            settings["host"],
            "P2PHANDSHAKE",
            0,  # it stores no values of other clients
            _LOCAL_BYTES,
            settings["protocol"],
            settings["devices"],
            settings["master"],
            tenant_id=settings["tenant"],
        )
        if code != 0:
            raise OSError(f"setup returns {code}")
        code = self._store.register_buffer(self._first, shared.nbytes)
        if code != 0:
            raise OSError(f"register_buffer returns {code}")

    def exist(self, names: list[str]) -> list[int]:
        """Return for each value 1 if it is stored, 0 if not, or an error code."""
        return list(self._store.batch_is_exist(names))

    def put(self, names: list[str], values: Sequence[Pieces]) -> list[int]:
        """Store values; return 0 for each value that is stored now."""
        return list(self._store.batch_put_from_multi_buffers(names, *self._places(values)))

    def get(self, names: list[str], values: Sequence[Pieces]) -> list[int]:
        """Read values into memory; return the bytes of each, or an error code."""
        return list(self._store.batch_get_into_multi_buffers(names, *self._places(values)))

    def size(self, name: str) -> int:
        """Return a value's bytes."""
        return int(self._store.get_size(name))

    def remove(self, names: list[str]) -> list[int]:
        """Remove values, including values being read; return 0 for each that was stored."""
        return list(self._store.batch_remove(names, True))

    def clear(self, pattern: str) -> int:
        """Remove values by a pattern of their names; return the number of removed values."""
        return int(self._store.remove_by_regex(pattern, True))

    def _places(self, values: Sequence[Pieces]) -> tuple[list[list[int]], list[list[int]]]:
        begins = [[self._first + begin for begin, _ in pieces] for pieces in values]
        return begins, [[size for _, size in pieces] for pieces in values]


def main() -> None:
    """Serve until the connection ends."""
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    settings = json.loads(sys.argv[3])
    # Use the import paths of the store's process; this file's folder has no packages.
    sys.path[:] = settings["path"]
    try:
        client = Client(memory, settings)
    except Exception as caught:  # noqa: BLE001 - whatever the engine raises
        connection.send((0, repr(caught), None))
        return
    connection.send((0, None, None))
    receiving, sending = Lock(), Lock()

    def serve() -> None:
        """Receive requests in turn with other threads, and run each request in its thread."""
        while True:
            try:
                with receiving:
                    number, verb, *arguments = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # kvcore is gone, and no caller waits for calls in flight
            error = result = None
            try:
                result = getattr(client, verb)(*arguments)
            except Exception as caught:  # noqa: BLE001 - whatever the engine raises
                error = repr(caught)
            with sending:
                connection.send((number, error, result))

    for _ in range(_CALLS - 1):
        Thread(target=serve, daemon=True).start()
    serve()


if __name__ == "__main__":
    main()
