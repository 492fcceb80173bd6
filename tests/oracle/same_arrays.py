# SPDX-License-Identifier: Apache-2.0
"""Comparing arrays after every step of a long run."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(found: Any, wanted: Any, message: str = "") -> None:
    """As numpy's ``assert_array_equal``, which compares more slowly than ``array_equal`` does."""
    if not np.array_equal(found, wanted):
        np.testing.assert_array_equal(found, wanted, message)
