# SPDX-License-Identifier: Apache-2.0
"""Tiles of pages: the codes of narrow pools as numbers, their scales, and the row of a program.

Kernels decode fp8 from its bits if the architecture has no instruction for fp8; nvfp4 always.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_tile", "row_of_program", "scaled"]


@triton.jit
def row_of_program(offsets, num_rows, program, tokens_per_block: tl.constexpr):
    """Find the row that a program works for.

    Row b has the programs from ``offsets[b] // tokens_per_block + b`` on. These are enough for its
    tokens at any offset, so the grid depends only on the numbers of tokens and rows.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(offsets + middle).to(tl.int32) // tokens_per_block + middle
        is_before = begin <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _numbers(codes, kind: tl.constexpr, dtype: tl.constexpr):
    """Decode stored codes to numbers."""
    if kind == "e4m3" and dtype == tl.float16:
        # Decode by the bits of a float16, whose exponent has another bias. 0x7f is NaN.
        low = (codes & 0x7F).to(tl.uint16)
        bits = ((codes & 0x80).to(tl.uint16) << 8) | tl.where(low == 0x7F, 0x7E00, low << 7)
        numbers = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    elif kind == "e4m3":  # the same with a float32
        low = (codes & 0x7F).to(tl.uint32)
        bits = ((codes & 0x80).to(tl.uint32) << 24) | tl.where(low == 0x7F, 0x7FC00000, low << 20)
        numbers = (bits.to(tl.uint32).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    elif kind == "e4m3 natively":
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    elif kind == "e5m2":
        numbers = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif kind == "int8":
        numbers = codes.to(tl.float32).to(dtype)
    else:
        tl.static_assert(kind == "plain", "_numbers has no code for this kind of pool")
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def _half_of(codes):
    """Decode e2m1 in the lower bits by the bits of a float16, whose exponent has another bias."""
    bits = ((codes & 8).to(tl.uint16) << 12) | ((codes & 7).to(tl.uint16) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _load_blocks(
    pool,
    at,
    has,
    scales,
    scale_at,
    dtype: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
):
    """Load nvfp4 rows, [tokens, block], times the scales of their blocks: exact in 16 bits."""
    tokens: tl.constexpr = has.shape[0]
    d = tl.arange(0, block // 2)
    mask = has[:, None] if dim == block else has[:, None] & (d < dim // 2)[None, :]
    pairs = tl.load(pool + at[:, None] + d[None, :], mask=mask, other=0)
    b = tl.arange(0, block // 16)
    b_mask = has[:, None] if dim == block else has[:, None] & (b < dim // 16)[None, :]
    codes = tl.load(scales + scale_at[:, None] + b[None, :], mask=b_mask, other=0)
    factor = _numbers(codes, "e4m3", tl.float16)[:, :, None]
    even = _half_of(pairs).reshape(tokens, block // 16, 8) * factor
    odd = _half_of(pairs >> 4).reshape(tokens, block // 16, 8) * factor
    return tl.join(even, odd).reshape(tokens, block).to(dtype)


@triton.jit
def load_tile(
    pool,
    at,
    has,
    scales,
    scale_at,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    first: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
):
    """Load `dim` elements of rows from `first` on, [tokens, block], padded with zeros.

    `group` elements share a scale; with 0, the codes are not scaled. For nvfp4, which has two codes
    in a byte, `first` is 0.
    """
    d = tl.arange(0, block)
    mask = has[:, None] if dim == block else has[:, None] & (d < dim)[None, :]
    if kind == "nvfp4":
        tile = _load_blocks(pool, at, has, scales, scale_at, dtype, dim, block)
    elif group == 0:
        codes = tl.load(pool + at[:, None] + (first + d)[None, :], mask=mask, other=0)
        tile = _numbers(codes, kind, dtype)
    elif group & (group - 1) == 0 and block % group == 0 and first % group == 0:
        codes = tl.load(pool + at[:, None] + (first + d)[None, :], mask=mask, other=0)
        g = tl.arange(0, block // group)
        g_mask = has[:, None] & (g * group < dim)[None, :]
        g_at = scale_at[:, None] + (first // group + g)[None, :]
        factor = tl.load(scales + g_at, mask=g_mask, other=0.0)
        parts = _numbers(codes, kind, tl.float32).reshape(has.shape[0], block // group, group)
        tile = (parts * factor[:, :, None]).reshape(has.shape[0], block).to(dtype)
    else:
        codes = tl.load(pool + at[:, None] + (first + d)[None, :], mask=mask, other=0)
        d_at = scale_at[:, None] + ((first + d) // group)[None, :]
        factor = tl.load(scales + d_at, mask=mask, other=0.0)
        tile = (_numbers(codes, kind, tl.float32) * factor).to(dtype)
    return tile


@triton.jit
def scaled(numbers, scales, scale_at, has, group: tl.constexpr):
    """Multiply numbers [queries, tokens] by the scale of each token, if tokens have scales."""
    if scales is not None and group == 0:
        numbers = numbers * tl.load(scales + scale_at, mask=has, other=0.0)[None, :]
    return numbers
