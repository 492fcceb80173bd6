// SPDX-License-Identifier: Apache-2.0
// The tokens of a batch, moved between contiguous memory and the pages of its sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/paged_rows.hpp"
#include "kvcore/pool_view.hpp"

namespace kvcore {

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

// ---- the 656-byte row of latent caches ----------------------------------------------------------

/// Latent rows of 576 elements in 656 bytes: 512 codes of e4m3fn, a float scale for each 128 of
/// them, and the 64 elements that positions rotate as bfloat16.
constexpr std::int64_t kLatentFp8Bytes = 656;

/// Such rows [pages, page_size, 656] as a view. Strides count bytes and are multiples of 4, as is
/// the address.
template <class Byte>
[[nodiscard]] constexpr PoolView<Byte> latent_fp8_view(Byte* rows, std::int64_t pages,
                                                       std::int64_t page_size,
                                                       std::int64_t page_stride,
                                                       std::int64_t token_stride) noexcept {
    constexpr std::int64_t kCodes = 512;
    constexpr std::int64_t kGroup = 128;
    constexpr std::int64_t kScales = kCodes / kGroup * 4;
    PoolView<Byte> view;
    view.pages = pages;
    view.page_size = page_size;
    view.heads = 1;
    view.k = {rows,
              DType::kFloat8E4M3FN,
              kCodes,
              page_stride,
              token_stride,
              0,
              {rows + kCodes, page_stride, token_stride, 0, kGroup}};
    view.rope = {rows + kCodes + kScales, DType::kBFloat16, 64, page_stride, token_stride, 0, {}};
    return view;
}

/// Appends latent rows [tokens, dim of k + dim of rope] of a wide dtype to `k` and `rope` of a
/// view.
void append_latent(const PoolView<std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                   int threads = 1);

/// Reads them back, to the nearest elements of a wide dtype.
void gather_latent(const PoolView<const std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                   int threads = 1);

}  // namespace kvcore
