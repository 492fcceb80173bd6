// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "level/level.hpp"

namespace kvcore {

/// Keeps one page of a level, or one column, from getting another owner while it is copied.
///
/// Owns: a reference to a page that sequences hold or, for a page of the tree, a pin on its run;
/// for a column also a reader in all its windows.
/// Invariant: the page is not free, not evicted and not handed out until the hold ends.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1). Allocates no memory and never throws.
class PageHold {
   public:
    PageHold() noexcept = default;
    /// Adds a reference to a page that a sequence holds.
    [[nodiscard]] static PageHold share(Level& home, BlockId page) noexcept {
        home.pool.share(&page, 1);
        return adopt(home, page);
    }
    /// Takes over the reference that a holder gives up.
    [[nodiscard]] static PageHold adopt(Level& home, BlockId page) noexcept {
        PageHold hold;
        hold.home_ = &home;
        hold.page_ = page;
        home.enter(page);
        return hold;
    }
    /// Pins the last page on the path to `at`, a page of the tree.
    [[nodiscard]] static PageHold pin(Level& home, TreePosition at, BlockId page) noexcept {
        PageHold hold = adopt(home, page);
        hold.become_pin(at);
        return hold;
    }
    PageHold(PageHold&& other) noexcept
        : home_(std::exchange(other.home_, nullptr)),
          at_(std::exchange(other.at_, {})),
          page_(other.page_) {}
    PageHold& operator=(PageHold&& other) noexcept {
        PageHold moved(std::move(other));
        std::swap(home_, moved.home_);
        std::swap(at_, moved.at_);
        std::swap(page_, moved.page_);
        return *this;
    }
    ~PageHold() { reset(); }

    [[nodiscard]] BlockId page() const noexcept { return page_; }
    /// True if the hold counts among the page's references.
    [[nodiscard]] bool is_reference() const noexcept {
        return home_ != nullptr && at_.node == nullptr;
    }
    /// The position of the page in the tree; no node if the hold is a reference.
    [[nodiscard]] TreePosition at() const noexcept { return at_; }

    /// The tree now has the page, as the last page on the path to `at`: the reference becomes a
    /// pin.
    void move_to_tree(TreePosition at) noexcept {
        home_->pool.free(&page_, 1);
        become_pin(at);
    }
    /// Moves the hold to `column`, which now has the page. The tree has that column as the last
    /// column on the path to `at`; if `at` has no node, the hold takes a reference to the column.
    void move_to_column(BlockId column, TreePosition at) noexcept {
        *this = at.node != nullptr ? pin(*home_, at, column) : share(*home_, column);
    }
    /// Call `detach_from_tree` before the tree forgets unused pages, because a copy does not count
    /// as a use, and `reattach` after all holds are detached. `reattach` pins a page again if
    /// another pin still protects it. Otherwise the hold takes a reference, which keeps the page
    /// after it leaves the tree. For a forgotten page `detach_from_tree` also takes a reference: a
    /// pin would keep the pages before it.
    void detach_from_tree() noexcept {
        if (at_.node == nullptr) return;
        TreeNode* pinned = at_.node;
        at_ = PrefixTree::position(pinned, at_.depth);  // the run may have been cut
        if (PrefixTree::is_forgotten(at_.node)) {
            home_->pool.share(&page_, 1);
            at_ = {};
        }
        home_->tree.unpin(pinned, false);
    }
    void reattach() noexcept {
        if (at_.node == nullptr) return;
        if (home_->tree.is_protected(at_)) {
            home_->tree.pin(at_.node);
        } else {
            home_->pool.share(&page_, 1);
            home_->uncache(&page_, 1);
            at_ = {};
        }
    }

   private:
    void become_pin(TreePosition at) noexcept {
        at_ = PrefixTree::position(at.node, at.depth);
        home_->tree.pin(at_.node);
    }
    void reset() noexcept {
        if (home_ == nullptr) return;
        home_->leave(page_, at_);
        if (at_.node != nullptr) {
            home_->tree.unpin(at_.node, false);
        } else {
            home_->pool.free(&page_, 1);
        }
        home_ = nullptr;
    }

    Level* home_ = nullptr;  // nullptr: holds nothing
    TreePosition at_;
    BlockId page_ = 0;
};

/// As PageHold, for the last pages of a prefix in a tree: the pages of a store or a load.
///
/// Owns: a pin where the prefix ends. After `reattach`: a reference to each page that no other pin
/// protects, and a pin before these pages if there are other pages.
/// Threads, cost: as PageHold; O(pages) to detach, reattach and end.
class PathHold {
   public:
    PathHold() noexcept = default;
    /// Holds the pages or columns at the end of the prefix of `depth` pages on the path to `node`.
    /// Window pages need a reader elsewhere.
    PathHold(Level& home, TreeNode* node, std::int32_t depth) noexcept
        : home_(&home), node_(node), depth_(depth) {
        home.tree.pin(node);
    }
    PathHold(PathHold&& other) noexcept
        : home_(other.home_),
          node_(std::exchange(other.node_, nullptr)),
          depth_(other.depth_),
          references_(std::exchange(other.references_, {})) {}
    PathHold& operator=(PathHold&& other) noexcept {
        PathHold moved(std::move(other));
        std::swap(home_, moved.home_);
        std::swap(node_, moved.node_);
        std::swap(depth_, moved.depth_);
        std::swap(references_, moved.references_);
        return *this;
    }
    ~PathHold() { end(false); }

    /// The end of the part that the tree has.
    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    /// The end of the prefix, until `reattach`.
    [[nodiscard]] std::int32_t depth() const noexcept { return depth_; }
    /// Pages that are held by references: the last pages given to `reattach`.
    struct Pages {
        const BlockId* ids = nullptr;
        std::int64_t n = 0;
    };
    [[nodiscard]] Pages references() const noexcept { return references_; }

    /// Ends the hold. `touch`: counts as a use of the pages.
    void end(bool touch) noexcept {
        if (TreeNode* node = std::exchange(node_, nullptr)) home_->tree.unpin(node, touch);
        const Pages pages = std::exchange(references_, {});
        if (pages.n > 0) home_->pool.free(pages.ids, pages.n);
    }
    /// As in PageHold. `pages` [n]: the last pages of the prefix; the array must stay valid until
    /// the hold ends.
    void detach_from_tree(const BlockId* pages, std::int64_t n) noexcept {
        if (node_ == nullptr) return;
        TreeNode* pinned = node_;
        node_ = PrefixTree::position(pinned, depth_).node;
        if (PrefixTree::is_forgotten(node_)) {
            refer_to_last(pages, n, depth_ - PrefixTree::findable_depth(node_));
        }
        home_->tree.unpin(pinned, false);
    }
    void reattach(const BlockId* pages, std::int64_t n) noexcept {
        if (node_ == nullptr) return;
        const std::int64_t gone =
            refer_to_last(pages, n, home_->tree.num_unprotected({node_, depth_}));
        home_->uncache(references_.ids, gone);
        if (node_ != nullptr) home_->tree.pin(node_);
    }

    /// True if the tree forgot the held pages meanwhile.
    [[nodiscard]] bool is_forgotten() const noexcept {
        return node_ != nullptr &&
               PrefixTree::is_forgotten(PrefixTree::position(node_, depth_).node);
    }

   private:
    // Takes references to the last `gone` of its pinned pages, and continues with the pages before
    // them. Returns the number of these pages.
    std::int64_t refer_to_last(const BlockId* pages, std::int64_t n, std::int64_t gone) noexcept {
        const std::int64_t pinned = n - references_.n;
        gone = std::min(gone, pinned);
        references_ = {pages + (pinned - gone), references_.n + gone};
        if (gone > 0) home_->pool.share(references_.ids, gone);
        depth_ -= static_cast<std::int32_t>(gone);
        node_ = gone < pinned ? PrefixTree::position(node_, depth_).node : nullptr;
        return gone;
    }

    Level* home_ = nullptr;
    TreeNode* node_ = nullptr;  // nullptr: no held page is in the tree
    std::int32_t depth_ = 0;    // of the part in the tree
    Pages references_;
};

}  // namespace kvcore
