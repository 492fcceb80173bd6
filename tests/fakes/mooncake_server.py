# SPDX-License-Identifier: Apache-2.0
"""Servers of a Mooncake store for one test, in an isolated network.

The engine's processes listen at every interface of their machine. Therefore they run in a separate
network, as do the test's thread and everything that it starts meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hanging
from conftest import REQUIRED, require

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # of netdevice(7)
_MASTER_PORT = 50_051


@contextlib.contextmanager
def network_of_its_own() -> Iterator[None]:
    """Enter a network that has only a loopback interface; new threads and processes inherit it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as outside:
        if libc.unshare(_NEW_NETWORK):
            if "mooncake" in REQUIRED:
                pytest.fail("no network namespace can be made here")
            pytest.skip("the right to make a network namespace is needed")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                asked = struct.pack("16sH14x", b"lo", 0)
                (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, _GET_FLAGS, asked))
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
            yield
        finally:
            assert libc.setns(outside.fileno(), _NEW_NETWORK) == 0


class _Server:
    """A process that a test can kill and stop."""

    def __init__(self, port: int, *words: str) -> None:
        self._port, self._words = port, words
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._words],
            env={**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            time.sleep(0.01)
        raise TimeoutError(f"{self._words[0]} does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        hanging.hang(self._process.pid)

    def go_on(self) -> None:
        hanging.go_on(self._process.pid)


class MooncakeServer:
    """A master, and a client that holds values."""

    url = f"mooncake://127.0.0.1:{_MASTER_PORT}"

    def __init__(self) -> None:
        self._programs = Path(str(require("mooncake").__file__)).parent
        self.begin()

    def begin(self) -> None:
        self.master = _Server(
            _MASTER_PORT,
            *(str(self._programs / "mooncake_master"), f"--rpc_port={_MASTER_PORT}"),
            *("--rpc_address=127.0.0.1", "--rpc_interface=lo", "--metrics_host=127.0.0.1"),
        )
        self.holder = _Server(
            _MASTER_PORT + 1,
            *(str(self._programs / "mooncake_client"), "--host=127.0.0.1"),
            *(f"--port={_MASTER_PORT + 1}", f"--master_server_address=127.0.0.1:{_MASTER_PORT}"),
            *("--metadata_server=P2PHANDSHAKE", "--global_segment_size=64MB"),
        )

    def close(self) -> None:
        self.holder.kill()
        self.master.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
