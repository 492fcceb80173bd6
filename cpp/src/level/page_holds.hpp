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
/// Owns: a hold on each of their columns. Threads: no locks of its own; CacheManager locks around
/// it.
/// Cost: O(pages); to construct, O(cached pages) if some of the pages are cached.
class PageSet {
   public:
    /// Throws InvalidHandleError for an id that is not a page of the replica, or is a free page;
    /// CapacityError if quotas leave no room to hold the pages; std::bad_alloc. If it throws,
    /// nothing has changed.
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
    std::vector<PageHold> holds_;  // for each page, on it or on its column
};

/// All PageSets of a manager.
///
/// Owns: no PageSet: their holders own them. Threads: no locks of its own. Cost: O(pages held).
class PageHolds {
   public:
    [[nodiscard]] bool empty() const noexcept { return sets_.empty(); }
    [[nodiscard]] const std::vector<PageSet*>& all() const noexcept { return sets_; }

    /// Makes room for one more PageSet. Throws std::bad_alloc.
    void make_room() { kvcore::make_room(sets_, 1); }
    void add(PageSet& one) noexcept { sets_.push_back(&one); }
    void remove(const PageSet& one) noexcept {
        sets_.erase(std::find(sets_.begin(), sets_.end(), &one));
    }

    /// The tree now has a page that is held by references, as the last page on the path to `at`.
    void move_to_tree(const Replica& home, BlockId column, TreePosition at) noexcept {
        for (PageSet* set : sets_) {
            if (&set->home() != &home) continue;
            for (PageHold& hold : set->holds()) {
                if (hold.is_reference() && hold.page() == column) hold.move_to_tree(at);
            }
        }
    }
    /// Pages moved from one column to another column: the holds on these pages follow them. See
    /// PageHold::move_to_column.
    void follow(const Replica& home, BlockId from, BlockId to, TreePosition at) noexcept {
        for (PageSet* set : sets_) {
            if (&set->home() == &home) set->follow(from, to, at);
        }
    }
    /// Call these before and after the tree forgets unused pages: see PageHold.
    void detach_from_tree() noexcept {
        for (PageSet* set : sets_) {
            for (PageHold& hold : set->holds()) hold.detach_from_tree();
        }
    }
    void reattach() noexcept {
        for (PageSet* set : sets_) {
            for (PageHold& hold : set->holds()) hold.reattach();
        }
    }

   private:
    std::vector<PageSet*> sets_;
};

}  // namespace kvcore
