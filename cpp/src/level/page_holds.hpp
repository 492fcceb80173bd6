// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "level/page_hold.hpp"
#include "level/replica.hpp"
#include "support/make_room.hpp"

namespace kvcore {

/// The pages of one HeldPages.
///
/// Owns: a hold on each of their columns. Threads: none of its own; CacheManager locks around it.
/// Cost: O(pages); to begin, O(cached pages) where some of them are cached.
class PageSet {
   public:
    /// Throws InvalidHandleError for an id that is no page's, or a free page's; CapacityError where
    /// quotas leave no room for what would be held; std::bad_alloc. Nothing has changed then.
    PageSet(Replica& home, const BlockId* pages, std::int64_t n);

    [[nodiscard]] const Replica& home() const noexcept { return *home_; }
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept { return pages_; }
    [[nodiscard]] const std::vector<PageHold>& holds() const noexcept { return holds_; }
    [[nodiscard]] std::vector<PageHold>& holds() noexcept { return holds_; }
    /// See PageHolds.
    void follow(BlockId from, BlockId to, TreePosition at) noexcept;

   private:
    void require_lawful();

    Replica* home_;
    std::vector<BlockId> pages_;
    std::vector<PageHold> holds_;  // of each, or of its column
};

/// All of a manager.
///
/// Owns: none of them: they belong to who holds. Threads: none of its own. Cost: O(pages held).
class PageHolds {
   public:
    [[nodiscard]] bool empty() const noexcept { return sets_.empty(); }
    [[nodiscard]] const std::vector<PageSet*>& all() const noexcept { return sets_; }

    /// So that one more can be added. Throws std::bad_alloc.
    void make_room() { kvcore::make_room(sets_, 1); }
    void add(PageSet& one) noexcept { sets_.push_back(&one); }
    void remove(const PageSet& one) noexcept {
        sets_.erase(std::find(sets_.begin(), sets_.end(), &one));
    }

    /// A page that is held by references is the tree's from now on, the last on the way to `at`.
    void move_to_tree(const Replica& home, BlockId column, TreePosition at) noexcept {
        for (PageSet* set : sets_) {
            if (&set->home() != &home) continue;
            for (PageHold& hold : set->holds()) {
                if (hold.is_reference() && hold.page() == column) hold.move_to_tree(at);
            }
        }
    }
    /// Pages moved from a column to another one: the holds on these pages follow them. See
    /// PageHold::move_to_column.
    void follow(const Replica& home, BlockId from, BlockId to, TreePosition at) noexcept {
        for (PageSet* set : sets_) {
            if (&set->home() == &home) set->follow(from, to, at);
        }
    }
    /// Around what forgets all that nobody uses: see PageHold.
    void loosen() noexcept {
        for (PageSet* set : sets_) {
            for (PageHold& hold : set->holds()) hold.loosen();
        }
    }
    void fasten() noexcept {
        for (PageSet* set : sets_) {
            for (PageHold& hold : set->holds()) hold.fasten();
        }
    }

   private:
    std::vector<PageSet*> sets_;
};

}  // namespace kvcore
