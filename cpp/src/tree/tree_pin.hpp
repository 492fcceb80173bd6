// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "kvcore/prefix_tree.hpp"

namespace kvcore {

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
    void reset() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, false);
    }
    /// Unpins the node after a use of its pages: they become the last to be evicted.
    void end_use() noexcept {
        if (TreeNode* node = release()) tree_->unpin(node, true);
    }

   private:
    PrefixTree* tree_ = nullptr;
    TreeNode* node_ = nullptr;
};

}  // namespace kvcore
