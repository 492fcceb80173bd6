# SPDX-License-Identifier: Apache-2.0
"""kvcore takes jax arrays without a copy, returns jax arrays, and never writes into an input."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from conftest import require
from functional_cache import make_cache
from kvcore import PagedBatch, ops
from kvcore.backends.arrays import host_array
from kvcore.functional import append_kv, gather_kv
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

jax = require("jax")
jnp = jax.numpy

DTYPES = [*WIDE, *NARROW]


def batch_of(dtype: str, *, heads: int = 2, dim: int = 3) -> PagedBatch:
    k, v = (np.zeros((4, 2, heads, dim), numpy_dtype(dtype)) for _ in range(2))
    table = np.array([[3, 1], [0, 4]], np.uint32)
    return PagedBatch(k, v, table, np.array([0, 0], np.uint32))


def rows(dtype: str, tokens: int = 5) -> Any:
    return jnp.arange(6 * tokens, dtype=jnp.float32).reshape(tokens, 2, 3).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_is_seen_where_it_lies(dtype: str) -> None:
    array = rows(dtype)
    seen = host_array(array, "k")
    assert seen.ctypes.data == array.unsafe_buffer_pointer()
    assert not seen.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_offsets_go_into_pages(dtype: str) -> None:
    batch = batch_of(dtype)
    k, v = rows(dtype), rows(dtype)[::-1]
    ops.append(batch, 0, k, v, jnp.array([0, 4, 5], jnp.uint32))
    lengths = jnp.array([4, 1], jnp.uint32)
    read_k, read_v, _ = ops.gather(batch, 0, lengths=lengths)
    assert np.array_equal(read_k, np.asarray(k))
    assert np.array_equal(read_v, np.asarray(v))


def test_pool_that_cannot_be_written_is_refused() -> None:
    batch = dataclasses.replace(batch_of("float32"), key_pool=jnp.zeros((4, 2, 2, 3)))
    with pytest.raises(ValueError, match="read-only"):
        ops.append(batch, 0, rows("float32"), rows("float32"), np.array([0, 4, 5], np.uint32))
    assert not np.asarray(batch.value_pool).any()


@pytest.mark.parametrize("dtype", WIDE)
def test_quantised_arrays_come_back_in_jax(dtype: str) -> None:
    x = rows(dtype)
    values, scales = ops.quantize(x, "int8", 3)
    back = ops.dequantize(values, scales, dtype)
    assert all(isinstance(array, jax.Array) for array in (values, scales, back))
    assert back.dtype == x.dtype
    half_steps = np.asarray(scales)[..., None].repeat(3, -1).reshape(5, 2, 3) * 0.5
    error = np.abs(np.asarray(back, np.float32) - np.asarray(x, np.float32))
    assert (error <= half_steps + 0.004 * np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_functional_cache_takes_rows(dtype: str) -> None:
    cache = make_cache(dtype=numpy_dtype(dtype))
    cache.block_table[0, :2] = [2, 0]
    given = jnp.arange(9, dtype=jnp.float32).reshape(3, 1, 3).astype(dtype)
    keys, values, length = gather_kv(append_kv(cache, 0, given, given), 0)
    assert length == 3
    assert keys.tolist() == values.tolist() == np.asarray(given).tolist()
