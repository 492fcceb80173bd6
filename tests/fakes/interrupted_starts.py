# SPDX-License-Identifier: Apache-2.0
"""KeyboardInterrupts that meet the start of a thread, before it runs or while it does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

__all__ = ["MOMENTS", "interrupt_starts", "threads_named"]

#: Before the system has the thread; while the caller waits for it; once the thread is at work.
MOMENTS = ("before", "while", "after")


def interrupt_starts(
    patch: pytest.MonkeyPatch, name: str, moment: str, works: Callable[[], bool]
) -> list[threading.Thread]:
    """Have the next start of a thread whose name contains `name` raise KeyboardInterrupt.

    `works` tells when a thread is at work, for the moment "after". Returns the threads whose start
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
