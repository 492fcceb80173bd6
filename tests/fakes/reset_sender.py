# SPDX-License-Identifier: Apache-2.0
"""Ask managers for a reset through their socket."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcore
from conftest import require


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Where the manager listens; a path short enough for a socket's name."""
    return f"ipc://{tmp_path}/kv"


def send_reset(base: str, messages: int = 1) -> None:
    """Returns when the messages have been handed to the receiver."""
    zmq = require("zmq")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 10_000)
        socket.connect(f"{base}-reset_prefix_cache")
        for _ in range(messages):
            socket.send(b"reset")


def fetch_until_reset(manager: kvcore.PagedKVCacheManager, prompt: list[int]) -> None:
    """The socket is looked at, without waiting, when a batch is fetched."""
    for _ in range(1_000_000):
        if manager.match_prefix(prompt) == 0:
            return
        manager.fetch([])
    raise AssertionError("the message never arrived")
