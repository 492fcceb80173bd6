# SPDX-License-Identifier: Apache-2.0
"""What a fetch of slots hands out: the arrays, their names and shapes, their next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.selection import any_array, place_of
from kvcore.device import Device
from kvcore.errors import CapacityError
from kvcore.integrations.max.view_arrays import require_array
from kvcore.ops.increment import added_tokens, checked_offsets
from kvcore.ops.slots import advance_lengths
from kvcore.params import KVCacheParams
from kvcore.symbols import ArraySymbol, pool_symbols

__all__ = [
    "ContinuousBatchingKVCacheInputs",
    "SlotSymbols",
    "increment_slot_lengths",
    "slot_symbols",
]


class ContinuousBatchingKVCacheInputs(NamedTuple):
    """Hold what the kernels of one device need for one batch of B sequences.

    Attributes
    ----------
    blocks : array [slots, kv_dim, layers, max_seq_len, heads_per_device, head_dim]
        The whole pool.
    cache_lengths : uint32 [B]
    lookup_table : uint32 [B]
        Slot of each sequence.
    is_cache_empty : bool [1]
        Whether all lengths are 0.
    """

    blocks: Any
    cache_lengths: Any
    lookup_table: Any
    is_cache_empty: Any


class SlotSymbols(NamedTuple):
    """Describe the fields of a ContinuousBatchingKVCacheInputs on one device."""

    blocks: ArraySymbol
    cache_lengths: ArraySymbol
    lookup_table: ArraySymbol
    is_cache_empty: ArraySymbol


def slot_symbols(params: KVCacheParams, device: Device) -> SlotSymbols:
    """Describe what a device's kernels are given."""
    (blocks,) = pool_symbols(params, device, "num_blocks")
    return SlotSymbols(
        blocks,
        ArraySymbol("cache_lengths", "uint32", ("batch_size",), device),
        ArraySymbol("lookup_table", "uint32", ("batch_size",), device),
        ArraySymbol("is_cache_empty", "bool", (1,), device),
    )


def increment_slot_lengths(
    inputs: Sequence[tuple[Any, Any, Any, Any]], prev_model_inputs: Any, max_seq_len: int
) -> list[ContinuousBatchingKVCacheInputs]:
    """See ``ContinuousBatchingKVCacheManager.increment_cache_lengths``."""
    for i, each in enumerate(inputs):
        if not isinstance(each, tuple | list) or len(each) != 4:
            raise TypeError(
                f"kv_cache_inputs[{i}] is a {type(each).__name__}, must be what fetch returns: "
                f"(blocks, cache_lengths, lookup_table, is_cache_empty)"
            )
        require_array("cache_lengths", each[1], 1, np.uint32)
    if is_on_gpu(inputs[0][1]):
        return _advance_on_gpus(inputs, prev_model_inputs)
    before = any_array(inputs[0][1], "cache_lengths")
    after = before + added_tokens(prev_model_inputs, [len(before)])
    if len(after) and after.max() > max_seq_len:
        raise CapacityError(
            f"row {after.argmax()} would hold {after.max()} tokens, max_seq_len is {max_seq_len}"
        )
    lengths, flag = after.astype(np.uint32), np.array([False])
    return [
        ContinuousBatchingKVCacheInputs(blocks, lengths, table, flag)
        for blocks, _, table, _ in inputs
    ]


def _advance_on_gpus(
    inputs: Sequence[tuple[Any, Any, Any, Any]], prev_model_inputs: Any
) -> list[ContinuousBatchingKVCacheInputs]:
    """Advance the lengths of each device on its current stream; nothing is read back."""
    offsets, _ = checked_offsets(prev_model_inputs, [len(inputs[0][1])])
    advanced = []
    for blocks, lengths, table, _ in inputs:
        flag = place_of(None, {"cache_lengths": lengths}).from_host(np.array([False]))
        after = advance_lengths(lengths, offsets)
        advanced.append(ContinuousBatchingKVCacheInputs(blocks, after, table, flag))
    return advanced
