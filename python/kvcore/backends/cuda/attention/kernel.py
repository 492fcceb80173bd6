# SPDX-License-Identifier: Apache-2.0
"""Attention over pages: one kernel for decoding, draft verification and ragged prompts.

A program has some tokens of a row and the query heads that share a head of K and V: pairs of token
and query head are the rows of its matrices. The program iterates over its split of the visible
tokens, and writes the state of the split: the output, and the logarithm of the sum of exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore.backends.cuda.attention.state import add_tile, pages_of
from kvcore.backends.cuda.attention.tiles import row_of_program

__all__ = ["attend"]

# A number or an address that changes from step to step must not cause a new compilation. Triton
# specialises on the alignment of an address, and a table begins after the lengths of all rows.
_VARY = ["num_rows", "num_tokens", "num_pages", "columns", "table_stride", "window", "chunk"]
_ANYWHERE = ["table", "lengths", "offsets", "stack", "lse"]


@triton.jit
def _range_of_block(cached, length, begin, last, window, chunk, causal: tl.constexpr):
    """Return the first position that a token of a block sees, and the end of the positions."""
    low = 0
    high = length
    if causal:
        high = cached + last + 1
    if window is not None:
        low = tl.maximum(cached + begin + 1 - window, 0)
    if chunk is not None:
        low = tl.maximum(low, (cached + begin) // chunk * chunk)
        high = tl.minimum(high, ((cached + last) // chunk + 1) * chunk)
    return low, high


@triton.jit
def _tiles_for_all(
    low, high, oldest, newest, window, chunk, causal: tl.constexpr, block_n: tl.constexpr
):
    """Return the first tile that all queries see completely, and the end of these tiles."""
    begin = low
    end = high + block_n - 1  # no query sees positions from `high` on
    if causal:
        end = tl.where(oldest + 1 < high, oldest + 1, end)
    if window is not None:
        begin = tl.maximum(begin, newest + 1 - window)
    if chunk is not None:
        begin = tl.maximum(begin, newest // chunk * chunk)
        behind = (oldest // chunk + 1) * chunk
        end = tl.where(behind < high, tl.minimum(end, behind), end)
    return tl.cdiv(begin - low, block_n), tl.maximum(end - low, 0) // block_n


@triton.jit
def _of_stack(
    stack,
    num_states,
    num_rows,
    state,
    is_query,
    row,
    lengths,
    lengths_stride,
    new,
    causal: tl.constexpr,
):
    """Return tokens of q, their positions, and the table row and the range of a stacked row."""
    numbers = stack + state
    token = tl.load(numbers, mask=is_query, other=0)
    own = tl.load(numbers + num_states, mask=is_query, other=0)
    ahead = tl.load(numbers + 2 * num_states, mask=is_query, other=0)
    cached = tl.load(lengths + own * lengths_stride, mask=is_query, other=0).to(tl.int32)
    position = cached + ahead
    numbers = stack + 3 * num_states + row
    row = tl.load(numbers)
    low = tl.load(numbers + num_rows)
    length = tl.load(lengths + row * lengths_stride).to(tl.int32) + new
    high = tl.minimum(tl.load(numbers + 2 * num_rows), length)
    if causal:
        high = tl.minimum(high, tl.max(tl.where(is_query, position, 0), 0) + 1)
    return token, position, row, low, high


@triton.jit
def _with_sinks(sinks, mask, most, total, acc):
    """Add the sink score of each head to the state."""
    sink = tl.load(sinks, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(most, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(most - base)
    return base, total * shrink + tl.exp2(sink - base), acc * shrink[:, None]


@triton.jit(do_not_specialize=_VARY, do_not_specialize_on_alignment=_ANYWHERE)
def attend(
    q,  # [tokens, q_heads, dim + rest]
    q_strides,  # of a token and a head; all strides are in elements
    k,  # [pages, page_size, heads, dim]
    k_strides,  # of a page, a token and a head
    v,  # [pages, page_size, heads, v_dim]; None: the tile of K
    v_strides,  # None: the strides of K
    rest,  # the ends of K, [pages, page_size, heads, rest]; None: they are in the rows of K
    rest_strides,
    k_scales,  # [pages, page_size, heads, groups], or None
    k_scale_strides,
    v_scales,
    v_scale_strides,  # None: the strides of `k_scales`
    table,  # uint32 [rows, columns]
    table_stride,
    lengths,  # uint32 [rows]
    lengths_stride,
    offsets,  # uint32 [rows + 1]
    stack,  # int32, ``cascade.Stack.numbers`` if rows are stacked, or None
    sinks,  # [q_heads], or None
    k_global,  # float32 [1], global scale of nvfp4 keys, or None
    v_global,  # float32 [1], global scale of nvfp4 values, or None
    v_factor,  # a number, factor of the values, or None
    out,  # [splits, tokens, q_heads, v_dim]
    out_strides,  # of a token and a head
    lse,  # float32 [splits, tokens, q_heads], or None
    num_rows,
    num_tokens,
    num_pages,
    columns,
    scale,
    soft_cap,
    window,
    chunk,
    causal: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    rest_dim: tl.constexpr,
    block_rest: tl.constexpr,
    v_dim: tl.constexpr,
    block_v: tl.constexpr,
    page_size: tl.constexpr,
    q_heads: tl.constexpr,
    group: tl.constexpr,  # query heads of a head of K and V
    heads_per_block: tl.constexpr,  # query heads of a program
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    k_kind: tl.constexpr,
    v_kind: tl.constexpr,
    k_group: tl.constexpr,  # elements that share a scale, 0: all elements of a token
    v_group: tl.constexpr,
    dtype: tl.constexpr,  # of products
):
    """Write the state of one split of a block of queries."""
    # Exponentials are of base 2, logarithms natural.
    log2e: tl.constexpr = 1.4426950408889634
    tokens_per_block: tl.constexpr = block_m // heads_per_block
    parts: tl.constexpr = (group + heads_per_block - 1) // heads_per_block

    # ---- the queries of the program
    row = row_of_program(offsets, num_rows, tl.program_id(0), tokens_per_block)
    first = tl.load(offsets + row).to(tl.int32)
    new = tl.load(offsets + row + 1).to(tl.int32) - first
    begin = (tl.program_id(0) - first // tokens_per_block - row) * tokens_per_block
    if begin >= new:
        return
    head = tl.program_id(1) // parts
    m = tl.arange(0, block_m)
    of_row = begin + m // heads_per_block
    of_group = tl.program_id(1) % parts * heads_per_block + m % heads_per_block
    state = first + of_row
    is_query = (of_row < new) & (m < tokens_per_block * heads_per_block)
    is_query = is_query & (of_group < group) & (state < num_tokens)
    q_head = head * group + of_group
    if stack is None:
        token = state
        cached = tl.load(lengths + row * lengths_stride).to(tl.int32)
        position = cached + of_row
        last = tl.minimum(begin + tokens_per_block, new) - 1
        low, high = _range_of_block(cached, cached + new, begin, last, window, chunk, causal)
    else:
        token, position, row, low, high = _of_stack(
            stack, num_tokens, num_rows, state, is_query, row, lengths, lengths_stride, new, causal
        )
    # A table may have too few columns for the lengths: ignore the tokens beyond its columns.
    high = tl.minimum(high.to(tl.int64), columns.to(tl.int64) * page_size).to(tl.int32)

    # ---- the elements of the queries
    d = tl.arange(0, block_dim)
    q_at = token.to(tl.int64) * q_strides[0] + q_head.to(tl.int64) * q_strides[1]
    q_mask = is_query[:, None] & (d < dim)[None, :]
    queries = tl.load(q + q_at[:, None] + d[None, :], mask=q_mask, other=0.0).to(dtype)
    if rest_dim > 0:
        e = tl.arange(0, block_rest)
        e_mask = is_query[:, None] & (e < rest_dim)[None, :]
        ends = tl.load(q + q_at[:, None] + (dim + e)[None, :], mask=e_mask, other=0.0).to(dtype)

    if k_global is not None:
        scale = scale * tl.load(k_global)

    # ---- the tiles of the split
    oldest = tl.min(tl.where(is_query, position, 0x7FFFFFFF), 0)
    newest = tl.max(tl.where(is_query, position, 0), 0)
    tiles = tl.cdiv(high - low, block_n)
    per_split = tl.cdiv(tiles, tl.num_programs(2))
    tile = tl.program_id(2) * per_split
    end = tl.minimum(tile + per_split, tiles)
    whole, behind = _tiles_for_all(low, high, oldest, newest, window, chunk, causal, block_n)
    whole = tl.minimum(tl.maximum(whole, tile), end)
    behind = tl.minimum(tl.maximum(behind, whole), end)

    most = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    n = tl.arange(0, block_n)
    entries = table + row.to(tl.int64) * table_stride
    if rest_dim == 0:
        ends = None
    # Tiles that all queries see completely need no mask. They come first; the tiles before them and
    # after them follow.
    at = low + whole * block_n + n
    page = pages_of(entries, at, high, page_size)
    for _ in tl.range(whole, behind):
        # Load page ids a tile ahead: the loads of K and V wait for them.
        following = pages_of(entries, at + block_n, high, page_size)
        most, total, acc = add_tile(
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
            True,
            causal,
            dim,
            block_dim,
            rest_dim,
            block_rest,
            v_dim,
            block_v,
            page_size,
            k_kind,
            v_kind,
            k_group,
            v_group,
            dtype,
        )
        page = following
        at += block_n
    masked = end - (behind - whole)
    start = low + tile * block_n
    first_whole = low + whole * block_n
    behind_whole = low + behind * block_n
    for _ in tl.range(tile, masked, num_stages=1):
        start = tl.where(start == first_whole, behind_whole, start)
        at = start + n
        page = pages_of(entries, at, high, page_size)
        most, total, acc = add_tile(
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
            False,
            causal,
            dim,
            block_dim,
            rest_dim,
            block_rest,
            v_dim,
            block_v,
            page_size,
            k_kind,
            v_kind,
            k_group,
            v_group,
            dtype,
        )
        start += block_n

    if sinks is not None:
        most, total, acc = _with_sinks(sinks + q_head, is_query, most, total, acc)
    is_empty = total == 0.0
    of_split = tl.program_id(2).to(tl.int64) * num_tokens + state
    o_at = of_split * out_strides[0] + q_head.to(tl.int64) * out_strides[1]
    e_v = tl.arange(0, block_v)
    o_mask = is_query[:, None] & (e_v < v_dim)[None, :]
    values = acc / tl.where(is_empty, 1.0, total)[:, None]
    if v_global is not None:
        values = values * tl.load(v_global)
    if v_factor is not None:
        values = values * v_factor
    tl.store(out + o_at[:, None] + e_v[None, :], values.to(out.dtype.element_ty), mask=o_mask)
    if lse is not None:
        sums = (most + tl.log2(tl.where(is_empty, 1.0, total))) / log2e
        sums = tl.where(is_empty, float("-inf"), sums)
        tl.store(lse + of_split * q_heads + q_head, sums, mask=is_query)
