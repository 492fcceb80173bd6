// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "level/level.hpp"

namespace kvcore {

struct Replica;

/// Keeps one page of a level, or one column, from getting another owner while it is copied, or
/// while a caller holds it by its id.
///
/// Owns: a reference to a page that sequences hold or, for a page of the tree, a pin on its run;
/// for a column also a reader in all its windows. Its level lists it.
/// Invariant: the page is not free, not evicted and not handed out until the end of the PageRef.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1). Allocates no memory and never throws.
class PageRef : public RefLink {
   public:
    PageRef() noexcept = default;
    /// Adds a reference to a page that a sequence holds.
    [[nodiscard]] static PageRef share(Level& home, BlockId column) noexcept {
        home.pool.share(&column, 1);
        return adopt(home, column);
    }
    /// Takes over the reference that a holder gives up.
    [[nodiscard]] static PageRef adopt(Level& home, BlockId column) noexcept {
        PageRef ref;
        ref.home_ = &home;
        ref.column_ = column;
        home.page_refs.add(ref);
        home.enter(column);
        return ref;
    }
    /// Pins the last page on the path to `at`, a page of the tree.
    [[nodiscard]] static PageRef pin(Level& home, TreePosition at, BlockId column) noexcept {
        PageRef ref = adopt(home, column);
        ref.become_pin(at);
        return ref;
    }
    PageRef(PageRef&& other) noexcept { take(other); }
    PageRef& operator=(PageRef&& other) noexcept {
        if (this == &other) return *this;
        end();
        take(other);
        return *this;
    }
    ~PageRef() { end(); }

    /// The id in the pool and in the tree.
    [[nodiscard]] BlockId column() const noexcept { return column_; }
    /// The page of the column that a caller holds by its id; -1 for copies, which hold the column.
    [[nodiscard]] BlockId page() const noexcept { return page_; }
    void set_page(BlockId page) noexcept { page_ = page; }
    /// True if the PageRef counts among the references of the column.
    [[nodiscard]] bool is_reference() const noexcept {
        return home_ != nullptr && at_.node == nullptr;
    }
    /// The position of the page in the tree; no node if the PageRef is a reference.
    [[nodiscard]] TreePosition at() const noexcept { return at_; }

    /// The tree now has the column, as the last column on the path to `at`: the reference becomes a
    /// pin.
    void move_to_tree(TreePosition at) noexcept {
        home_->pool.free(&column_, 1);
        become_pin(at);
    }
    /// Pages moved from the column to column `to`. Follows the held page if it moved. The tree has
    /// `to` as the last column on the path to `at`; if `at` has no node, takes a reference to `to`.
    void follow(BlockId to, TreePosition at) noexcept {
        bool has_moved = false;
        home_->for_each_page(to, [&](BlockId each) { has_moved |= each == page_; });
        if (!has_moved) return;
        PageRef moved = at.node != nullptr ? pin(*home_, at, to) : share(*home_, to);
        moved.set_page(page_);
        *this = std::move(moved);
    }

    /// The two halves of Level::detach_refs. Afterwards, the PageRef is a pin only if another pin
    /// protects the page. Otherwise it is a reference, which keeps the page after it leaves the
    /// tree. A pin on a forgotten page would keep the pages before it.
    void detach() noexcept {
        if (at_.node == nullptr) return;
        TreeNode* pinned = at_.node;
        at_ = PrefixTree::position(pinned, at_.depth);  // the run may have been cut
        if (PrefixTree::is_forgotten(at_.node)) {
            home_->pool.share(&column_, 1);
            at_ = {};
        }
        home_->tree.unpin(pinned, false);
    }
    void reattach() noexcept {
        if (at_.node == nullptr) return;
        if (home_->tree.is_protected(at_)) {
            home_->tree.pin(at_.node);
        } else {
            home_->pool.share(&column_, 1);
            home_->uncache(&column_, 1);
            at_ = {};
        }
    }

   private:
    void become_pin(TreePosition at) noexcept {
        at_ = PrefixTree::position(at.node, at.depth);
        home_->tree.pin(at_.node);
    }
    void take(PageRef& other) noexcept {
        replace(other);
        home_ = std::exchange(other.home_, nullptr);
        at_ = std::exchange(other.at_, {});
        column_ = other.column_;
        page_ = other.page_;
    }
    void end() noexcept {
        if (home_ == nullptr) return;
        unlink();
        home_->leave(column_, at_);
        if (at_.node != nullptr) {
            home_->tree.unpin(at_.node, false);
        } else {
            home_->pool.free(&column_, 1);
        }
        home_ = nullptr;
    }

    Level* home_ = nullptr;  // nullptr: holds nothing
    TreePosition at_;
    BlockId column_ = 0;
    BlockId page_ = -1;
};

/// Holds pages [n] by their ids. O(pages), and O(cached pages) if the tree has some of the pages.
/// Throws InvalidHandleError for an id that is not a page of the replica, or is a free page;
/// CapacityError if quotas leave no room to hold the pages; std::bad_alloc. If it throws, nothing
/// has changed.
[[nodiscard]] std::vector<PageRef> hold_pages(Replica& home, const BlockId* pages, std::int64_t n);

}  // namespace kvcore
