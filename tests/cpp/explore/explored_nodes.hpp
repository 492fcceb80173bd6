// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/prefix_tree.hpp"
#include "tree/tree_node.hpp"

/// The nodes of the default namespace of a tree, parents first, siblings in their order.
class TreeNodes {
   public:
    explicit TreeNodes(const kvcore::PrefixTree& tree)
        : page_size_(tree.page_size()), policy_(tree.policy()) {
        static_cast<void>(tree.num_evictable());  // updates the counts of protected pages
        nodes_.push_back(tree.find_namespace(""));
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            kvcore::for_each_child(nodes_[i],
                                   [&](kvcore::TreeNode* child) { nodes_.push_back(child); });
        }
    }

    [[nodiscard]] const std::vector<const kvcore::TreeNode*>& all() const { return nodes_; }
    /// Return -1 for a node that the tree does not have.
    [[nodiscard]] int index_of(const kvcore::TreeNode* node) const {
        const auto found = std::find(nodes_.begin(), nodes_.end(), node);
        return found == nodes_.end() ? -1 : static_cast<int>(found - nodes_.begin());
    }
    [[nodiscard]] std::int32_t page_size() const { return page_size_; }

    /// Candidates for eviction, the next victim first.
    [[nodiscard]] std::vector<int> eviction_order() const {
        std::vector<kvcore::NodeId> ids(nodes_.size());
        ids.resize(policy_.upcoming(ids.data(), ids.size()));
        std::vector<int> order;
        for (const kvcore::NodeId id : ids) {
            const auto found =
                std::find_if(nodes_.begin(), nodes_.end(),
                             [id](const kvcore::TreeNode* node) { return node->id == id; });
            order.push_back(static_cast<int>(found - nodes_.begin()));
        }
        return order;
    }

   private:
    std::int32_t page_size_;
    const kvcore::EvictionPolicy& policy_;
    std::vector<const kvcore::TreeNode*> nodes_;
};
