// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "pages/protection_listener.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Which pages of a tree pins protect: a pin on a node protects its run and all above it.
///
///     root --- A (2 pages) --- B (3) --- C (1)    C is pinned
///                          \-- D (4) --- E (5)    D is pinned twice, E not
///
///     protectors(node) = (1 where it is pinned) + its children that have protectors
///     A 2, B 1, C 1, D 1, E 0: a run with protectors is protected, 10 pages; 5 are evictable
///
/// So a pin changes the way up only as far as a count passes between 0 and 1. Nor is that done at
/// once: between two questions a request pins and unpins several times, and often ends where it
/// began. Nodes whose pins changed wait here until it is asked what is protected, or until the
/// place is used up.
///
/// Owns: the sum of protected pages, the nodes that wait; not the counts, which lie in the nodes.
/// Invariant: settled, `protectors` of each node is as above, and the sum that of their pages.
/// Threads: none of its own, those of the tree.
/// Cost: `pin`, `unpin`, `grow`, `split` O(1); a question settles what waits, each node up to the
/// next one that stays protected. Allocates nothing.
class Protection {
   public:
    explicit Protection(std::int32_t page_size) noexcept : page_size_(page_size) {}

    /// Whom to tell from now on; nullptr for nobody. Pages that join a protected run are protected
    /// without a word.
    void set_listener(ProtectionListener* listener) noexcept { listener_ = listener; }
    /// One more pin on a node.
    void pin(TreeNode* node) noexcept {
        if (node->pins++ == 0) wait(node);
    }
    /// One less; the node has one.
    void unpin(TreeNode* node) noexcept {
        if (--node->pins == 0) wait(node);
    }
    /// The run got `n` pages more.
    void grow(const TreeNode* node, std::int32_t n) noexcept {
        if (node->protectors > 0) num_protected_ += n;
    }
    /// `upper` took over the first pages of `lower`, whose only parent it is.
    static void split(TreeNode* upper, const TreeNode* lower) noexcept {
        upper->protectors = lower->protectors > 0 ? 1 : 0;
    }

    /// Counts what waits.
    void settle() noexcept;
    /// Protected pages.
    [[nodiscard]] std::int64_t num_protected() noexcept {
        settle();
        return num_protected_;
    }
    [[nodiscard]] bool is_protected(const TreeNode* node) noexcept {
        settle();
        return node->protectors > 0;
    }
    /// Where the protected part of the way to `node` ends, in pages.
    [[nodiscard]] std::int32_t protected_depth(const TreeNode* node) noexcept;

    /// Throws IntegrityError unless the counts of a settled node, with `protected_children`, are
    /// right.
    static void check_node(const TreeNode* node, std::uint32_t protected_children);

   private:
    static constexpr std::size_t kMaxUnsettled = 512;

    template <bool kTells>
    void settle_all() noexcept;
    // Roots have no pages to protect.
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
