# SPDX-License-Identifier: Apache-2.0
"""A Redis-protocol server for one test: on a free port of this machine, in a folder."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hanging
from conftest import require, require_program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A process that ends with the test."""

    def __init__(self, folder: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        require("redis")
        self._program = require_program("redis-server")
        self._folder, self._options, self._env = folder, options, env
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, **options)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
                *self._options,
            ],
            stdout=subprocess.DEVNULL,
            env=self._env,
        )
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.01)
        raise TimeoutError("redis-server does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        hanging.hang(self._process.pid)

    def go_on(self) -> None:
        hanging.go_on(self._process.pid)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
