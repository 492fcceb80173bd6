# SPDX-License-Identifier: Apache-2.0
"""Merge the states of splits, always in the same order, so that sums round the same way."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["join"]


@triton.jit
def _states(
    chains,
    token,
    head,
    i,
    num_states,
    depth,
    splits,
    q_heads: tl.constexpr,
):
    """Return the indices of the states `i` of a token and head; -1 for an unused entry."""
    is_one = i < depth * splits
    if chains is None:  # the depth is 1
        split = i.to(tl.int64)
        state = tl.zeros_like(i) + token
    else:
        split = (i // depth).to(tl.int64)
        state = tl.load(chains + token.to(tl.int64) * depth + i % depth, mask=is_one, other=-1)
    return tl.where(is_one & (state >= 0), (split * num_states + state) * q_heads + head, -1)


@triton.jit(
    do_not_specialize=["num_rows", "num_states", "depth", "splits"],
    do_not_specialize_on_alignment=["sums", "chains", "offsets", "lse"],
)
def join(
    parts,  # float32 [splits, states, q_heads, v_dim]
    sums,  # float32 [splits, states, q_heads]
    chains,  # int32 [tokens, depth]: the states of a token; None: a token is its own state
    offsets,  # uint32 [rows + 1]
    sinks,  # [q_heads], or None
    out,  # [tokens, q_heads, v_dim]
    out_strides,  # of a token and a head, in elements
    lse,  # float32 [tokens, q_heads], or None
    num_rows,
    num_states,
    depth,
    splits,
    q_heads: tl.constexpr,
    v_dim: tl.constexpr,
    block_v: tl.constexpr,
    block_i: tl.constexpr,  # states that are read at the same time
):
    """Merge the states of one token and head."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(offsets + num_rows).to(tl.int32):
        return
    d = tl.arange(0, block_v)
    most = tl.full([], float("-inf"), tl.float32)
    if sinks is not None:
        most = tl.load(sinks + head).to(tl.float32)
    i = tl.arange(0, block_i)
    for begin in range(0, depth * splits, block_i):
        at = _states(chains, token, head, begin + i, num_states, depth, splits, q_heads)
        found = tl.load(sums + at, mask=at >= 0, other=float("-inf"))
        most = tl.maximum(most, tl.max(found, 0))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.full([], 0.0, tl.float32)
    if sinks is not None:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
    acc = tl.zeros([block_v], tl.float32)
    for begin in range(0, depth * splits, block_i):
        at = _states(chains, token, head, begin + i, num_states, depth, splits, q_heads)
        found = tl.load(sums + at, mask=at >= 0, other=float("-inf"))
        weights = tl.exp(found - base)
        mask = (found != float("-inf"))[:, None] & (d < v_dim)[None, :]  # other states are empty
        values = tl.load(parts + at[:, None] * v_dim + d[None, :], mask=mask, other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(weights[:, None] * values, 0)
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)
    o_at = token.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(out + o_at + d, acc.to(out.dtype.element_ty), mask=d < v_dim)
    if lse is not None:
        value = tl.where(is_empty, float("-inf"), base + tl.log(tl.where(is_empty, 1.0, total)))
        tl.store(lse + token.to(tl.int64) * q_heads + head, value)
