// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tree/sibling_order.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Calls visit(child) for each child of a node, sorted or not.
template <class Visit>
void for_each_child(const TreeNode* node, Visit&& visit) {
    if (node->is_sorted) return node->order->for_each(visit);
    for (TreeNode* child = node->first_child; child != nullptr; child = child->next_sibling) {
        visit(child);
    }
}

}  // namespace kvcore
