// SPDX-License-Identifier: Apache-2.0
// The tokens of a batch, moved between contiguous memory and the pages of its sequences.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/paged_rows.hpp"

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

}  // namespace kvcore
