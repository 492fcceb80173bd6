# SPDX-License-Identifier: Apache-2.0
"""Groups of layers that keep the same tokens, and how they share pages."""

from __future__ import annotations

from kvcore.layers.kinds import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.layers.packing import Bundle, bundles

__all__ = [
    "AttentionGroup",
    "Bundle",
    "ChunkedLocal",
    "FullAttention",
    "SlidingWindow",
    "State",
    "bundles",
]
