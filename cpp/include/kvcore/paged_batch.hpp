// SPDX-License-Identifier: Apache-2.0
// Moves the tokens of a sequence or of a batch between contiguous memory and the pages of their
// sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The bytes of one token: `heads` runs of `head_bytes` contiguous bytes each, both >= 0.
struct TokenShape {
    std::int64_t heads;
    std::int64_t head_bytes;
};

/// Tokens in order: [tokens, heads, head_bytes], memory of the caller. Strides count bytes, of any
/// sign.
template <class Byte>
struct TokenRows {
    Byte* data;
    std::int64_t token_stride;
    std::int64_t head_stride;

    /// The same rows without the first `token` tokens.
    [[nodiscard]] constexpr TokenRows from(std::int64_t token) const noexcept {
        return {data + token * token_stride, token_stride, head_stride};
    }
};

/// One sequence's tokens in a pool [num_blocks, block_size, heads, head_bytes]: token t is in block
/// `blocks[t / block_size]`. Strides count bytes, of any sign. Owns nothing.
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
/// the pool. Bounds and cost as for `append_rows`.
void gather_rows(TokenShape shape, const PagedRows<const std::byte>& pool, std::int64_t first,
                 const TokenRows<std::byte>& destination, std::int64_t count) noexcept;

/// The pages of each sequence of a batch, as `CacheManager::fetch` writes them.
struct PageTable {
    const std::uint32_t* pages;  // [batch] rows
    std::int64_t row_stride;     // elements
    std::int64_t width;          // columns of a row that may be read
    std::int64_t batch;
};

/// Tokens [begin[b], begin[b] + offsets[b + 1] - offsets[b]) of each sequence b. In contiguous
/// memory, the sequences follow each other as tokens offsets[0] .. offsets[batch].
struct TokenRanges {
    const std::uint32_t* begin;    // [batch]; nullptr: all 0
    const std::uint32_t* offsets;  // [batch + 1], not descending

    [[nodiscard]] std::int64_t first(std::int64_t row) const noexcept {
        return begin == nullptr ? 0 : begin[row];
    }
};

/// A token of a range that has no page: `entry` is the value of its table column.
struct MissingPage {
    std::int64_t row = -1;  // -1: all tokens have a page
    std::int64_t token = 0;
    std::uint32_t entry = 0;
};

/// Finds the first token of a range that is beyond the table, or whose page id is not below
/// `num_pages`. O(pages of the ranges).
[[nodiscard]] MissingPage find_missing_page(const PageTable& table, const TokenRanges& ranges,
                                            std::int64_t page_size,
                                            std::int64_t num_pages) noexcept;

/// Copies tokens from `source` to the ranges' places in the pool (whose `blocks` are not read). All
/// tokens have pages, and no two tokens have the same place; source and pool do not overlap. Cost:
/// the bytes.
void append_batch(TokenShape shape, const PagedRows<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source,
                  int threads = 1);

/// Copies the ranges' tokens from the pool to `destination`; as `append_batch`.
void gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination,
                  int threads = 1);

// ---- pools of another dtype than the tokens: one pass, no temporaries ---------------------------

/// Sizes that all tokens of a pool share.
struct PageShape {
    std::int64_t page_size;  // tokens
    std::int64_t heads;
};

/// The source of an append's scales: kFound computes and writes a scale for each group of each
/// token; kGiven uses the scales that are already in the view, for example one per head.
enum class Scales : std::uint8_t { kFound, kGiven };

/// Writes tokens of a wide dtype to the ranges' places in a pool. A narrow pool gets codes as from
/// `quantize` or `quantize_by`, with scale 1 if the pool has no scales; a wide pool gets the
/// nearest elements. `Scales::kFound` requires a narrow pool with scales. Otherwise as
/// `append_batch` of bytes.
void append_batch(PageShape shape, const PagedTensor<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                  Scales scales, int threads = 1);

/// Reads the ranges' tokens as elements of a wide dtype, codes times their scales.
void gather_batch(PageShape shape, const PagedTensor<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                  int threads = 1);

// ---- latent rows ------------------------------------------------------------------------------

/// Appends latent rows [tokens, dim of k + dim of rope] of a wide dtype to `k` and `rope` of a view
/// that `latent_view` of kvcore/layout.hpp returned.
void append_latent(const PoolView<std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                   int threads = 1);

/// Reads them back, to the nearest elements of a wide dtype.
void gather_latent(const PoolView<const std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                   int threads = 1);

// Slots: the slot of a token is page * page_size + token of the page. Engines compute the slots
// once per step and use them to write every layer. The functions below also advance the lengths and
// the page table of a batch from step to step.

/// Writes the slots of the ranges' tokens, sequence after sequence, to `slots` [capacity]; -1 for a
/// token without a page, and after the last token. 0 < page_size, capacity >= the tokens.
/// O(capacity).
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int64_t* slots, std::int64_t capacity) noexcept;
/// The same, if int32 holds num_pages * page_size.
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int32_t* slots, std::int64_t capacity) noexcept;

/// Copies token i of `k` and of `v` (not read if the pool has no values) to slots[i], i < n, and
/// returns the number of slots beyond the pool. These slots are skipped, and so are negative slots,
/// which are padding. Rows may be parts of a fused QKV; they have the pool's dtype and share no
/// byte with the pool. A slot that is named twice gets the bytes of either token, or a mix of both
/// if two threads write it. Cost: the bytes.
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int64_t* slots,
                          std::int64_t n, int threads = 1);
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int32_t* slots,
                          std::int64_t n, int threads = 1);

/// Writes lengths[i] + offsets[i + 1] - offsets[i] to advanced[i], or lengths[i] if `active` is 0
/// for i (nullptr: all are active). `advanced` may be `lengths`. O(batch).
void advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                     const std::uint8_t* active, std::uint32_t* advanced,
                     std::int64_t batch) noexcept;

/// Table entry without a page; no pool has this page id.
constexpr std::uint32_t kNoPage = 0xffffffffU;

/// The arrays of a batch that have a row for each request.
struct BatchRows {
    std::uint32_t* pages;     // [rows, columns]
    std::int64_t row_stride;  // elements
    std::int64_t columns;
    std::int64_t rows;
    std::uint32_t* lengths;  // [rows]; nullptr: no lengths
    std::uint32_t* offsets;  // [rows + 1], of the rows' new tokens, from 0 on; nullptr: no offsets
};

/// Moves the rows `kept` [n], n <= rows, to the front, in place and in their order. `kept` ascends;
/// the list ends at the first number that does not ascend or is not a row. All rows after the moved
/// rows become empty: `kNoPage` in all columns, length 0, no new tokens. The arrays share no byte.
/// Cost: the bytes of the rows that move and of the rows that become empty.
void compact_table(const BatchRows& batch, const std::uint32_t* kept, std::int64_t n,
                   int threads = 1);

}  // namespace kvcore
