# SPDX-License-Identifier: Apache-2.0
"""The wait for copies of pinned memory, before its owner is destroyed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kvcore.backends.cuda.availability import kernels
from kvcore.errors import KVCacheError

__all__ = ["LastWait"]


class LastWait:
    """Block until events or streams are done; the ``__del__`` of their owner calls it.

    Notes
    -----
    A forked child does not wait: the copies and their memory belong to the parent. The object keeps
    every function that it calls, because the last call may come at program exit, when modules are
    already unloaded.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._getpid = os.getpid
        self._event = kernels().synchronize_event
        self._stream = kernels().synchronize
        # Errors of a lost device, and errors at program exit.
        self._no_error = suppress(KVCacheError, ImportError)

    def for_events(self, events: Iterable[Any]) -> None:
        """Block until the work of events is done."""
        for event in events if self._getpid() == self._process else ():
            with self._no_error:
                self._event(event.ptr, event.device)

    def for_streams(self, streams: Iterable[Any]) -> None:
        """Block until the work of streams is done."""
        for stream in streams if self._getpid() == self._process else ():
            with self._no_error:
                self._stream(stream.device, stream.ptr)
