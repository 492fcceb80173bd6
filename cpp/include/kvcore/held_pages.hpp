// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

/// Pages that CacheManager::hold keeps as they are for somebody who reads or writes them.
///
/// Owns: a hold on each: whoever releases it, it is not handed out again, and while it is cached
/// not evicted. Where the caches are reset and nobody else has it, it is found no more, but stays
/// until it is let go. Letting go is no use of a page, and dropping it lets go too.
/// Threads: one at a time; the manager, which must outlive it, may be used by others.
/// Cost: O(pages) to let go, under the manager's mutex.
class HeldPages {
   public:
    /// Holds nothing.
    HeldPages() noexcept;
    HeldPages(HeldPages&& other) noexcept;
    HeldPages& operator=(HeldPages&& other) noexcept;
    ~HeldPages();

    /// As they were asked for.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;
    /// Lets the pages go. Throws InvalidHandleError where that was done before.
    void let_go();

   private:
    friend class CacheManager;
    struct Held;

    explicit HeldPages(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

}  // namespace kvcore
