# SPDX-License-Identifier: Apache-2.0
"""The states of splits become one: always in the same order, so that sums round the same way."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["join"]


@triton.jit
def _state(chains, token, head, i, num_states, depth: tl.constexpr, q_heads: tl.constexpr):
    """Return where the i-th state of a token and head is; below 0 for none."""
    state = token
    if chains is not None:
        state = tl.load(chains + token.to(tl.int64) * depth + i % depth)
    split = tl.cast(i // depth, tl.int64)
    return tl.where(state >= 0, (split * num_states + state) * q_heads + head, -1)


@triton.jit(do_not_specialize=["num_rows", "num_states"])
def join(
    parts,  # float32 [splits, states, q_heads, v_dim]
    sums,  # float32 [splits, states, q_heads]
    chains,  # int32 [tokens, depth]: the states of a token; None: it is its own
    offsets,  # uint32 [rows + 1]
    sinks,  # [q_heads], or None
    out,  # [tokens, q_heads, v_dim]
    out_strides,  # of a token and a head, in elements
    lse,  # float32 [tokens, q_heads], or None
    num_rows,
    num_states,
    depth: tl.constexpr,
    splits: tl.constexpr,
    q_heads: tl.constexpr,
    v_dim: tl.constexpr,
    block_v: tl.constexpr,
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
    for i in range(depth * splits):
        at = _state(chains, token, head, i, num_states, depth, q_heads)
        if at >= 0:
            most = tl.maximum(most, tl.load(sums + at))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.full([], 0.0, tl.float32)
    if sinks is not None:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
    acc = tl.zeros([block_v], tl.float32)
    for i in range(depth * splits):
        at = _state(chains, token, head, i, num_states, depth, q_heads)
        if at >= 0:
            weight = tl.exp(tl.load(sums + at) - base)
            total += weight
            acc += weight * tl.load(parts + at * v_dim + d, mask=d < v_dim, other=0.0)
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)
    o_at = token.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(out + o_at + d, acc.to(out.dtype.element_ty), mask=d < v_dim)
    if lse is not None:
        value = tl.where(is_empty, float("-inf"), base + tl.log(tl.where(is_empty, 1.0, total)))
        tl.store(lse + token.to(tl.int64) * q_heads + head, value)
