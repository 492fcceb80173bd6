# SPDX-License-Identifier: Apache-2.0
"""A wait for the results of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object]) -> None:
    """Poll until the condition holds, for at most half a minute."""
    ends = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends, "the condition never held"
        time.sleep(0.001)
