# SPDX-License-Identifier: Apache-2.0
"""Arrays and streams on NVIDIA GPUs; imported by what works on them, never by ``import kvcore``."""

from __future__ import annotations

from kvcore.backends.cuda.arrays import device_array, over_memory, read_only
from kvcore.backends.cuda.availability import require_devices, why_unavailable
from kvcore.backends.cuda.streams import stream_handle
from kvcore.graph_batch import GraphBatch

__all__ = [
    "GraphBatch",
    "device_array",
    "over_memory",
    "read_only",
    "require_devices",
    "stream_handle",
    "why_unavailable",
]
