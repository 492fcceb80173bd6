# SPDX-License-Identifier: Apache-2.0
"""A socket that asks for the prefix cache to be reset."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["ResetListener"]


class ResetListener:
    """Listen at ``<base>-reset_prefix_cache`` for messages, without ever blocking.

    Parameters
    ----------
    endpoint_base : str
        A ZeroMQ endpoint such as ``ipc:///run/engine/kv``; a PULL socket is bound.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    """

    def __init__(self, endpoint_base: str) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ImportError("zmq_endpoint_base needs pyzmq: pip install 'kvcore[zmq]'") from error
        self._zmq: Any = zmq
        self._lock = threading.Lock()  # a socket must not be used by two threads at a time
        self.endpoint = f"{endpoint_base}-reset_prefix_cache"
        self._socket: Any = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"cannot listen at {self.endpoint}: {error}") from error

    def is_asked(self) -> bool:
        """Take all waiting messages; True when there was one, of which one thread is told."""
        asked = False
        with self._lock:
            while self._socket.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
                self._socket.recv(self._zmq.NOBLOCK)
                asked = True
        return asked

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()
