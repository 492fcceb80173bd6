# SPDX-License-Identifier: Apache-2.0
"""What is done to the elements of a KV cache: numpy arrays and whatever speaks DLPack."""

from __future__ import annotations

from kvcore.ops.attention import attention, cascade_attention, merge_states
from kvcore.ops.pages import checksum, copy_pages, zero_pages
from kvcore.ops.paging import append, gather, scatter
from kvcore.ops.quantization import dequantize, quantize

__all__ = [
    "append",
    "attention",
    "cascade_attention",
    "checksum",
    "copy_pages",
    "dequantize",
    "gather",
    "merge_states",
    "quantize",
    "scatter",
    "zero_pages",
]
