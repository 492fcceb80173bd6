// SPDX-License-Identifier: Apache-2.0
// Rows of tokens, moved between contiguous memory and the blocks of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore {

/// What one token holds: `heads` runs of `head_bytes` contiguous bytes each, both >= 0.
struct TokenShape {
    std::int64_t heads;
    std::int64_t head_bytes;
};

/// Tokens one after the other: [tokens, heads, head_bytes], the caller's memory. Strides count
/// bytes, of any sign.
template <class Byte>
struct TokenRows {
    Byte* data;
    std::int64_t token_stride;
    std::int64_t head_stride;

    /// The same without the first tokens.
    [[nodiscard]] constexpr TokenRows from(std::int64_t token) const noexcept {
        return {data + token * token_stride, token_stride, head_stride};
    }
};

/// One sequence's tokens in a pool [num_blocks, block_size, heads, head_bytes]: token t stands in
/// block `blocks[t / block_size]`. Strides count bytes, of any sign. Owns nothing.
template <class Byte>
struct PagedRows {
    Byte* data;  // of block 0
    std::int64_t block_stride;
    std::int64_t token_stride;
    std::int64_t head_stride;
    std::int64_t block_size;
    const BlockId* blocks;  // [ceil(tokens / block_size)], each 0 .. num_blocks - 1

    /// Bytes from `data` to the first head of a token, 0 <= token < tokens. O(1).
    [[nodiscard]] constexpr std::int64_t offset(std::int64_t token) const noexcept {
        const std::int64_t block = blocks[token / block_size];
        return block * block_stride + token % block_size * token_stride;
    }
};

/// Copies `count` tokens from `source` to tokens [first, first + count) of the sequence.
/// The caller has checked the bounds; source and pool do not overlap. Cost: the bytes, one memcpy
/// per run that is contiguous on both sides; no allocation.
void append_rows(TokenShape shape, const PagedRows<std::byte>& pool, std::int64_t first,
                 const TokenRows<const std::byte>& source, std::int64_t count) noexcept;

/// Copies tokens [first, first + count) of the sequence to `destination`, which must not overlap
/// the pool. Bounds and cost are those of `append_rows`.
void gather_rows(TokenShape shape, const PagedRows<const std::byte>& pool, std::int64_t first,
                 const TokenRows<std::byte>& destination, std::int64_t count) noexcept;

}  // namespace kvcore
