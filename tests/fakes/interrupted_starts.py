# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupts at the start of a thread, before it runs or while it starts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

__all__ = ["MOMENTS", "interrupt_starts", "threads_named"]

#: Before the system has the thread; while the caller waits for it; after the thread runs.
MOMENTS = ("before", "while", "after")


def interrupt_starts(
    patch: pytest.MonkeyPatch, name: str, moment: str, works: Callable[[], bool]
) -> list[threading.Thread]:
    """Make the next start of a thread whose name contains `name` raise KeyboardInterrupt.

    `works` returns true when a thread works, for the moment "after". Return the threads whose start
    was interrupted.
    """
    start = threading.Thread.start
    met: list[threading.Thread] = []

    def interrupted(self: threading.Thread) -> None:
        if name not in self.name or met:
            start(self)
            return
        met.append(self)
        if moment != "before":
            start(self)
        while moment == "after" and not works():
            pass
        raise KeyboardInterrupt

    patch.setattr(threading.Thread, "start", interrupted)
    return met


def threads_named(name: str) -> list[threading.Thread]:
    """Return the living threads whose name contains `name`."""
    return [each for each in threading.enumerate() if name in each.name]
