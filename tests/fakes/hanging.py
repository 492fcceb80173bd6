# SPDX-License-Identifier: Apache-2.0
"""Processes that hang."""

from __future__ import annotations

import os
import signal


def hang(pid: int) -> None:
    """Stop a child process, and wait until all of its threads have stopped.

    The signal alone does not do: until each thread has seen it, they go on answering.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def go_on(pid: int) -> None:
    """Let a stopped process run again."""
    os.kill(pid, signal.SIGCONT)
