// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvcore/errors.hpp"
#include "kvcore/prefix_tree.hpp"
#include "pages/protection_listener.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// The pages of a tree that pins protect. A pin on a node protects its run and all runs above it.
///
///     root --- A (2 pages) --- B (3) --- C (1)    C is pinned
///                          \-- D (4) --- E (5)    D is pinned twice, E not
///
///     protectors(node) = (1 if the node is pinned) + number of its children with protectors
///     A 2, B 1, C 1, D 1, E 0: a run with protectors is protected, 10 pages; 5 are evictable
///
/// A pin changes the counts of the nodes above it only as far as a count changes between 0 and 1.
/// The changes are deferred: between two queries a request pins and unpins several times, and often
/// the counts end unchanged. Nodes whose pins changed are listed here until the next query, or
/// until the list is full.
///
/// Owns: the sum of protected pages and the list of unsettled nodes. The counts are in the nodes.
/// Invariant: after `settle`, `protectors` of each node is as above, and the sum counts the pages
/// of all protected nodes.
/// Threads: as the tree.
/// Cost: `pin`, `unpin`, `grow`, `split` O(1). A query settles the listed nodes: for each node, it
/// visits the nodes above up to the first that stays protected. Allocates nothing.
class Protection {
   public:
    explicit Protection(std::int32_t page_size) noexcept : page_size_(page_size) {}

    /// Sets the listener that is called from now on; nullptr: no listener. Pages that are added to
    /// a protected run are protected without a call.
    void set_listener(ProtectionListener* listener) noexcept { listener_ = listener; }
    /// Adds a pin to a node.
    void pin(TreeNode* node) noexcept {
        if (node->pins++ == 0) wait(node);
    }
    /// Removes a pin from a pinned node.
    void unpin(TreeNode* node) noexcept {
        if (--node->pins == 0) wait(node);
    }
    /// Counts `n` pages that were added to a run.
    void grow(const TreeNode* node, std::int32_t n) noexcept {
        if (node->protectors > 0) num_protected_ += n;
    }
    /// Sets the count of `upper`, the new parent of `lower`, which took the first pages of `lower`.
    static void split(TreeNode* upper, const TreeNode* lower) noexcept {
        upper->protectors = lower->protectors > 0 ? 1 : 0;
    }

    /// Updates the counts for all unsettled nodes.
    void settle() noexcept { listener_ == nullptr ? settle_all<false>() : settle_all<true>(); }
    /// Returns the number of protected pages.
    [[nodiscard]] std::int64_t num_protected() noexcept {
        settle();
        return num_protected_;
    }
    [[nodiscard]] bool is_protected(const TreeNode* node) noexcept {
        settle();
        return node->protectors > 0;
    }
    /// Returns the depth at which the protected part of the path to `node` ends, in pages.
    [[nodiscard]] std::int32_t protected_depth(const TreeNode* node) noexcept {
        settle();
        while (!node->is_root() && node->protectors == 0) node = node->parent;
        return node->end();
    }

    /// Throws IntegrityError unless the count of a settled node is right. `protected_children`: the
    /// number of its protected children.
    static void check_node(const TreeNode* node, std::uint32_t protected_children) {
        const std::uint32_t pinned = node->pins > 0 ? 1 : 0;
        detail::require_law(node->is_root() || node->protectors == pinned + protected_children,
                            "prefix tree: protection is counted");
    }

   private:
    static constexpr std::size_t kMaxUnsettled = 512;

    // A template, because most trees have no listener and settle at each reservation.
    template <bool kTells>
    void settle_all() noexcept {
        for (std::size_t i = 0; i < num_unsettled_; ++i) {
            TreeNode* node = unsettled_[i];
            node->is_unsettled = false;
            const bool pinned = node->pins > 0;
            if (pinned == node->is_settled_pin) continue;
            node->is_settled_pin = pinned;
            for (; !node->is_root(); node = node->parent) {
                if (pinned ? node->protectors++ != 0 : --node->protectors != 0) break;
                num_protected_ += pinned ? node->num_pages : -node->num_pages;
                if (kTells) listener_->protect(node->ids(page_size_), node->num_pages, pinned);
            }
        }
        num_unsettled_ = 0;
    }
    // Lists a node as unsettled, unless it is a root: roots have no pages to protect.
    void wait(TreeNode* node) noexcept {
        if (node->is_unsettled || node->is_root()) return;
        if (num_unsettled_ == kMaxUnsettled) settle();
        unsettled_[num_unsettled_++] = node;
        node->is_unsettled = true;
    }

    ProtectionListener* listener_ = nullptr;
    std::int32_t page_size_;  // tokens
    std::int64_t num_protected_ = 0;
    std::size_t num_unsettled_ = 0;
    std::array<TreeNode*, kMaxUnsettled> unsettled_;
};

/// A pin on a node of a tree, given back at the end of its scope. A call holds it until nothing can
/// fail any more; a sequence holds it for its lifetime.
///
/// Owns: the pin, or nothing. The tree outlives it.
/// Invariant: while it has a node, the node is pinned once for it. `reset` does not count as a use
/// of the pages, so a failed call does not change the eviction order.
/// Threads: as the tree.
/// Cost: as `pin` and `unpin`. Allocates nothing and never throws.
class TreePin {
   public:
    TreePin() noexcept = default;
    /// Pins a node of the tree.
    TreePin(PrefixTree& tree, TreeNode* node) noexcept : tree_(&tree), node_(node) {
        tree.pin(node);
    }
    TreePin(TreePin&& other) noexcept : tree_(other.tree_), node_(other.release()) {}
    TreePin& operator=(TreePin&& other) noexcept {
        // Through a temporary, so that the old pin is given back last and a self-move changes
        // nothing.
        TreePin moved(std::move(other));
        std::swap(tree_, moved.tree_);
        std::swap(node_, moved.node_);
        return *this;
    }
    ~TreePin() { reset(); }

    /// The pinned node; nullptr without a pin.
    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    [[nodiscard]] explicit operator bool() const noexcept { return node_ != nullptr; }

    /// Passes the pin to the caller, which must unpin the node. Returns nullptr without a pin.
    [[nodiscard]] TreeNode* release() noexcept { return std::exchange(node_, nullptr); }
    /// Unpins the node now.
    // `unpin` throws only for a node without pins.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    void reset() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, false);
    }
    /// Unpins the node after a use of its pages: they become the last to be evicted.
    // NOLINTNEXTLINE(bugprone-exception-escape)
    void end_use() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, true);
    }

   private:
    PrefixTree* tree_ = nullptr;
    TreeNode* node_ = nullptr;
};

}  // namespace kvcore
