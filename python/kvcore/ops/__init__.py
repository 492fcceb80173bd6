# SPDX-License-Identifier: Apache-2.0
"""Operate on the elements of a KV cache, in numpy arrays or arrays of any DLPack library."""

from __future__ import annotations

from kvcore.ops.attention import attention, cascade_attention, merge_states
from kvcore.ops.indices import PageIndices, page_indices
from kvcore.ops.layouts import PoolLayout
from kvcore.ops.packing import Packed, pack
from kvcore.ops.pages import checksum, copy_pages, fill_pages, zero_pages
from kvcore.ops.paging import append, gather, scatter
from kvcore.ops.quantization import dequantize, quantize
from kvcore.ops.scratch import attention_scratch
from kvcore.ops.slots import advance_lengths, append_slots, build_slots, compact_table
from kvcore.ops.transfer import copy_partial, transfer
from kvcore.ops.waiting import wait_layer

__all__ = [
    "Packed",
    "PageIndices",
    "PoolLayout",
    "advance_lengths",
    "append",
    "append_slots",
    "attention",
    "attention_scratch",
    "build_slots",
    "cascade_attention",
    "checksum",
    "compact_table",
    "copy_pages",
    "copy_partial",
    "dequantize",
    "fill_pages",
    "gather",
    "merge_states",
    "pack",
    "page_indices",
    "quantize",
    "scatter",
    "transfer",
    "wait_layer",
    "zero_pages",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
