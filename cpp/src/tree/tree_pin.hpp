// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "kvcore/prefix_tree.hpp"

namespace kvcore {

/// One pin on a node of a tree, given back where its holder goes out of scope: what a call holds
/// until it knows that nothing can fail any more, or a sequence as long as it lives.
///
/// Owns: that pin, or nothing; not the tree, which outlives it.
/// Invariant: while it has a node, that node is pinned once for it. Giving the pin back is no use
/// of the pages, so a call that failed leaves the order of eviction as it was.
/// Threads: none of its own, those of the tree.
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
        // By way of a third, so that the pin held before goes last and a move to itself changes
        // nothing.
        TreePin moved(std::move(other));
        std::swap(tree_, moved.tree_);
        std::swap(node_, moved.node_);
        return *this;
    }
    ~TreePin() { reset(); }

    /// The pinned node; nullptr when it holds none.
    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    [[nodiscard]] explicit operator bool() const noexcept { return node_ != nullptr; }

    /// Hands the pin to the caller, who unpins the node from now on; nullptr when there is none.
    [[nodiscard]] TreeNode* release() noexcept { return std::exchange(node_, nullptr); }
    /// Gives the pin back now.
    void reset() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, false);
    }
    /// The same for a holder that used the pages until now: they are the last to be evicted.
    void end_use() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, true);
    }

   private:
    PrefixTree* tree_ = nullptr;
    TreeNode* node_ = nullptr;
};

}  // namespace kvcore
