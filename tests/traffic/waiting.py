# SPDX-License-Identifier: Apache-2.0
"""Wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object]) -> None:
    """Poll for half a minute at most."""
    ends = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.001)
