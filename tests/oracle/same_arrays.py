# SPDX-License-Identifier: Apache-2.0
"""A fast comparison of arrays for each step of a long run."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(found: Any, wanted: Any, message: str = "") -> None:
    """Assert equality like numpy's ``assert_array_equal``, which is slower than ``array_equal``."""
    if not np.array_equal(found, wanted):
        np.testing.assert_array_equal(found, wanted, message)
