# SPDX-License-Identifier: Apache-2.0
"""Threads that run at the same time and switch often."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

THREADS = 8


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Switch threads after microseconds, not milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(work: Callable[[int], None]) -> None:
    """Run `work(0) .. work(7)` at the same time; raise the first error of a thread."""
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
