# SPDX-License-Identifier: Apache-2.0
"""A fast comparison of arrays for each step of a long run."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(found: Any, wanted: Any, message: str = "") -> None:
    """Assert equality like numpy's ``assert_array_equal``, which is slower than ``array_equal``."""
    if not np.array_equal(found, wanted):
        np.testing.assert_array_equal(found, wanted, message)


def same_bytes(expected: Any, found: Any) -> bool:
    """Compare shape, dtype and bytes, so that NaN and the sign of zero count."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (expected, found))
    return bool(np.array_equal(a, b))


def read_only(array: Any) -> Any:
    """Return the array, which from now on refuses writes."""
    array.flags.writeable = False
    return array
