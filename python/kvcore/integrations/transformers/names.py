# SPDX-License-Identifier: Apache-2.0
"""The name of the argument and the output field in which a model has its cache."""

from __future__ import annotations

import transformers

__all__ = ["CACHE"]

#: Renamed in 5.24; the library's models warn about the old name from that version on.
CACHE = (
    "cache"
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    else "past_key_values"
)
