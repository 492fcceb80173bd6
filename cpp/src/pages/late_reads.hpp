// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kvcore/types.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Reads of pages that go on after the pages were let go: a stream has them, and ends them in its
/// own time. Such pages get new owners all the same, who have to know what to write behind.
///
/// A read has a mark, a number of the caller's. Marks rise in the order in which reads end, so that
/// who waits for one waits for all up to it.
///
/// Owns: the mark of the last read of each page, and the highest of those that were handed out
/// since. Threads: none of its own; CacheManager locks around it.
/// Cost: O(1) per page. Memory is address space, touched as pages are read.
class LateReads {
   public:
    using Mark = std::uint64_t;

    /// Of pages with ids below `end`. Throws std::bad_alloc.
    explicit LateReads(std::int64_t end)
        : marks_(static_cast<Mark*>(std::calloc(static_cast<std::size_t>(end), sizeof(Mark)))) {
        if (marks_ == nullptr) throw std::bad_alloc();
    }

    /// Somebody keeps the page yet, and lets it go behind this.
    void note(BlockId page, Mark mark) noexcept { marks_[static_cast<std::size_t>(page)] = mark; }
    /// Pages [n] have a new owner.
    void take(const BlockId* pages, std::int64_t n) noexcept {
        for (std::int64_t i = 0; i < n; ++i) {
            highest_ = std::max(highest_, marks_[static_cast<std::size_t>(pages[i])]);
        }
    }
    /// Of pages that were handed out; 0 for none.
    [[nodiscard]] Mark highest() const noexcept { return highest_; }

   private:
    std::unique_ptr<Mark[], CFree> marks_;
    Mark highest_ = 0;
};

}  // namespace kvcore
