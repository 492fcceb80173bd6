# SPDX-License-Identifier: Apache-2.0
"""A publisher that follows vLLM's protocol exactly, and has no identity."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import zmq

END = b"\xff" * 8


class ForeignPublisher:
    """A publisher that sends payloads of the caller, and replays them on request, in a thread.

    Parameters
    ----------
    endpoint, replay_endpoint : str
        The addresses to bind; a port may be "*".
    buffer_batches : int
        Batches that can be replayed.
    answers : bool
        Whether it answers requests.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str = "tcp://127.0.0.1:*",
        *,
        buffer_batches: int = 1000,
        answers: bool = True,
    ) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._pub.bind(endpoint)
        self._replay.bind(replay_endpoint)
        self.endpoint = str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        self.replay_endpoint = str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_batches)
        self._answers = answers
        self._sent = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        """Send a batch and keep it for replays."""
        with self._lock:
            number = self._sent.to_bytes(8, "big")
            self._sent += 1
            self._pub.send_multipart((b"", number, payload))
            self._buffer.append((number, payload))

    def close(self) -> None:
        """Close like a killed process: unsent batches are lost."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._replay.poll(10) or not self._answers:
                continue
            name, _, first = self._replay.recv_multipart()
            with self._lock:
                for number, payload in self._buffer:
                    if number >= first:
                        self._replay.send_multipart((name, b"", b"", number, payload))
                self._replay.send_multipart((name, b"", b"", END, b""))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
