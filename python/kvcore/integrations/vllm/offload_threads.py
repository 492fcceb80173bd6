# SPDX-License-Identifier: Apache-2.0
"""Threads that make calls in order, for vLLM's offloading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

__all__ = ["ordered_calls"]


def ordered_calls(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, which runs already.

    A pool starts its thread with its first call, and lists the thread after the start. An interrupt
    between the two would leave a thread that the pool does not know: the next call would get a
    second thread, and calls would no longer be made in order. An interrupt in here leaves no pool.
    """
    pool = ThreadPoolExecutor(1, name)
    pool.submit(_nothing).result()
    return pool


def _nothing() -> None:
    pass
