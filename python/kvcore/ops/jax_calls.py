# SPDX-License-Identifier: Apache-2.0
"""Run the functions of ``kvcore.functional`` in a function that jax traces and compiles.

Shapes and dtypes are checked during tracing. Values that exist only at run time (a row's length,
its blocks) are checked when the compiled program runs; a failed check ends the program with an
error. If kvcore was built with jaxlib, XLA calls kvcore's handlers; otherwise XLA calls back into
Python, which copies the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcore import _core
from kvcore.ops.attend_rows import AttentionOptions, attend_rows
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype

__all__ = ["append_rows", "attend", "gather_rows", "has_handlers"]

_DTYPES = tuple(map(numpy_dtype, (*WIDE, *NARROW)))


def _register() -> frozenset[str]:
    """Register kvcore's handlers with XLA, if they were built; return their names."""
    try:
        handlers: Mapping[str, Any] = import_module("kvcore._jax").handlers
    except ImportError:
        return frozenset()
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return frozenset(handlers)


_HANDLERS = _register()


def has_handlers() -> bool:
    """Return whether XLA calls kvcore's handlers; otherwise XLA calls back into Python."""
    return bool(_HANDLERS)


def append_rows(
    cache: Sequence[Any], sequence_idx: Any, keys_new: Any, values_new: Any
) -> tuple[Any, ...]:
    """Trace ``append_kv``; return the arrays of the cache with the new tokens."""
    keys, values, table, lengths = _checked(cache)
    index = _row(sequence_idx, len(table))
    new = [_new_rows(keys_new, "keys_new", keys), _new_rows(values_new, "values_new", keys)]
    if new[0].shape != new[1].shape:
        raise ValueError(
            f"keys_new has shape {new[0].shape} and values_new {new[1].shape}, must be equal"
        )
    out = [_like(keys), _like(values), _like(lengths)]
    operands = keys, values, table, lengths, index, *new
    written = _call("kvcore_append", _append, out, operands, {0: 0, 1: 1, 3: 2})
    return written[0], written[1], table, written[2]


def gather_rows(cache: Sequence[Any], sequence_idx: Any) -> tuple[Any, Any, Any]:
    """Trace ``gather_kv``: results fill the table's capacity, with zeros after the row."""
    keys, _, table, _ = arrays = _checked(cache)
    index = _row(sequence_idx, len(table))
    rows = jax.ShapeDtypeStruct((table.shape[1] * keys.shape[1], *keys.shape[2:]), keys.dtype)
    out = [rows, rows, jax.ShapeDtypeStruct((), jnp.int32)]
    gathered = _call("kvcore_gather", _gather, out, (*arrays, index), {})
    return gathered[0], gathered[1], gathered[2]


def attend(cache: Sequence[Any], sequence_idx: Any, queries: Any, options: AttentionOptions) -> Any:
    """Trace ``attend_kv``."""
    keys, _, table, _ = arrays = _checked(cache)
    is_batch = sequence_idx is None
    index = jnp.int32(0) if is_batch else _row(sequence_idx, len(table))
    queries = _queries(queries, keys, len(table) if is_batch else None)
    out = [_like(queries)]
    operands = (*arrays, index, queries)
    attributes = {
        "is_batch": is_batch,
        "scale": np.float64(options.scale),
        "window": np.int64(options.window or 0),
        "soft_cap": np.float64(options.soft_cap or 0.0),
        "threads": np.int64(options.threads),
    }
    host = partial(_attend, is_batch, options)
    return _call("kvcore_attention", host, out, operands, {}, **attributes)[0]


# ---- checks that need no values -----------------------------------------------------------------
def _checked(cache: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    keys, values, table, lengths = map(jnp.asarray, cache)
    if keys.ndim != 4 or keys.shape != values.shape or 0 in keys.shape[1:]:
        raise ValueError(
            f"the pools have shapes {keys.shape} and {values.shape}, must both be (num_blocks, "
            f"block_size, num_kv_heads, head_dim)"
        )
    if keys.dtype != values.dtype or keys.dtype not in _DTYPES:
        raise TypeError(
            f"the pools have dtypes {keys.dtype} and {values.dtype}, must both be one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        raise ValueError(
            f"block_table has shape {table.shape} and seq_lengths {lengths.shape}, must be (batch, "
            f"max_blocks) and (batch,)"
        )
    for name, array in (("block_table", table), ("seq_lengths", lengths)):
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} has dtype {array.dtype}, must be int32")
    return keys, values, table, lengths


def _row(sequence_idx: Any, num_rows: int) -> Any:
    if isinstance(sequence_idx, (int, np.integer)) and not 0 <= sequence_idx < num_rows:
        raise IndexError(f"sequence_idx is {sequence_idx}, must be 0 .. {num_rows - 1}")
    index = jnp.asarray(sequence_idx)
    if index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"sequence_idx is {index}, must be an integer")
    return index.astype(jnp.int32)


def _new_rows(rows: Any, name: str, pool: Any) -> Any:
    rows = jnp.asarray(rows)
    if rows.ndim != 3 or rows.shape[1:] != pool.shape[2:]:
        raise ValueError(
            f"{name} has shape {rows.shape}, must be (tokens, {pool.shape[2]}, {pool.shape[3]}) "
            f"as the pool"
        )
    if rows.dtype != pool.dtype:
        raise TypeError(
            f"{name} has dtype {rows.dtype}, the pool {pool.dtype}; convert it with astype"
        )
    return rows


def _queries(queries: Any, pool: Any, num_rows: int | None) -> Any:
    queries = jnp.asarray(queries)
    heads, dim = pool.shape[2:]
    if queries.ndim != 3 or queries.shape[2] != dim or queries.shape[1] % heads:
        raise ValueError(
            f"queries has shape {queries.shape}, must be (tokens, a multiple of {heads}, {dim})"
        )
    if num_rows is not None and len(queries) != num_rows:
        raise ValueError(
            f"queries has {len(queries)} tokens, must have one for each of {num_rows} rows"
        )
    if queries.dtype not in _DTYPES[: len(WIDE)]:
        raise TypeError(f"queries has dtype {queries.dtype}, must be one of {', '.join(WIDE)}")
    return queries


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


# ---- calls --------------------------------------------------------------------------------------
def _call(
    name: str,
    host: Callable[..., Any],
    out: list[jax.ShapeDtypeStruct],
    operands: tuple[Any, ...],
    aliases: dict[int, int],
    **attributes: Any,
) -> Sequence[Any]:
    """Emit a call of a handler, or a callback into Python if the handler was not built."""
    if name in _HANDLERS:
        call = jax.ffi.ffi_call(name, out, input_output_aliases=aliases, vmap_method="sequential")
        results: Sequence[Any] = call(*operands, **attributes)
    else:
        results = jax.pure_callback(host, out, *operands, vmap_method="sequential")
    return results


def _append(*operands: Any) -> tuple[Any, ...]:
    keys, values, table, lengths, index, new_keys, new_values = map(np.asarray, operands)
    keys, values, _, lengths = _core.append_rows(
        keys, values, table, lengths, int(index), new_keys, new_values, False
    )
    return keys, values, lengths


def _gather(*operands: Any) -> tuple[Any, ...]:
    keys, values, table, lengths, index = map(np.asarray, operands)
    *found, length = _core.gather_rows(keys, values, table, lengths, int(index))
    out = [np.zeros((table.shape[1] * keys.shape[1], *keys.shape[2:]), keys.dtype) for _ in found]
    for rows, to in zip(found, out, strict=True):
        to[:length] = rows
    return *out, np.int32(length)


def _attend(is_batch: bool, options: AttentionOptions, *operands: Any) -> tuple[Any]:  # noqa: FBT001
    *cache, index, queries = map(np.asarray, operands)
    return (attend_rows(cache, None if is_batch else int(index), queries, options),)
