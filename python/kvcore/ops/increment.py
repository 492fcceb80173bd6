# SPDX-License-Identifier: Apache-2.0
"""Advance fetched inputs by one step of a multi-step run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.slots import advance_lengths
from kvcore.support.arguments import MOST_UINT32, integers

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["added_tokens", "increment_cache_lengths"]


def _row_offsets(prev_model_inputs: Any) -> Any:
    if isinstance(prev_model_inputs, tuple):
        if len(prev_model_inputs) < 2:
            raise ValueError(
                f"prev_model_inputs holds {len(prev_model_inputs)} items, must be (x, row_offsets)"
            )
        offsets = prev_model_inputs[1]
    else:
        offsets = getattr(prev_model_inputs, "input_row_offsets", prev_model_inputs)
    offsets = any_array(offsets, "row offsets") if is_on_gpu(offsets) else np.asarray(offsets)
    if offsets.ndim == 0 or offsets.dtype.kind in "OSU":
        raise TypeError(
            f"prev_model_inputs is a {type(prev_model_inputs).__name__}, must be row offsets "
            f"uint32 [B + 1], a tuple (x, row_offsets) or an object with input_row_offsets"
        )
    if offsets.ndim != 1 or offsets.dtype.kind not in "ui":
        raise ValueError(
            f"row offsets have shape {offsets.shape} and dtype {offsets.dtype}, "
            f"must be uint32 [B + 1]"
        )
    if isinstance(offsets, np.ndarray):
        return integers("row offsets", offsets, 0, MOST_UINT32)
    return offsets


def _splits(prev_model_inputs: Any, rows: list[int]) -> list[int]:
    given = getattr(prev_model_inputs, "data_parallel_splits", None)
    expected = [0, *np.cumsum(rows).tolist()]
    if given is None:
        if len(rows) > 1:
            raise ValueError(
                f"prev_model_inputs has no data_parallel_splits, needed for {len(rows)} replicas; "
                f"take them from get_data_parallel_splits"
            )
        return expected
    splits: list[int] = integers("data_parallel_splits", given).tolist()
    if splits != expected:
        raise ValueError(
            f"data_parallel_splits is {splits}, the inputs have {expected}; "
            f"pass the splits of the fetched batch"
        )
    return splits


def checked_offsets(prev_model_inputs: Any, rows: list[int]) -> tuple[Any, list[int]]:
    """Return the row offsets of a batch and the first row of each replica."""
    offsets = _row_offsets(prev_model_inputs)
    splits = _splits(prev_model_inputs, rows)
    if len(offsets) != splits[-1] + 1:
        raise ValueError(
            f"row offsets have {len(offsets)} entries for a batch of {splits[-1]}, "
            f"must have {splits[-1] + 1}"
        )
    return offsets, splits


def added_tokens(prev_model_inputs: Any, rows: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens that a step adds to each row of a batch, replica after replica.

    Parameters
    ----------
    prev_model_inputs
        See ``PagedKVCacheManager.increment_cache_lengths``.
    rows : list of int
        Rows of the inputs of each replica.

    Returns
    -------
    int64 [B]

    Raises
    ------
    ValueError
        Row offsets or splits that do not belong to these rows.
    TypeError
        The inputs have no row offsets.
    """
    offsets, _ = checked_offsets(prev_model_inputs, rows)
    added: np.ndarray[Any, np.dtype[np.int64]] = np.diff(offsets.astype(np.int64))
    if np.any(added < 0):
        raise ValueError("row offsets decrease; they count tokens from the start of the batch")
    return added


def increment_cache_lengths(
    inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any, num_replicas: int
) -> list[RaggedKVCacheInputs]:
    """See ``PagedKVCacheManager.increment_cache_lengths``."""
    _require_inputs(inputs)
    if not inputs or len(inputs) % num_replicas != 0:
        raise ValueError(
            f"{len(inputs)} inputs for {num_replicas} replicas, must be one per device"
        )
    shards = len(inputs) // num_replicas
    rows = [len(inputs[r * shards].cache_lengths) for r in range(num_replicas)]
    if is_on_gpu(inputs[0].cache_lengths):
        return _advance_on_gpus(inputs, prev_model_inputs, rows)
    added = np.split(added_tokens(prev_model_inputs, rows), np.cumsum(rows)[:-1])
    advanced = []
    for replica, new in enumerate(added):
        advanced.extend(_advance(inputs[replica * shards : (replica + 1) * shards], new))
    return advanced


def _require_inputs(inputs: Any) -> None:
    if not isinstance(inputs, list | tuple):
        raise TypeError(
            f"kv_cache_inputs is a {type(inputs).__name__}, must be a list of RaggedKVCacheInputs"
        )
    for i, each in enumerate(inputs):
        if not isinstance(each, RaggedKVCacheInputs):
            raise TypeError(
                f"kv_cache_inputs[{i}] is a {type(each).__name__}, must be RaggedKVCacheInputs"
            )


def _advance_on_gpus(
    inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any, rows: list[int]
) -> list[RaggedKVCacheInputs]:
    """Advance the lengths of each device on its current stream, without reading them back."""
    offsets, splits = checked_offsets(prev_model_inputs, rows)
    if isinstance(offsets, np.ndarray):
        offsets = np.ascontiguousarray(offsets, np.uint32)
    shards = len(inputs) // len(rows)
    for each in inputs:
        _require_steps(each)
    return [
        _advance_one(each, offsets[splits[i // shards] : splits[i // shards + 1] + 1])
        for i, each in enumerate(inputs)
    ]


def _advance_one(inputs: RaggedKVCacheInputs, offsets: Any) -> RaggedKVCacheInputs:
    lengths = advance_lengths(inputs.cache_lengths, offsets)
    return inputs._at(lengths, inputs.max_lengths[1:])  # noqa: SLF001


def _require_steps(inputs: RaggedKVCacheInputs) -> None:
    if len(inputs.max_lengths) == 0:
        raise ValueError("max_lengths has 0 rows, the steps are used up; fetch with more num_steps")


def _advance(
    group: Sequence[RaggedKVCacheInputs], added: np.ndarray[Any, np.dtype[np.int64]]
) -> list[RaggedKVCacheInputs]:
    first = group[0]
    _require_steps(first)
    grown = integers("cache_lengths", first.cache_lengths + added, 0, MOST_UINT32)
    lengths = grown.astype(np.uint32)
    return [each._at(lengths, each.max_lengths[1:]) for each in group]  # noqa: SLF001
