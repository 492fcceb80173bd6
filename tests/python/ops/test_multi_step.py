# SPDX-License-Identifier: Apache-2.0
"""Inputs advanced step by step without the manager, and the symbols that describe them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_manager, prefilled


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_each_step_drops_the_first_row_of_max_lengths(num_steps: int) -> None:
    manager = make_manager()
    rows = [prefilled(manager, range(6)), claimed(manager, range(50, 53))]
    inputs = manager.fetch(rows, num_steps)
    offsets = np.array([0, 1, 4], np.uint32)
    limits, lengths = inputs[0].max_lengths.tolist(), [6, 0]
    for step in range(1, num_steps + 1):
        inputs = manager.increment_cache_lengths(inputs, offsets)
        lengths = [a + b for a, b in zip(lengths, np.diff(offsets).tolist(), strict=True)]
        assert inputs[0].max_lengths.tolist() == limits[step:]
        assert inputs[0].max_lengths.shape == (num_steps - step, 2)
        assert inputs[0].cache_lengths.tolist() == lengths
        offsets = np.array([0, 1, 2], np.uint32)
    with pytest.raises(
        ValueError, match="max_lengths has 0 rows, the steps are used up; fetch with more num_steps"
    ):
        manager.increment_cache_lengths(inputs, offsets)
    assert manager.fetch(rows)[0].cache_lengths.tolist() == [6, 0]


def test_scales_and_pool_are_shared_by_the_next_step() -> None:
    params = {"dtype": "int8", "kv_scale_granularity": 2}
    manager = make_manager(blocks="allocate", params=params)
    inputs = manager.fetch([claimed(manager, range(3))], 2)
    (later,) = manager.increment_cache_lengths(inputs, np.array([0, 3]))
    assert later.blocks is inputs[0].blocks
    assert later.kv_scales is inputs[0].kv_scales
    assert later.lookup_table is inputs[0].lookup_table


@pytest.mark.parametrize(
    ("previous", "words"),
    [
        (np.array([0, 3, 4]), "data_parallel_splits"),
        (SimpleNamespace(input_row_offsets=np.array([0, 3, 4])), "data_parallel_splits"),
        (
            SimpleNamespace(input_row_offsets=np.array([0, 3, 4]), data_parallel_splits=[0, 2, 2]),
            r"\[0, 2, 2\], the inputs have \[0, 1, 2\]",
        ),
        (
            SimpleNamespace(input_row_offsets=np.array([0, 3]), data_parallel_splits=[0, 1, 2]),
            "2 entries for a batch of 2",
        ),
        (
            SimpleNamespace(input_row_offsets=np.array([0, 3, 2]), data_parallel_splits=[0, 1, 2]),
            "decrease",
        ),
        (
            SimpleNamespace(
                input_row_offsets=np.array([0.0, 3, 4]), data_parallel_splits=[0, 1, 2]
            ),
            "float64",
        ),
        ((np.array([0, 3, 4]),), "holds 1 items"),
    ],
)
def test_offsets_of_another_batch_are_refused(previous: Any, words: str) -> None:
    manager = make_manager(replicas=2)
    rows = [claimed(manager, range(n), replica_idx=r) for r, n in enumerate((3, 1))]
    inputs = manager.fetch(rows, 2)
    with pytest.raises(ValueError, match=words):
        manager.increment_cache_lengths(inputs, previous)
    assert [entry.cache_lengths.tolist() for entry in inputs] == [[0], [0]]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"is_mla": True},
        {"dtype": "bfloat16", "v_head_dim": 4},
        {"dtype": "int8", "kv_scale_granularity": 2, "v_head_dim": 4},
        {"dtype": "float8_e5m2", "kv_scale_granularity": 1},
    ],
)
def test_symbols_describe_what_fetch_hands_out(params: dict[str, Any]) -> None:
    manager = make_manager(4, 7, shards=2, blocks="allocate", params=params)
    rows = [claimed(manager, range(n, n + n)) for n in (9, 2)]
    known = {"total_num_pages": 7, "batch_size": 2, "max_num_pages": 3, "steps_remaining": 4}
    for symbols, entry in zip(manager.input_symbols(), manager.fetch(rows, 4), strict=True):
        for name in ("blocks", "cache_lengths", "lookup_table", "max_lengths", "kv_scales"):
            described, arrays = getattr(symbols, name), getattr(entry, name)
            if arrays is None:
                assert described is None
                continue
            pairs = (
                zip(described, arrays, strict=True)
                if isinstance(arrays, tuple)
                else ([(described, arrays)])
            )
            for symbol, array in pairs:
                assert (symbol.name, symbol.dtype) == (name, array.dtype.name)
                assert tuple(known.get(n, n) for n in symbol.shape) == array.shape


def test_symbols_of_other_devices_and_layers() -> None:
    manager = make_manager(shards=2)
    symbols = manager.input_symbols(["cuda:0", "cuda:1"], num_layers=9)
    assert [str(each.lookup_table.device) for each in symbols] == ["cuda:0", "cuda:1"]
    for each in symbols:
        assert isinstance(each.blocks, kvcore.pools.ArraySymbol)
        assert each.blocks.shape[2] == 9
        assert str(each.max_lengths.device) == "cpu"
