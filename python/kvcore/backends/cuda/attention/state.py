# SPDX-License-Identifier: Apache-2.0
"""The state of a program's queries, and the step that adds a tile of tokens to it.

The state is the largest score so far, the sum of exponentials relative to it, and the sum of values
weighted by these exponentials. Scores are logarithms of base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.attention.tiles import load_tile, scaled

__all__ = ["add_tile", "pages_of"]


@triton.jit
def _offset(strides, page, in_page, head):
    """Return the offsets of the rows of tokens, in elements; `page` has 64 bits."""
    return page * strides[0] + in_page * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def _is_seen(position, at, window, chunk, causal: tl.constexpr):
    """Return true where the query at `position` [m] sees the token at `at` [n]: [m, n]."""
    if causal:
        seen = at[None, :] <= position[:, None]
    else:
        seen = (at[None, :] >= 0) & (position[:, None] >= 0)  # all tokens
    if window is not None:
        seen = seen & (at[None, :] > position[:, None] - window)
    if chunk is not None:
        seen = seen & (at[None, :] // chunk == position[:, None] // chunk)
    return seen


@triton.jit
def _kept_apart(values, weights, seen):
    """Keep NaN and infinite values away from queries that do not see their tokens.

    A weight of 0 times NaN would be NaN. So these values become 0, and queries that see them get a
    weight of NaN.
    """
    is_number = tl.abs(values.to(tl.float32)) < float("inf")
    has_none = tl.min(is_number.to(tl.int32), 1) == 0
    weights = tl.where(seen & has_none[None, :], float("nan"), weights)
    return tl.where(is_number, values, 0.0), weights


@triton.jit
def _capped(scores, soft_cap):
    """Limit scores to a cap by tanh."""
    if soft_cap is not None:
        # tanh from exp2, which every processor has; an overflow of exp2 gives the right limit.
        power = tl.exp2(scores * (2.0 * 1.4426950408889634 / soft_cap))
        scores = soft_cap * (1.0 - 2.0 / (power + 1.0))
    return scores


@triton.jit
def pages_of(entries, at, high, page_size: tl.constexpr):
    """Load the pages of the tokens at `at` [n]; 2^32 - 1 for tokens from `high` on."""
    return tl.load(entries + at // page_size, mask=at < high, other=0xFFFFFFFF)


@triton.jit
def add_tile(
    most,
    total,
    acc,
    queries,
    ends,
    k,
    k_strides,
    v,
    v_strides,
    rest,
    rest_strides,
    k_scales,
    k_scale_strides,
    v_scales,
    v_scale_strides,
    page,
    at,
    position,
    head,
    num_pages,
    scale,
    soft_cap,
    window,
    chunk,
    for_all: tl.constexpr,  # every query sees all tokens of the tile
    causal: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    block_rest: tl.constexpr,
    v_dim: tl.constexpr,
    block_v: tl.constexpr,
    page_size: tl.constexpr,
    k_kind: tl.constexpr,
    v_kind: tl.constexpr,
    k_group: tl.constexpr,
    v_group: tl.constexpr,
    dtype: tl.constexpr,
):
    """Add the tokens at `at` [n] to the state of the queries."""
    log2e: tl.constexpr = 1.4426950408889634
    page = page.to(tl.int64)
    has = page < num_pages  # other ids are not pages and must not be read
    in_page = (at % page_size).to(tl.int64)

    k_at = _offset(k_strides, page, in_page, head)
    s_at = _offset(k_scale_strides, page, in_page, head)
    keys = load_tile(k, k_at, has, k_scales, s_at, k_kind, dtype, 0, dim, block_dim, k_group)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = scaled(scores, k_scales, s_at, has, k_group)
    if rest_dim > 0:
        if rest is None:
            more = load_tile(
                k, k_at, has, k_scales, s_at, k_kind, dtype, dim, rest_dim, block_rest, k_group
            )
        else:
            r_at = _offset(rest_strides, page, in_page, head)
            more = load_tile(
                rest, r_at, has, None, r_at, "plain", dtype, 0, rest_dim, block_rest, 0
            )
        scores = tl.dot(ends, tl.trans(more), scores, input_precision="ieee")
    if soft_cap is None:
        scores = scores * (scale * log2e)
    else:
        scores = _capped(scores * scale, soft_cap) * log2e
    seen = has[None, :]
    if not for_all:
        seen = seen & _is_seen(position, at, window, chunk, causal)
    scores = tl.where(seen, scores, float("-inf"))

    highest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if v is None:
        values = keys
        t_at = s_at
    else:
        v_at = k_at if v_strides is None else _offset(v_strides, page, in_page, head)
        t_at = s_at if v_scale_strides is None else _offset(v_scale_strides, page, in_page, head)
        values = load_tile(v, v_at, has, v_scales, t_at, v_kind, dtype, 0, v_dim, block_v, v_group)
    if not for_all:
        values, weights = _kept_apart(values, weights, seen)
    weights = scaled(weights, v_scales, t_at, has, v_group)
    acc = tl.dot(weights.to(dtype), values, acc, input_precision="ieee")
    return highest, total, acc
