// SPDX-License-Identifier: Apache-2.0
// Cuts the token ranges of a batch into parts with equal numbers of tokens, one part for each
// thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcore/paged_batch.hpp"
#include "support/parallel.hpp"

namespace kvcore {

/// The pages of a row. Ids are not negative, so int32 and uint32 share their bytes.
[[nodiscard]] inline const BlockId* pages_of(const PageTable& table, std::int64_t row) noexcept {
    return reinterpret_cast<const BlockId*>(table.pages + row * table.row_stride);
}

/// The tokens of one thread: some tokens of a first row, all tokens of the rows after it, and some
/// tokens of a last row.
class RangePart {
   public:
    RangePart(const PageTable& table, const TokenRanges& ranges, std::int64_t begin,
              std::int64_t end) noexcept
        : ranges_(ranges),
          last_(ranges.offsets + table.batch),
          begin_(*ranges.offsets + begin),
          end_(*ranges.offsets + end) {}

    /// Calls move(row, token of its sequence, token of the contiguous memory, tokens).
    template <class Move>
    void for_each(const Move& move) const {
        const std::uint32_t* offsets = ranges_.offsets;
        std::int64_t row = std::upper_bound(offsets, last_ + 1, begin_) - offsets - 1;
        for (std::int64_t at = begin_; at < end_; ++row) {
            const std::int64_t count = std::min<std::int64_t>(offsets[row + 1], end_) - at;
            if (count > 0) move(row, ranges_.first(row) + at - offsets[row], at, count);
            at += std::max<std::int64_t>(0, count);
        }
    }

   private:
    const TokenRanges& ranges_;
    const std::uint32_t* last_;
    std::int64_t begin_;
    std::int64_t end_;
};

/// Calls work(RangePart) on each thread.
template <class Work>
void for_each_part(const PageTable& table, const TokenRanges& ranges, std::int64_t token_bytes,
                   int threads, const Work& work) {
    const std::int64_t total = std::int64_t{ranges.offsets[table.batch]} - *ranges.offsets;
    cpu::parallel_for(
        total, cpu::worth_a_thread(token_bytes), threads,
        [&](std::int64_t begin, std::int64_t end) { work(RangePart(table, ranges, begin, end)); });
}

}  // namespace kvcore
