# SPDX-License-Identifier: Apache-2.0
"""Threads that make calls in order, for vLLM's offloading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

__all__ = ["ordered_calls"]


def ordered_calls(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread that is already running.

    A pool starts its thread at its first call, and lists the thread after the start. An interrupt
    between the two would leave a thread that is not in the list: the next call would start a second
    thread, and calls would no longer run in order. After an interrupt in this function, the caller
    has no pool.
    """
    pool = ThreadPoolExecutor(1, name)
    pool.submit(_nothing).result()
    return pool


def _nothing() -> None:
    pass
