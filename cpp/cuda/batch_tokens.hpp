// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a batch stand in the pages of a pool.
#pragma once

#include <cstdint>

#include "atomics.hpp"
#include "kvcore/cuda.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// A page and a token of it; page -1: none.
struct TokenPlace {
    std::int64_t page = -1;
    std::int64_t entry = 0;
};

/// Finds the places of a batch's tokens. O(log batch) loads, which neighbours share, and one
/// division.
class BatchTokens {
   public:
    BatchTokens(const DeviceBatch& batch, std::int64_t page_size, std::int32_t* bad) noexcept
        : batch_(batch), page_size_(page_size), bad_(bad) {}

    /// The place of token `at` of the contiguous memory, 0 <= at < num_tokens. None for padding,
    /// and for a token whose page the pool does not have: where `counts`, such a one is counted.
    [[nodiscard]] KVCORE_HOST_DEVICE TokenPlace find(std::int64_t at, bool counts) const noexcept {
        const std::uint32_t* offsets = batch_.ranges.offsets;
        if (at < offsets[0] || at >= offsets[batch_.table.batch]) return {};
        const std::int64_t row = row_of(at);
        const std::uint32_t* begin = batch_.ranges.begin;
        const std::int64_t token = (begin == nullptr ? 0 : begin[row]) + at - offsets[row];
        const std::int64_t column = page_size_.quotient(token);
        const bool is_in_table = column < batch_.table.width;
        const std::int64_t page =
            is_in_table ? batch_.table.pages[row * batch_.table.row_stride + column] : 0;
        if (is_in_table && page < batch_.num_pages) {
            return {page, page_size_.remainder(token, column)};
        }
        if (counts && bad_ != nullptr) atomic_add(bad_, 1);
        return {};
    }

   private:
    // The last row that begins at a token or before it.
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t row_of(std::int64_t at) const noexcept {
        std::int64_t row = 0;
        std::int64_t end = batch_.table.batch;
        while (end - row > 1) {
            const std::int64_t middle = row + (end - row) / 2;
            if (batch_.ranges.offsets[middle] <= at) {
                row = middle;
            } else {
                end = middle;
            }
        }
        return row;
    }

    DeviceBatch batch_;
    Divider page_size_;
    std::int32_t* bad_;
};

}  // namespace kvcore::cuda
