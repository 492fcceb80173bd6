# SPDX-License-Identifier: Apache-2.0
"""Share code between stores in servers: names, counters, and calls that do not raise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import ClassVar, TypeVar

from kvcore.errors import KVCacheError
from kvcore.stores.breaker import Breaker
from kvcore.stores.protocol import StoreHealth

__all__ = ["ServerStore"]

_Result = TypeVar("_Result")

log = logging.getLogger("kvcore")

_TELL_SECONDS = 10.0  # between two warnings in the log


class ServerStore:
    """Name pages, count calls, and stop calls to a server that fails.

    Parameters
    ----------
    server : str
        The server's name in the log.
    prefix : str
        Prefix of names.
    breaker_failures : int
    breaker_seconds : float
    """

    #: The exceptions of a call to a server that fails.
    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(
        self, server: str, prefix: str, breaker_failures: int, breaker_seconds: float
    ) -> None:
        self._server = server
        self._prefix = prefix.encode() + b":"
        self._breaker = Breaker(breaker_failures, breaker_seconds)
        self._counts = dict.fromkeys(
            ("hits", "misses", "bytes_in", "bytes_out", "corrupt", "errors", "timeouts"), 0
        )
        self._lock = Lock()
        self._told_at = -_TELL_SECONDS
        self._is_closed = False
        self._process = os.getpid()

    def health(self) -> StoreHealth:
        """Return the counters. Never waits for the server."""
        self._require_open()
        with self._lock:
            return StoreHealth(self._breaker.state, **self._counts)

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        self._require_open()
        for i, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != 32:
                raise ValueError(f"keys[{i}] is {key!r}, must be 32 bytes")
        return [self._prefix + key.hex().encode() for key in keys]

    def _guard(self, work: Callable[[], _Result], failed: _Result) -> _Result:
        """Run a function that calls the server; return `failed` if it fails."""
        if not self._breaker.admits():
            return failed
        try:
            result = work()
        except self._failures as error:
            self._note(error, "calls are misses")
            self._breaker.failed(is_dead=isinstance(error, TimeoutError))
            return failed
        except BaseException:  # an error of the caller's own
            self._breaker.failed()
            raise
        self._breaker.succeeded()
        return result

    def _note(self, error: Exception, consequence: str) -> None:
        now = monotonic()
        with self._lock:
            is_told = now < self._told_at + _TELL_SECONDS
            self._told_at = self._told_at if is_told else now
        if not is_told:
            what = f"{type(error).__name__}: {error}"
            log.warning("%s failed, %s: %s", self._server, consequence, what)
        self._count(**{"timeouts" if isinstance(error, TimeoutError) else "errors": 1})

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, n in counts.items():
                self._counts[name] += n

    def _require_open(self) -> None:
        if self._is_closed:
            raise KVCacheError("this store is closed; open another")
        if os.getpid() != self._process:
            raise KVCacheError(
                f"this store belongs to process {self._process}, of which this one is a fork; open "
                f"one here"
            )
