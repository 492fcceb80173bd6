# SPDX-License-Identifier: Apache-2.0
"""Refusals of kvcore.functional: the error, its text, and no changed byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from functional_cache import (
    allocation,
    append,
    filled,
    gathering,
    make_cache,
    numbers_in,
    refused,
    rows_of,
    snapshot,
)
from kvcore.functional import (
    allocate_blocks,
    append_kv,
    gather_kv,
)


@pytest.mark.parametrize("row", [-1, -2, 2, 2**31, 2**70, -(2**70)])
def test_row_outside_the_batch_is_an_index_error(row: int) -> None:
    for call in (allocation(row), append(row, rows_of([4])), gathering(row)):
        refused(IndexError, filled(), call, "sequence_idx", row, "0 .. 1")


@pytest.mark.parametrize("row", [0.0, None, "0", True, np.float32(0), np.zeros(1, np.int32)])
def test_row_that_is_no_integer_is_a_type_error(row: Any) -> None:
    for call in (allocation(row), append(row, rows_of([4])), gathering(row)):
        refused(TypeError, filled(), call)


def test_row_longer_than_the_table_is_wide_is_refused() -> None:
    wide = make_cache(num_blocks=9)
    refused(ValueError, wide, allocation(0, 9, list(range(9))), "9 tokens", "5 blocks", "4 columns")
    cache, _ = allocate_blocks(
        wide, sequence_idx=0, num_new_tokens=8, free_block_ids=list(range(4))
    )
    refused(ValueError, cache, append(0, rows_of([1] * 9)), "9 tokens", "4 columns")
    cache = append_kv(cache, 0, rows_of([1] * 8), rows_of([-1] * 8))
    refused(ValueError, cache, append(0, rows_of([9])), "9 tokens", "4 columns")
    refused(ValueError, cache, allocation(0, 1, [8]), "9 tokens", "4 columns")


def test_too_few_free_blocks_are_refused_with_both_numbers() -> None:
    refused(ValueError, filled(), allocation(1, 9, [3, 1, 0, 2]), "has 4 entries", "5 are needed")
    refused(ValueError, filled(), allocation(1, 1, []), "has 0 entries", "1 are needed")
    refused(ValueError, filled(), allocation(1, 2**31 - 1, [0]), "1073741824")


@pytest.mark.parametrize("tokens", [-1, 2**31, 2**70])
def test_token_count_out_of_range_is_refused(tokens: int) -> None:
    refused(ValueError, filled(), allocation(1, tokens), "num_new_tokens", tokens)


@pytest.mark.parametrize("tokens", [1.0, None, "1", True])
def test_token_count_that_is_no_integer_is_refused(tokens: Any) -> None:
    refused(TypeError, filled(), allocation(1, tokens), "num_new_tokens")


def test_second_allocation_before_the_append_is_refused() -> None:
    cache, _ = allocate_blocks(
        make_cache(), sequence_idx=0, num_new_tokens=3, free_block_ids=[3, 1]
    )
    refused(ValueError, cache, allocation(0, 1, [0, 2]), "block_table[0, 0]", "append")
    # The row has fewer tokens than allocated: its second block is still unused.
    cache = append_kv(cache, 0, rows_of([1, 2]), rows_of([1, 2]))
    refused(ValueError, cache, allocation(0, 1, [0, 2]), "block_table[0, 1]", "append")
    assert append_kv(cache, 0, rows_of([3]), rows_of([3])).seq_lengths[0] == 3


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 0], ["block 0", "twice"]),
        ([0, 2, 0], ["block 0", "twice"]),
        ([4, 0], ["free_block_ids[0]", "4", "0 .. 3"]),
        ([0, -1], ["free_block_ids[1]", "-1", "0 .. 3"]),
        ([0, 2**31], ["2147483648"]),
        ([0, 3], ["block 3", "in use", "block_table[0, 0]"]),
        (np.array([[0, 2]]), ["free_block_ids", "dimensions"]),
    ],
)
def test_wrong_block_ids_are_refused(ids: Any, words: list[str]) -> None:
    refused(ValueError, filled(), allocation(1, 4, ids), *words)


@pytest.mark.parametrize("ids", [[0.0, 2.0], np.array([0.0, 2.0]), None, 0, "02"])
def test_block_ids_that_are_no_integers_are_refused(ids: Any) -> None:
    refused(TypeError, filled(), allocation(1, 4, ids), "free_block_ids")


def test_append_into_an_unallocated_block_is_refused() -> None:
    refused(ValueError, filled(), append(1, rows_of([1])), "block_table[1, 0]", "allocate_blocks")
    # One token fits into the row's last block, the next token has no block.
    refused(ValueError, filled(), append(0, rows_of([4, 5])), "block_table[0, 2]")


@pytest.mark.parametrize("block", [4, 2**31 - 1])
def test_block_that_the_pool_does_not_have_is_refused(block: int) -> None:
    cache = filled()
    cache.block_table[0, 1] = block
    refused(ValueError, cache, append(0, rows_of([4])), "block_table[0, 1]", block, "0 .. 3")
    refused(ValueError, cache, gathering(0), "block_table[0, 1]", block, "0 .. 3")


def test_gather_of_an_unallocated_block_is_refused() -> None:
    cache = filled()
    cache.block_table[0, 0] = -1
    refused(ValueError, cache, gathering(0), "block_table[0, 0]", "unallocated")


def test_block_that_is_twice_in_the_row_is_refused() -> None:
    cache = filled()
    cache.block_table[0, 2] = 3
    refused(ValueError, cache, append(0, rows_of([4, 5])), "block 3", "[0, 0]", "[0, 2]")
    cache.block_table[0, :] = [1, 0, 2, 2]
    refused(ValueError, cache, append(0, rows_of([4, 5, 6, 7])), "block 2", "[0, 2]", "[0, 3]")
    assert numbers_in(cache, 0)[2] == 0


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, np.int32, np.dtype(">f4"), ml_dtypes.bfloat16, np.bool_]
)
def test_rows_of_another_dtype_are_refused(dtype: Any) -> None:
    good, bad = rows_of([4]), rows_of([4], dtype)
    refused(TypeError, filled(), append(0, bad, good), "keys_new", np.dtype(dtype), "float32")
    refused(TypeError, filled(), append(0, good, bad), "values_new", np.dtype(dtype), "float32")


def test_rows_of_another_shape_are_refused() -> None:
    good = rows_of([4])
    for bad in (rows_of([4, 5]), good[0], good[:, :, :2], np.zeros((1, 2, 3), np.float32)):
        refused(ValueError, filled(), append(0, bad, good))
        refused(ValueError, filled(), append(0, good, bad))
    refused(ValueError, filled(), append(0, rows_of([4, 5]), good), "(2, 1, 3)", "(1, 1, 3)")


@pytest.mark.parametrize("rows", [[[[4.0, 4.0, 4.0]]], None, 4.0, object()])
def test_rows_that_are_no_array_are_refused(rows: Any) -> None:
    refused(TypeError, filled(), lambda c, d: append_kv(c, 0, rows, rows_of([4]), donate=d))
    refused(TypeError, filled(), lambda c, d: append_kv(c, 0, rows_of([4]), rows, donate=d))


@pytest.mark.parametrize(
    ("field", "array", "error"),
    [
        ("block_table", np.full((2, 4), -1), TypeError),
        ("block_table", np.full((3, 4), -1, np.int32), ValueError),
        ("block_table", np.full(4, -1, np.int32), ValueError),
        ("block_table", [[-1] * 4] * 2, TypeError),
        ("seq_lengths", np.zeros(2), TypeError),
        ("seq_lengths", np.zeros((2, 1), np.int32), ValueError),
        ("seq_lengths", np.array([-1, 0], np.int32), ValueError),
        ("seq_lengths", np.array([9, 0], np.int32), ValueError),
        ("key_pool", np.zeros((4, 2, 3), np.float32), ValueError),
        ("key_pool", np.zeros((5, 2, 1, 3), np.float32), ValueError),
        ("key_pool", np.zeros((4, 2, 1, 3), np.float16), ValueError),
        ("value_pool", np.zeros((4, 2, 3, 1), np.float32), ValueError),
        ("value_pool", np.zeros((4, 2, 1, 6), np.float32)[..., ::2], ValueError),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    field: str, array: Any, error: type[Exception]
) -> None:
    cache = dataclasses.replace(filled(), **{field: array})
    for call in (allocation(0, 1, [0]), append(0, rows_of([4])), gathering(0)):
        refused(error, cache, call, field)


def test_pool_of_objects_or_of_empty_blocks_is_refused() -> None:
    objects = np.full((4, 2, 1, 3), "text", dtype=object)
    cache = dataclasses.replace(filled(), key_pool=objects, value_pool=objects.copy())
    refused(TypeError, cache, gathering(0), "object")
    empty = np.zeros((4, 0, 1, 3), np.float32)
    cache = dataclasses.replace(filled(), key_pool=empty, value_pool=empty.copy())
    refused(ValueError, cache, gathering(0), "block_size")


@pytest.mark.parametrize("field", ["key_pool", "value_pool", "seq_lengths", "block_table"])
def test_read_only_array_is_copied_but_not_donated(field: str) -> None:
    cache = filled()
    getattr(cache, field).flags.writeable = False
    call = allocation(1, 1, [0]) if field == "block_table" else append(0, rows_of([4]))
    assert call(cache, False) is not cache
    kept = snapshot(cache)
    with pytest.raises(ValueError, match=rf"{field} is read-only.*donate"):
        call(cache, True)
    assert snapshot(cache) == kept


def test_one_array_for_both_pools_is_not_donated() -> None:
    cache = filled()
    cache = dataclasses.replace(cache, value_pool=cache.key_pool)
    with pytest.raises(ValueError, match="same memory"):
        append_kv(cache, 0, rows_of([4]), rows_of([-4]), donate=True)
    assert gather_kv(cache, 0)[2] == 3


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        ({"num_blocks": 0}, ValueError),
        ({"block_size": -1}, ValueError),
        ({"head_dim": 1.5}, TypeError),
        ({"batch_size": 0}, ValueError),
        ({"max_blocks_per_seq": 0}, ValueError),
        ({"dtype": None}, TypeError),
        ({"dtype": object}, TypeError),
        ({"dtype": "float33"}, TypeError),
        ({"dtype": "float8_e9m9"}, ValueError),
    ],
)
def test_bad_sizes_of_a_new_cache_are_refused(rest: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="|".join(rest) if "33" not in str(rest) else "float33"):
        make_cache(**rest)
