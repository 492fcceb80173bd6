# SPDX-License-Identifier: Apache-2.0
"""Checks of a call on a GPU that read nothing back: shapes, dtypes, numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvcore.backends.arrays import address_of, is_writable, require_own_memory
from kvcore.backends.cuda.attention.call import Call, Rule
from kvcore.backends.cuda.attention.plan import dim_of
from kvcore.support.arguments import flag, integer, number
from kvcore.support.dtypes import NARROW, WIDE

__all__ = [
    "MOST_DIM",
    "checked_call",
    "checked_lse",
    "checked_out",
    "checked_scratch",
    "value_dim",
]

MOST_DIM = 512  # elements of a head: more do not fit a multiprocessor
_LAST_POSITION = 2**31 - 1


def checked_call(
    pools: tuple[Any, ...],
    v_head_dim: Any,
    step: tuple[Any, ...],
    q: Any,
    rule: tuple[Any, ...],
    global_scales: tuple[Any, Any] | None = None,
) -> Call:
    """Return a call whose shapes and dtypes fit.

    Parameters
    ----------
    pools : tuple of array or None
        Keys, values, ends of keys, scales of keys and of values.
    v_head_dim : int or None
    step : (array, array, array or (array, array))
        Table, lengths and row offsets. Row offsets from the host are a pair: the host array and
        its copy on the device.
    q : array
    rule : tuple
        Scale, causal, window, chunk, soft cap and sinks.
    global_scales : (float or array, float or array), optional
        Global scales of nvfp4 pools.

    Raises
    ------
    ValueError, TypeError
        An argument does not fit.
    """
    key, value, rest, key_scales, value_scales = pools
    table, lengths, offsets = step
    for name, pool in (("keys", key), ("values", value), ("rope", rest)):
        if pool is not None:
            _check_pool(name, pool, key, is_nvfp4=global_scales is not None)
    _check_table(table, lengths)
    v_dim = value_dim(pools, v_head_dim)
    _check_queries(q, key, rest)
    offsets = _checked_offsets(offsets, table.shape[0], q.shape[0])
    rules = _checked_rule(rule, q, table.shape[1] * key.shape[1])
    call = Call(
        q, key, value, rest, key_scales, value_scales, table, lengths, offsets, rules, v_dim
    )
    if global_scales is not None:
        for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
            _check_last_axis(name, scales)
        call = call._replace(global_scales=global_scales)
    sizes = call.sizes
    if max(sizes.dim, sizes.rest, sizes.v_dim) > MOST_DIM:
        raise ValueError(
            f"keys have {sizes.dim + sizes.rest} elements and values {sizes.v_dim}, must have at "
            f"most {MOST_DIM} on a GPU, where the last elements of latent keys do not count; pass "
            f"v_head_dim for latent rows"
        )
    return call


def value_dim(pools: tuple[Any, ...], v_head_dim: Any) -> int:
    """Return the number of elements of a value that the call uses."""
    key, value, _, key_scales, value_scales = pools
    source, scales = (key, key_scales) if value is None else (value, value_scales)
    most = dim_of(source)
    if v_head_dim is None:
        return most
    dim = integer("v_head_dim", v_head_dim)
    has_groups = scales is not None and (scales.shape[3] > 1 or source.dtype == np.uint8)
    group = most // int(scales.shape[3]) if has_groups else 1
    if not 1 <= dim <= most or dim % group:
        more = f" and a multiple of {group}, the elements per scale" if group > 1 else ""
        raise ValueError(f"v_head_dim is {dim}, must be 1 to {most}, the elements of a value{more}")
    return dim


def checked_out(call: Call, out: Any) -> Any:
    """Return the caller's array for results."""
    shape = (*call.q.shape[:2], call.v_dim)
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, must be {shape}")
    if out.dtype != call.q.dtype:
        raise TypeError(f"out has dtype {out.dtype}, must be that of q, {call.q.dtype}")
    _check_last_axis("out", out)
    if not is_writable(out):
        raise ValueError("out is read-only; pass a writable array")
    require_own_memory(out, "out")
    read = call.q, call.key, call.value, call.rest, call.table, call.lengths
    if out.size and any(x is not None and address_of(x) == address_of(out) for x in read):
        raise ValueError("out overlaps what is read in memory; pass an array of its own")
    return out


def checked_lse(call: Call, lse: Any, out: Any) -> Any:
    """Return the caller's array for logarithms; it must not overlap `out` or an input."""
    shape = call.q.shape[:2]
    if lse.shape != shape:
        raise ValueError(f"out[1] has shape {lse.shape}, must be {shape}: one for each head of q")
    if lse.dtype != np.float32:
        raise TypeError(f"out[1] has dtype {lse.dtype}, must be float32")
    if not lse.flags.c_contiguous:
        raise ValueError("out[1] is strided, must be in C order")
    if not is_writable(lse):
        raise ValueError("out[1] is read-only; pass a writable array")
    pools = call.key, call.value, call.rest, call.key_scales, call.value_scales
    read = call.q, *pools, call.table, call.lengths, call.offsets, call.rule.sinks
    mine = _extent(lse)
    for name, array in [("out[0]", out), *(("what is read", array) for array in read)]:
        if array is None:
            continue
        theirs = _extent(array)
        if mine[0] < theirs[1] and theirs[0] < mine[1]:
            raise ValueError(f"out[1] overlaps {name} in memory; pass an array of its own")
    return lse


def checked_scratch(scratch: Any, needed: int) -> Any:
    """Return the caller's memory for the states of splits."""
    if scratch.dtype != np.float32:
        raise TypeError(f"scratch has dtype {scratch.dtype}, must be float32")
    if scratch.size < needed or not (scratch.flags.c_contiguous and is_writable(scratch)):
        raise ValueError(
            f"scratch has {scratch.size} elements, must have {needed}, writable and in C order: "
            f"ops.attention_scratch returns the number"
        )
    return scratch


# ---- inside --------------------------------------------------------------------------------------


def _extent(array: Any) -> tuple[int, int]:
    """Return the first address and the end address of an array's memory, with its strides."""
    begin = end = address_of(array)
    if not array.size:
        return begin, end
    for size, stride in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * stride
        begin, end = begin + min(reach, 0), end + max(reach, 0)
    return begin, end + array.dtype.itemsize


def _check_last_axis(name: str, array: Any) -> None:
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
        raise ValueError(f"{name} is strided along its last axis, must be contiguous there")


def _check_pool(name: str, pool: Any, key: Any, *, is_nvfp4: bool) -> None:
    if pool.dtype.name not in (("uint8",) if is_nvfp4 else (*WIDE, *NARROW)):
        raise TypeError(f"the pool of {name} has dtype {pool.dtype}, must be a cache dtype")
    if pool.ndim != 4 or pool.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"the pool of {name} has shape {pool.shape}, that of keys {key.shape}; all axes but "
            f"the last must agree"
        )
    _check_last_axis(f"the pool of {name}", pool)


def _check_table(table: Any, lengths: Any) -> None:
    for name, array, rank in (("lookup_table", table, 2), ("cache_lengths", lengths, 1)):
        if array.dtype != np.uint32:
            raise TypeError(f"{name} has dtype {array.dtype}, must be uint32")
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}, must have {rank} axes")
    _check_last_axis("lookup_table", table)
    if lengths.shape[0] != table.shape[0]:
        raise ValueError(
            f"cache_lengths has {lengths.shape[0]} entries for {table.shape[0]} rows of the table"
        )


def _check_queries(q: Any, key: Any, rest: Any) -> None:
    if q.dtype.name not in WIDE:
        raise TypeError(f"q has dtype {q.dtype}, must be float32, float16 or bfloat16")
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}, must be (tokens, q_heads, head_dim)")
    heads = key.shape[2]
    if q.shape[1] < 1 or q.shape[1] % heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, must have a multiple of the {heads} heads of the pool"
        )
    wide = dim_of(key) + (0 if rest is None else rest.shape[3])
    if q.shape[2] != wide:
        raise ValueError(f"q has a head_dim of {q.shape[2]}, keys have {wide}")
    _check_last_axis("q", q)


def _checked_offsets(given: Any, rows: int, tokens: int) -> Any:
    """Return row offsets of the device; check their values if the host has them."""
    seen, there = given if isinstance(given, tuple) else (None, given)
    if there.dtype != np.uint32:
        raise TypeError(f"row_offsets has dtype {there.dtype}, must be uint32")
    if there.ndim != 1 or there.shape[0] != rows + 1:
        raise ValueError(
            f"row_offsets has shape {there.shape}, must be ({rows + 1},): rows and one more"
        )
    _check_last_axis("row_offsets", there)
    if seen is None:
        return there
    if seen[0] != 0:
        raise ValueError(f"row_offsets[0] is {seen[0]}, must be 0")
    if (seen[1:] < seen[:-1]).any():
        raise ValueError("an entry of row_offsets must not be below the one before")
    if seen[-1] > tokens:
        raise ValueError(f"q has {tokens} tokens, row_offsets ends at {seen[-1]}")
    return there


def _checked_rule(given: tuple[Any, ...], q: Any, most_positions: int) -> Rule:
    scale, causal, window, chunk, soft_cap, sinks = given
    found_scale = q.shape[2] ** -0.5 if scale is None else _finite("scale", scale)
    cap = None if soft_cap is None else _finite("soft_cap", soft_cap)
    if cap is not None and cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}, must be above 0; None for no cap")
    if sinks is not None:
        if sinks.dtype.name not in WIDE:
            raise TypeError(f"sinks has dtype {sinks.dtype}, must be float32, float16 or bfloat16")
        if sinks.shape != (q.shape[1],):
            raise ValueError(f"sinks has shape {sinks.shape}, must be ({q.shape[1]},)")
        _check_last_axis("sinks", sinks)
    chunk = _tokens("chunk", chunk)
    if chunk is not None and chunk >= most_positions:
        chunk = None  # all tokens are in the first chunk
    window = _tokens("window", window)
    return Rule(found_scale, flag("causal", causal), window, chunk, cap, sinks)


def _finite(name: str, given: Any) -> float:
    value = number(name, given)
    with np.errstate(over="ignore"):
        if not math.isfinite(np.float32(value)):
            raise ValueError(f"{name} is {given}, must be finite in float32")
    return value


def _tokens(name: str, given: Any) -> int | None:
    if given is None:
        return None
    n = integer(name, given)
    if n < 1:
        raise ValueError(f"{name} is {n}, must be at least 1: the token itself; None for no {name}")
    return min(n, _LAST_POSITION)
