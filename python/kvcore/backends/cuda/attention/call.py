# SPDX-License-Identifier: Apache-2.0
"""Convert the arrays of a call to the arguments of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from kvcore.backends.arrays import address_of
from kvcore.backends.cuda.attention.cascade import Stack
from kvcore.backends.cuda.attention.join import join as join_kernel
from kvcore.backends.cuda.attention.kernel import attend as attend_kernel
from kvcore.backends.cuda.attention.launch import architecture, launch, processors
from kvcore.backends.cuda.attention.plan import (
    Plan,
    Sizes,
    default_splits,
    dim_of,
    make_plan,
    sizes_of,
)
from kvcore.backends.cuda.attention.pointers import Pointer, pointer_to, strides_of
from kvcore.backends.cuda.attention.settings import Settings, settings_for
from kvcore.backends.cuda.attention.settings_file import measured_rows
from kvcore.support.dtypes import WIDE

__all__ = ["Call", "Launch", "Rule", "attend", "launches", "plan_with", "planned", "product_dtype"]

_KINDS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8", "uint8": "nvfp4"}
_FIRST_WITH_FP8 = 89  # architecture that converts e4m3 to float16 in hardware
_DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_NO_STRIDES = (0, 0, 0)
_JOIN_WARPS = 4
_JOINED = 16  # states of a token that are read at the same time, of up to 512 elements


class Rule(NamedTuple):
    """Hold the mask of a call, and its rule from scores to weights; see ``ops.attention``."""

    scale: float
    causal: bool
    window: int | None
    chunk: int | None
    soft_cap: float | None
    sinks: Any


class Call(NamedTuple):
    """Hold the arrays of a call, all of them checked and on the device.

    Attributes
    ----------
    q : array [tokens, q_heads, dim]
    key, value, rest : array [pages, page_size, heads, dim]
        Latent rows have no `value` (None). `rest` has the ends of latent keys if they are a
        separate array. nvfp4 arrays are uint8 [pages, page_size, heads, dim / 2].
    key_scales, value_scales : float32 array [pages, page_size, heads, groups], or None
        nvfp4 scales are float8_e4m3fn, and `global_scales` are numbers or arrays of one element.
    table : uint32 [rows, columns]
    lengths, offsets : uint32 [rows], [rows + 1]
    rule : Rule
    v_dim : int
        Elements of a value to use.
    stack : (Stack, int32 array), or None
        The stacked rows, and ``Stack.numbers`` on the device.
    """

    q: Any
    key: Any
    value: Any
    rest: Any
    key_scales: Any
    value_scales: Any
    table: Any
    lengths: Any
    offsets: Any
    rule: Rule
    v_dim: int
    stack: tuple[Stack, Any] | None = None
    global_scales: tuple[Any, Any] = (None, None)

    @property
    def sizes(self) -> Sizes:
        """The shapes of the call; with a stack, the numbers of its states and stacked rows."""
        found = sizes_of(self.q, (self.key, self.value, self.rest), self.table, self.v_dim)
        if self.stack is None:
            return found
        return found._replace(tokens=self.stack[0].states, rows=self.stack[0].rows)


def product_dtype(call: Call) -> str:
    """Return the dtype of products: q's, or float32 if a float pool has a different dtype."""
    wanted = call.q.dtype.name
    for pool in (call.key, call.value, call.rest):
        if pool is not None and pool.dtype.name in _DTYPES and pool.dtype.name != wanted:
            return "float32"
    return str(wanted)


def planned(call: Call, splits: int | None, place: Any) -> Plan:
    """Return the plan of a call; None for `splits` means the default number of splits."""
    sizes = call.sizes
    settings = settings_for(
        architecture(attend_kernel, place),
        max(sizes.dim, sizes.v_dim),
        group=sizes.group,
        tokens_per_row=sizes.tokens / max(1, sizes.rows),
        has_codes=any(x is not None and x.dtype.name in _KINDS for x in (call.key, call.value)),
        is_wide=product_dtype(call) == "float32",
        is_nvfp4=call.key.dtype.name == "uint8",
        measured=measured_rows(),
    )
    if splits is None:
        plan = plan_with(call, settings, 1, place)
        splits = default_splits(sizes, plan, processors(attend_kernel, place))
    return plan_with(call, settings, splits, place)


def plan_with(call: Call, settings: Settings, splits: int, place: Any) -> Plan:
    """Return the plan of a call with the given settings."""
    return make_plan(call.sizes, settings, architecture(attend_kernel, place), splits)


def attend(call: Call, plan: Plan, out: Any, lse: Any, scratch: Any, place: Any) -> None:
    """Write the result of a call, and its logarithms if `lse` is given.

    Parameters
    ----------
    call : Call
    plan : Plan
    out : array [tokens, q_heads, v_dim]
    lse : float32 array [tokens, q_heads], or None
    scratch : float32 array, or None
        Memory of ``scratch_elements``.
    place : Place
        The place of the arrays.
    """
    if not call.sizes.tokens or not call.sizes.rows:
        return
    for each in launches(call, plan, out, lse, scratch):
        launch(each.kernel, each.grid, each.args, place, **each.options)


class Launch(NamedTuple):
    """Hold a kernel, its grid, its arguments and its compile options."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    options: dict[str, int]


def launches(call: Call, plan: Plan, out: Any, lse: Any, scratch: Any) -> list[Launch]:
    """Return the launches of a call, in order; see ``attend`` for the arguments.

    The states of splits and of stacked rows go through scratch; all other calls write the result.
    """
    sizes, splits = call.sizes, plan.grid[2]
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    result = pointer_to(out), strides_of(out, 2), pointer_to(lse)
    if splits == 1 and call.stack is None:
        args = _arguments(call, plan, result, call.rule.sinks)
        return [Launch(attend_kernel, plan.grid, args, options)]
    parts = Pointer(address_of(scratch), "float32")
    states = splits * sizes.tokens * sizes.q_heads
    sums = Pointer(parts.address + 4 * states * sizes.v_dim, "float32")
    target = parts, (sizes.q_heads * sizes.v_dim, sizes.v_dim), sums
    stacked = None if call.stack is None else call.stack[0]
    depth = 1 if stacked is None else stacked.depth
    merged = (
        parts,
        sums,
        None if stacked is None else _numbers(call, stacked.chains_at, "int32"),
        pointer_to(call.offsets),
        pointer_to(call.rule.sinks),
        *result,
        call.table.shape[0],
        sizes.tokens,
        depth,
        splits,
        sizes.q_heads,
        sizes.v_dim,
        plan.block_v,
        _JOINED,
    )
    return [
        Launch(attend_kernel, plan.grid, _arguments(call, plan, target, None), options),
        Launch(
            join_kernel, (call.q.shape[0], sizes.q_heads, 1), merged, {"num_warps": _JOIN_WARPS}
        ),
    ]


def _arguments(call: Call, plan: Plan, target: tuple[Any, ...], sinks: Any) -> tuple[Any, ...]:
    sizes, rule = call.sizes, call.rule
    key, value, rest = pointer_to(call.key), call.value, call.rest
    key_strides = strides_of(call.key, 3)
    value_pointer, value_strides = pointer_to(value), _strides(value)
    if value is None and sizes.v_dim != sizes.dim:  # only the first elements of a key
        value_pointer, value_strides = key, key_strides
    dtype = _DTYPES[product_dtype(call)]
    narrows = dtype == tl.float16  # weights times small scales would be 0
    joined = sizes.rest and rest is None
    v_source, k_scales = call.key if value is None else value, call.key_scales
    v_scales = k_scales if value is None else call.value_scales
    k_group = _group(k_scales, call.key, is_wide=value is None and bool(narrows or joined))
    # A global scale of keys is part of `scale` if it is a number; the kernel reads arrays.
    addressed = [None if isinstance(each, float) else each for each in call.global_scales]
    return (
        pointer_to(call.q),
        strides_of(call.q, 2),
        key,
        key_strides,
        value_pointer,
        None if value_strides == key_strides else value_strides,
        pointer_to(rest),
        _strides(rest),
        pointer_to(k_scales),
        _strides(k_scales),
        pointer_to(v_scales),
        None if _strides(v_scales) == _strides(k_scales) else _strides(v_scales),
        pointer_to(call.table),
        strides_of(call.table, 1)[0],
        pointer_to(call.lengths),
        strides_of(call.lengths, 1)[0],
        *_rows(call),
        pointer_to(sinks),
        *map(pointer_to, addressed),
        call.global_scales[1] if addressed[1] is None else None,
        *target,
        sizes.rows,
        sizes.tokens,
        call.key.shape[0],
        sizes.columns,
        rule.scale if addressed[0] is not None else rule.scale * (call.global_scales[0] or 1.0),
        rule.soft_cap,
        rule.window,
        rule.chunk,
        rule.causal,
        sizes.dim,
        plan.block_dim,
        sizes.rest,
        plan.block_rest,
        sizes.v_dim,
        plan.block_v,
        sizes.page_size,
        sizes.q_heads,
        sizes.group,
        plan.heads_per_block,
        plan.block_m,
        plan.block_n,
        _kind(call.key, plan.arch),
        _kind(v_source, plan.arch),
        k_group,
        k_group if value_pointer is None else _group(v_scales, v_source, is_wide=narrows),
        dtype,
    )


def _rows(call: Call) -> tuple[Any, Any]:
    """Return the row offsets, and ``Stack.numbers`` if rows are stacked."""
    if call.stack is None:
        return pointer_to(call.offsets), None
    return _numbers(call, call.stack[0].offsets_at, "uint32"), pointer_to(call.stack[1])


def _numbers(call: Call, at: int, dtype: str) -> Pointer:
    """Return the pointer to entry `at` of ``Stack.numbers``, whose entries have 4 bytes."""
    return Pointer(address_of(call.stack[1]) + 4 * at, dtype)  # type: ignore[index]


def _strides(array: Any) -> tuple[int, ...]:
    return _NO_STRIDES if array is None else strides_of(array, 3)


def _kind_of(dtype: str) -> str:
    if dtype in WIDE:
        return "plain"
    if dtype not in _KINDS:
        raise TypeError(f"a pool has dtype {dtype}, must be one of {', '.join((*WIDE, *_KINDS))}")
    return _KINDS[dtype]


def _kind(pool: Any, arch: int) -> str:
    kind = _kind_of(pool.dtype.name)
    return "e4m3 natively" if kind == "e4m3" and arch >= _FIRST_WITH_FP8 else kind


def _group(scales: Any, pool: Any, *, is_wide: bool) -> int:
    """Return the number of elements that share a scale, if the kernel scales elements.

    0 if the pool has no scales, or if the kernel scales weights or scores instead. With `is_wide`,
    the kernel must not scale weights or scores.
    """
    is_one = scales is not None and scales.shape[3] == 1 and pool.dtype.name != "uint8"
    if scales is None or (is_one and not is_wide):
        return 0
    return dim_of(pool) // int(scales.shape[3])
