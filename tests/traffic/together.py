# SPDX-License-Identifier: Apache-2.0
"""Threads that work at the same time and take turns often."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

THREADS = 8


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Threads take turns after microseconds, not milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(work: Callable[[int], None]) -> None:
    """Runs `work(0) .. work(7)` at the same time; raises what one of them raised."""
    start, failures = threading.Barrier(THREADS), list[BaseException]()

    def guarded(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
