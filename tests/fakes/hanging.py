# SPDX-License-Identifier: Apache-2.0
"""Processes that hang."""

from __future__ import annotations

import os
import signal


def hang(pid: int) -> None:
    """Stop a child process, and wait until all of its threads have stopped.

    The signal is not enough: a thread still answers until it receives the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def go_on(pid: int) -> None:
    """Continue a stopped process."""
    os.kill(pid, signal.SIGCONT)
