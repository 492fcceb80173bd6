// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvcore/types.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Reads that continue after their pages were released: a stream has queued them and ends them
/// later. The pages still get new owners, which must write after these reads.
///
/// A read has a mark, a number from the caller. Marks rise in the order in which reads end: a
/// caller that waits for a read waits for all reads up to its mark.
///
/// Owns: the mark of the last read of each page, and the highest mark of pages that got new owners.
/// Threads: not thread-safe; CacheManager locks around it.
/// Cost: O(1) per page. Memory is address space, touched as pages are read.
class LateReads {
   public:
    using Mark = std::uint64_t;

    /// For pages with ids below `end`. Throws std::bad_alloc.
    explicit LateReads(std::int64_t end) : marks_(static_cast<std::size_t>(end)) {}

    /// Notes a read of a page. The page is still held, and is released after this call.
    void note(BlockId page, Mark mark) noexcept { marks_[static_cast<std::size_t>(page)] = mark; }
    /// Pages [n] have a new owner.
    void take(const BlockId* pages, std::int64_t n) noexcept {
        for (std::int64_t i = 0; i < n; ++i) {
            highest_ = std::max(highest_, marks_[static_cast<std::size_t>(pages[i])]);
        }
    }
    /// The highest mark of pages that got new owners; 0 if no read of them was noted.
    [[nodiscard]] Mark highest() const noexcept { return highest_; }

   private:
    ZeroedArray<Mark> marks_;
    Mark highest_ = 0;
};

}  // namespace kvcore
