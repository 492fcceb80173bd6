// SPDX-License-Identifier: Apache-2.0
// The tokens of a sequence or of a batch, moved between contiguous memory and the pages of their
// sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/layout.hpp"
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

/// Which pages the sequences of a batch hold, as `CacheManager::fetch` writes it.
struct PageTable {
    const std::uint32_t* pages;  // [batch] rows
    std::int64_t row_stride;     // elements
    std::int64_t width;          // columns of a row that may be read
    std::int64_t batch;
};

/// Tokens [begin[b], begin[b] + offsets[b + 1] - offsets[b]) of each sequence b, which lie one
/// sequence behind the other as tokens offsets[0] .. offsets[batch] of some contiguous memory.
struct TokenRanges {
    const std::uint32_t* begin;    // [batch]; nullptr: all 0
    const std::uint32_t* offsets;  // [batch + 1], not descending

    [[nodiscard]] std::int64_t first(std::int64_t row) const noexcept {
        return begin == nullptr ? 0 : begin[row];
    }
};

/// A token of a range that has no page: `entry` is what its column of the table says.
struct MissingPage {
    std::int64_t row = -1;  // -1: all tokens have one
    std::int64_t token = 0;
    std::uint32_t entry = 0;
};

/// Finds the first token of a range that lies beyond the table or in a page that is not one of
/// `num_pages`. O(pages of the ranges).
[[nodiscard]] MissingPage find_missing_page(const PageTable& table, const TokenRanges& ranges,
                                            std::int64_t page_size,
                                            std::int64_t num_pages) noexcept;

/// Copies tokens from `source` to the ranges' places in the pool (`blocks` of which are not read).
/// All have pages, no two the same; source and pool do not overlap. Cost: the bytes.
void append_batch(TokenShape shape, const PagedRows<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source,
                  int threads = 1);

/// Copies the ranges' tokens from the pool to `destination`; as `append_batch`.
void gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination,
                  int threads = 1);

// ---- pools of another dtype than the tokens: one pass, no temporaries ---------------------------

/// What all tokens of a pool share.
struct PageShape {
    std::int64_t page_size;  // tokens
    std::int64_t heads;
};

/// Whether an append finds a scale for each group of each token and writes it, or takes those that
/// stand in the view (one for each head, say).
enum class Scales : std::uint8_t { kFound, kGiven };

/// Writes tokens of a wide dtype to the ranges' places in a pool: quantised as by `quantize` or
/// `quantize_by`, with 1 for scales that there are none of, where the pool is narrow; to the
/// nearest where it is wide; `Scales::kFound` takes a narrow pool with scales. As `append_batch` of
/// bytes otherwise.
void append_batch(PageShape shape, const PagedTensor<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                  Scales scales, int threads = 1);

/// Reads the ranges' tokens as elements of a wide dtype, codes times their scales.
void gather_batch(PageShape shape, const PagedTensor<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                  int threads = 1);

// ---- latent rows ------------------------------------------------------------------------------

/// Appends latent rows [tokens, dim of k + dim of rope] of a wide dtype to `k` and `rope` of a
/// view, as `latent_view` of kvcore/layout.hpp gives it.
void append_latent(const PoolView<std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                   int threads = 1);

/// Reads them back, to the nearest elements of a wide dtype.
void gather_latent(const PoolView<const std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                   int threads = 1);

// Slots: page * page_size + token of the page, one for each token of a step. Engines compute them
// once per step and write every layer by them. Lengths and tables of a batch from step to step.

/// Writes the slots of the ranges' tokens, which lie one sequence behind the other, to `slots`
/// [capacity]; -1 for a token without a page and behind the last token. 0 < page_size, capacity >=
/// the tokens. O(capacity).
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int64_t* slots, std::int64_t capacity) noexcept;
/// The same, where int32 holds num_pages * page_size.
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int32_t* slots, std::int64_t capacity) noexcept;

/// Copies token i of `k` and of `v` (not read where the pool has no values) to slots[i], i < n, and
/// returns how many slots were beyond the pool; those are skipped, and so are negative ones, which
/// stand for padding. Rows may be parts of a fused QKV; they have the pool's dtype and share no
/// byte with it. Of a slot that is named twice, the bytes are those of either token, or of both
/// where threads meet. Cost: the bytes.
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int64_t* slots,
                          std::int64_t n, int threads = 1);
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int32_t* slots,
                          std::int64_t n, int threads = 1);

/// Writes lengths[i] + offsets[i + 1] - offsets[i] to advanced[i], and lengths[i] alone where
/// `active` says 0 (nullptr: all are active). `advanced` may be `lengths`. O(batch).
void advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                     const std::uint8_t* active, std::uint32_t* advanced,
                     std::int64_t batch) noexcept;

/// What an entry of a table without a page is made, which no pool has.
constexpr std::uint32_t kNoPage = 0xffffffffU;

/// The arrays of a batch that have a row for each request.
struct BatchRows {
    std::uint32_t* pages;     // [rows, columns]
    std::int64_t row_stride;  // elements
    std::int64_t columns;
    std::int64_t rows;
    std::uint32_t* lengths;  // [rows]; nullptr: none
    std::uint32_t* offsets;  // [rows + 1], of the rows' new tokens, from 0 on; nullptr: none
};

/// Moves the rows `kept` [n], n <= rows, to the front, in place and in their order. `kept` ascends;
/// the first number that does not, or that is no row, ends it. Rows behind those that stay become
/// empty: `kNoPage` in all columns, length 0, no new tokens. The arrays share no byte. Cost: the
/// bytes of the rows that move and of those that become empty.
void compact_table(const BatchRows& batch, const std::uint32_t* kept, std::int64_t n,
                   int threads = 1);

}  // namespace kvcore
