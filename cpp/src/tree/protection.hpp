// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

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
    void settle() noexcept;
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
    [[nodiscard]] std::int32_t protected_depth(const TreeNode* node) noexcept;

    /// Throws IntegrityError unless the count of a settled node is right. `protected_children`: the
    /// number of its protected children.
    static void check_node(const TreeNode* node, std::uint32_t protected_children);

   private:
    static constexpr std::size_t kMaxUnsettled = 512;

    template <bool kTells>
    void settle_all() noexcept;
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

}  // namespace kvcore
