// SPDX-License-Identifier: Apache-2.0
// Finds the places of a batch's tokens in the pages of a pool.
#pragma once

#include <cstdint>

#include "atomics.hpp"
#include "kvcore/cuda.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// A page and a token of the page. Page -1: no place.
struct TokenPlace {
    std::int64_t page = -1;
    std::int64_t entry = 0;
};

/// Finds the places of a batch's tokens. Loads that depend on each other are the largest cost:
/// there are two rounds of such loads if all rows have the same length, and O(log8 batch) more
/// rounds if not.
class BatchTokens {
   public:
    BatchTokens(const DeviceBatch& batch, std::int64_t page_size, std::int32_t* bad) noexcept
        : batch_(batch),
          num_tokens_(batch.num_tokens < 1 ? 1 : batch.num_tokens),
          page_size_(page_size),
          bad_(bad) {}

    /// Returns the place of token `at` of the contiguous memory, 0 <= at < num_tokens. Padding has
    /// no place. A token whose page is not in the pool has no place; it is counted if `counts`.
    [[nodiscard]] KVCORE_HOST_DEVICE TokenPlace find(std::int64_t at, bool counts) const noexcept {
        if (batch_.table.batch == 0) return {};
        Row row = row_at(guess(at));
        if (at < row.first || at >= row.end) {
            const std::int64_t last = last_begun(at);
            if (last == batch_.table.batch) return {};
            row = row_at(last);
            if (at < row.first || at >= row.end) return {};
        }
        const std::int64_t token = row.begin + at - row.first;
        const std::int64_t column = page_size_.quotient(token);
        const bool is_in_table = column < batch_.table.width;
        const std::int64_t page =
            is_in_table ? batch_.table.pages[row.index * batch_.table.row_stride + column] : 0;
        if (is_in_table && page < batch_.num_pages) {
            return {page, page_size_.remainder(token, column)};
        }
        if (counts && bad_ != nullptr) atomic_add(bad_, 1);
        return {};
    }

   private:
    // A row: its index, its tokens [first, end) of the contiguous memory, and the position of token
    // `first` in the row.
    struct Row {
        std::int64_t index;
        std::int64_t first;
        std::int64_t end;
        std::int64_t begin;
    };
    [[nodiscard]] KVCORE_HOST_DEVICE Row row_at(std::int64_t index) const noexcept {
        const std::uint32_t* begin = batch_.ranges.begin;
        return {index, batch_.ranges.offsets[index], batch_.ranges.offsets[index + 1],
                begin == nullptr ? 0 : begin[index]};
    }
    // Returns the row of a token, if all rows have the same length.
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t guess(std::int64_t at) const noexcept {
        const std::int64_t last = batch_.table.batch - 1;
        const std::int64_t row = num_tokens_.quotient(at * batch_.table.batch);
        return row < last ? row : last;
    }
    // Returns the last row that begins at or before a token, or row 0; returns the number of rows
    // if the token is after all rows. Each step loads eight offsets at once, which bound eight
    // parts of the remaining rows.
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t last_begun(std::int64_t at) const noexcept {
        constexpr std::int64_t kParts = 8;
        std::int64_t row = 0;
        std::int64_t end = batch_.table.batch;
        while (end - row > 1) {
            const std::int64_t part = (end - row + kParts - 1) / kParts;
            std::int64_t begun = row;
            for (std::int64_t i = 1; i <= kParts; ++i) {
                const std::int64_t next = row + i * part;
                if (batch_.ranges.offsets[next < end ? next : end] <= at) begun += part;
            }
            if (begun >= end) return batch_.table.batch;
            row = begun;
            end = row + part < end ? row + part : end;
        }
        return row;
    }

    DeviceBatch batch_;
    Divider num_tokens_;
    Divider page_size_;
    std::int32_t* bad_;
};

}  // namespace kvcore::cuda
