# SPDX-License-Identifier: Apache-2.0
"""Reset requests to managers through their socket."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcore
from conftest import require


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The address of the manager; the path is short enough for a socket name."""
    return f"ipc://{tmp_path}/kv"


def send_reset(base: str, messages: int = 1) -> None:
    """Send reset messages; return after the receiver has them."""
    zmq = require("zmq")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 10_000)
        socket.connect(f"{base}-reset_prefix_cache")
        for _ in range(messages):
            socket.send(b"reset")


def fetch_until_reset(manager: kvcore.PagedKVCacheManager, prompt: list[int]) -> None:
    """Fetch until a reset; a fetch checks the socket without a wait."""
    for _ in range(1_000_000):
        if manager.match_prefix(prompt) == 0:
            return
        manager.fetch([])
    raise AssertionError("the message never arrived")
