# SPDX-License-Identifier: Apache-2.0
"""What transformers calls the argument and the output that a model has its cache in."""

from __future__ import annotations

import transformers

__all__ = ["CACHE"]

#: Renamed in 5.24; with the old name models of the library warn from then on.
CACHE = (
    "cache"
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    else "past_key_values"
)
