// SPDX-License-Identifier: Apache-2.0
#include "tree/protection.hpp"

#include "kvcore/errors.hpp"

namespace kvcore {

// A template, because most trees have no listener and settle at each reservation.
template <bool kTells>
void Protection::settle_all() noexcept {
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

void Protection::settle() noexcept {
    listener_ == nullptr ? settle_all<false>() : settle_all<true>();
}

std::int32_t Protection::protected_depth(const TreeNode* node) noexcept {
    settle();
    while (!node->is_root() && node->protectors == 0) node = node->parent;
    return node->end();
}

void Protection::check_node(const TreeNode* node, std::uint32_t protected_children) {
    const std::uint32_t pinned = node->pins > 0 ? 1 : 0;
    detail::require_law(node->is_root() || node->protectors == pinned + protected_children,
                        "prefix tree: protection is counted");
}

}  // namespace kvcore
