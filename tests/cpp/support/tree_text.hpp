// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "tree/tree_node.hpp"

/// The whole content of a PrefixTree, as text without addresses: trees with equal texts behave in
/// the same way. Reads no count, because a count would settle the waiting pins.
class TreeText {
   public:
    explicit TreeText(const kvcore::PrefixTree& tree) : tree_(tree) {}

    /// Return the text of these namespaces and the eviction order.
    [[nodiscard]] std::string of(const std::vector<std::string>& namespaces) {
        nodes_.clear();
        text_ = std::to_string(tree_.num_cached()) + " pages in " +
                std::to_string(tree_.num_nodes()) + " runs\n";
        for (const std::string& name : namespaces) {
            const kvcore::TreeNode* root = tree_.find_namespace(name);
            text_ += '"' + name + "\" ";
            if (root == nullptr) {
                text_ += "is not there\n";
            } else {
                add(root);
            }
        }
        text_ += "goes:";
        std::vector<kvcore::NodeId> order(nodes_.size());
        order.resize(tree_.policy().upcoming(order.data(), order.size()));
        for (const kvcore::NodeId id : order) add_place(nodes_.at(id));
        return text_ + "\n";
    }

   private:
    void add_place(const kvcore::TreeNode* node) {
        const kvcore::BlockId last =
            node->num_pages > 0 ? node->ids(tree_.page_size())[node->num_pages - 1] : -1;
        text_ += " " + std::to_string(last) + "@" + std::to_string(node->end());
    }
    void add(const kvcore::TreeNode* node) {
        nodes_[node->id] = node;
        text_ += std::to_string(node->start) + ":";
        for (std::int32_t page = 0; page < node->num_pages && !node->is_root(); ++page) {
            text_ += " " + std::to_string(node->ids(tree_.page_size())[page]) + "(";
            const kvcore::TokenId* tokens = node->page_tokens(page, tree_.page_size());
            for (std::int32_t i = 0; i < tree_.page_size(); ++i) {
                text_ += std::to_string(tokens[i]) + ",";
            }
            text_ += ')';
        }
        text_ += " pins " + std::to_string(node->pins) + "\n";
        std::vector<const kvcore::TreeNode*> children;
        kvcore::for_each_child(node,
                               [&](const kvcore::TreeNode* child) { children.push_back(child); });
        std::sort(children.begin(), children.end(), [&](const auto* a, const auto* b) {
            return std::lexicographical_compare(a->tokens, a->tokens + tree_.page_size(), b->tokens,
                                                b->tokens + tree_.page_size());
        });
        for (const kvcore::TreeNode* child : children) add(child);
    }

    const kvcore::PrefixTree& tree_;
    std::map<kvcore::NodeId, const kvcore::TreeNode*> nodes_;
    std::string text_;
};
