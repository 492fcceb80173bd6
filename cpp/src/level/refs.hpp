// SPDX-License-Identifier: Apache-2.0
// References that keep pages of a level from eviction for transfers and for callers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/residency.hpp"
#include "level/level.hpp"

namespace kvcore {

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

/// Keeps a prefix of a level's tree from eviction, for a transfer. Other than the pin of a request,
/// it does not keep the prefix in the cache when the caches are reset.
///
/// A transfer that reads pages gives the ids of the last pages of the prefix. A reset takes these
/// pages out of the tree, and the PrefixRef keeps them by references. A transfer that continues the
/// prefix, or waits to read it, gives no ids: its PrefixRef, a *place*, ends when the tree forgets
/// the prefix.
///
/// Owns: a pin where the prefix ends; after Level::detach_refs a reference to each of the pages
/// that no other pin protects, and a pin before these pages if there are other pages; for a place,
/// on request, a reader in the windows of the prefix. Its level lists it.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1), and O(pages) to detach and to end. Allocates nothing and never throws, except in
/// `advance`, `put` and `hold_windows`.
class PrefixRef : public RefLink {
   public:
    /// An array whose owner keeps it unchanged until the end of the PrefixRef.
    struct Pages {
        const BlockId* ids = nullptr;
        std::int64_t n = 0;

        [[nodiscard]] static Pages of(const std::vector<BlockId>& ids) noexcept {
            return {ids.data(), static_cast<std::int64_t>(ids.size())};
        }
    };

    PrefixRef() noexcept = default;
    /// Takes over a place that the caller holds: see Level.
    PrefixRef(Level& home, TreeNode* place) noexcept
        : home_(&home), node_(place), depth_(PrefixTree::depth_of(place)) {
        home.prefix_refs.add(*this);
    }
    /// Pins a place: the prefix of `at.depth` pages on the path to `at.node`.
    PrefixRef(Level& home, TreePosition at) noexcept : PrefixRef(home, at, Pages()) {}
    /// As above, for a transfer that reads `pages`, the last pages of the prefix. Window pages need
    /// a reader elsewhere.
    PrefixRef(Level& home, TreePosition at, Pages pages) noexcept
        : home_(&home), node_(at.node), depth_(at.depth), pages_(pages) {
        home.tree.pin(node_);
        home.prefix_refs.add(*this);
    }
    PrefixRef(PrefixRef&& other) noexcept { take(other); }
    PrefixRef& operator=(PrefixRef&& other) noexcept {
        if (this == &other) return *this;
        if (home_ != nullptr) end();
        take(other);
        return *this;
    }
    ~PrefixRef() {
        if (home_ != nullptr) end();
    }

    /// True if the tree has pages of the prefix that are kept here.
    [[nodiscard]] explicit operator bool() const noexcept { return node_ != nullptr; }
    /// The end of the part that the tree has.
    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    /// Pages of the prefix, without pages that are kept by references.
    [[nodiscard]] std::int32_t depth() const noexcept { return depth_; }
    [[nodiscard]] TreePosition at() const noexcept { return {node_, depth_}; }
    /// The last of the pages, which the tree no longer has.
    [[nodiscard]] Pages references() const noexcept { return references_; }
    /// True if the tree forgot the prefix meanwhile.
    [[nodiscard]] bool is_forgotten() const noexcept {
        return node_ != nullptr &&
               PrefixTree::is_forgotten(PrefixTree::position(node_, depth_).node);
    }

    /// Also keeps the windows that a hit of `tokens` tokens reads, until `end_windows`. Throws
    /// std::bad_alloc.
    void hold_windows(std::int64_t tokens) { windows_ = WindowHold(*home_, at(), tokens); }
    void end_windows() noexcept { windows_.reset(); }
    /// Ends the reference, which does not count as a use of the pages.
    void end() noexcept { end_with(false); }
    /// Ends the reference after a use of the pages.
    void end_use() noexcept { end_with(true); }
    /// Ends a place after a use: see Level::release.
    void release() noexcept {
        if (node_ == nullptr) return end();
        Level& home = *home_;
        TreeNode* const node = node_;
        end_use();
        home.tree.shrink(node);
    }

    /// Moves a place forward over cached pages that continue it by `tokens` [n]. If it throws
    /// std::bad_alloc, nothing has changed.
    void advance(const TokenId* tokens, std::int64_t n) {
        move_to(home_->advance(node_, tokens, n));
    }
    /// Puts taken pages [n] into the tree after the place, and moves the place to their end: see
    /// Level::put. Throws as `advance`.
    void put(const TokenId* tokens, const BlockId* ids, std::int32_t n,
             std::vector<DuplicatePage>& duplicates, const Retention& retention) {
        move_to(home_->put(node_, tokens, ids, n, duplicates, retention));
    }

    /// The two halves of Level::detach_refs.
    void detach() noexcept {
        if (node_ == nullptr) return;
        if (pages_.n == 0) return end();
        TreeNode* pinned = node_;
        node_ = PrefixTree::position(pinned, depth_).node;
        if (PrefixTree::is_forgotten(node_)) {
            refer_to_last(depth_ - PrefixTree::findable_depth(node_));
        }
        home_->tree.unpin(pinned, false);
    }
    void reattach() noexcept {
        if (node_ == nullptr) return;
        const std::int64_t gone = refer_to_last(home_->tree.num_unprotected(at()));
        home_->uncache(references_.ids, gone);
        if (node_ != nullptr) home_->tree.pin(node_);
    }
    /// Ends a place if the tree forgot it.
    void drop_forgotten() noexcept {
        if (pages_.n == 0 && is_forgotten()) end();
    }

   private:
    void move_to(TreeNode* place) noexcept {
        node_ = place;
        depth_ = PrefixTree::depth_of(place);
    }
    void take(PrefixRef& other) noexcept {
        replace(other);
        home_ = std::exchange(other.home_, nullptr);
        node_ = std::exchange(other.node_, nullptr);
        depth_ = other.depth_;
        pages_ = std::exchange(other.pages_, {});
        references_ = std::exchange(other.references_, {});
        windows_ = std::move(other.windows_);
    }
    void end_with(bool touch) noexcept;
    // Takes references to the last `gone` of the pages in the tree, and continues with the pages
    // before them. Returns the number of these pages.
    std::int64_t refer_to_last(std::int64_t gone) noexcept {
        const std::int64_t pinned = pages_.n - references_.n;
        gone = std::min(gone, pinned);
        references_ = {pages_.ids + (pinned - gone), references_.n + gone};
        if (gone > 0) home_->pool.share(references_.ids, gone);
        depth_ -= static_cast<std::int32_t>(gone);
        node_ = gone < pinned ? PrefixTree::position(node_, depth_).node : nullptr;
        return gone;
    }

    Level* home_ = nullptr;     // nullptr: holds nothing
    TreeNode* node_ = nullptr;  // nullptr: the tree has no page that is kept here
    std::int32_t depth_ = 0;
    Pages pages_;
    Pages references_;
    WindowHold windows_;
};

}  // namespace kvcore
