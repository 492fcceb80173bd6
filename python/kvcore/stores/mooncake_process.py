# SPDX-License-Identifier: Apache-2.0
"""The process in which the client of a Mooncake store runs; kvcore begins and ends it.

    python mooncake_process.py CONNECTION MEMORY SETTINGS

A process of its own, because a time-out can only end what can be killed: the client's `setup` and
`close` wait for a master with Python's lock held, its reads of a holder that hangs take a minute,
and a call after `close` is a fault of memory (all seen with 0.3.13). It says so once it is
connected, then answers requests ``(number, verb, *arguments)`` with ``(number, error, result)`` in
any order, and ends with the connection. Nothing of kvcore is imported here.
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

#: Pieces of memory that make a value: where each begins, and its bytes.
Pieces = Sequence[tuple[int, int]]

_CALLS = 4  # at a time
_LOCAL_BYTES = 16 << 20  # of the client's own; values go to and from the memory that is shared


class Client:
    """Mooncake's client, and the memory that values come from and go to."""

    def __init__(self, memory: int, settings: dict[str, Any]) -> None:
        import numpy as np
        from mooncake.store import MooncakeDistributedStore

        shared = np.frombuffer(mmap(memory, settings["bytes"]), np.uint8)
        self._shared, self._first = shared, int(shared.ctypes.data)
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            settings["host"],
            "P2PHANDSHAKE",
            0,  # it holds no values of others
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
        """Tell of each whether it is there: 1 or 0, or what is wrong."""
        return list(self._store.batch_is_exist(names))

    def put(self, names: list[str], values: Sequence[Pieces]) -> list[int]:
        """Store values; 0 of each that is there now."""
        return list(self._store.batch_put_from_multi_buffers(names, *self._places(values)))

    def get(self, names: list[str], values: Sequence[Pieces]) -> list[int]:
        """Read values into memory; the bytes of each, or what is wrong."""
        return list(self._store.batch_get_into_multi_buffers(names, *self._places(values)))

    def size(self, name: str) -> int:
        """Return a value's bytes."""
        return int(self._store.get_size(name))

    def remove(self, names: list[str]) -> list[int]:
        """Forget values, those that somebody reads as well; 0 of each that was there."""
        return list(self._store.batch_remove(names, True))

    def clear(self, pattern: str) -> int:
        """Forget values by their names; how many there were."""
        return int(self._store.remove_by_regex(pattern, True))

    def _places(self, values: Sequence[Pieces]) -> tuple[list[list[int]], list[list[int]]]:
        begins = [[self._first + begin for begin, _ in pieces] for pieces in values]
        return begins, [[size for _, size in pieces] for pieces in values]


def main() -> None:
    """Serve until the connection ends."""
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    settings = json.loads(sys.argv[3])
    # This file's folder has no packages; what the store's process finds is found here too.
    sys.path[:] = settings["path"]
    try:
        client = Client(memory, settings)
    except Exception as caught:  # noqa: BLE001 - whatever the engine raises
        connection.send((0, repr(caught), None))
        return
    connection.send((0, None, None))
    receiving, sending = Lock(), Lock()

    def serve() -> None:
        """Take requests, by turns with other threads: what one receives it carries out itself."""
        while True:
            try:
                with receiving:
                    number, verb, *arguments = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # who is gone waits for nothing that is under way
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
