// SPDX-License-Identifier: Apache-2.0
#include "transfer/store_rules.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "kvcore/errors.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

WritePolicy write_policy(std::string_view name) {
    if (name == "write_through") return WritePolicy::kWriteThrough;
    if (name == "write_through_selective") return WritePolicy::kSelective;
    if (name == "write_back") return WritePolicy::kWriteBack;
    throw std::invalid_argument(
        detail::concat("write_policy is \"", std::string(name),
                       "\", must be write_through, write_through_selective or write_back"));
}

StoreRules::StoreRules(const CacheConfig& config, std::int64_t end)
    : policy_(config.write_policy),
      is_selective_(config.host_pages > 0 && (config.write_policy == WritePolicy::kSelective ||
                                              config.host_min_priority > 0)),
      threshold_(static_cast<std::uint8_t>(config.write_threshold)),
      min_priority_(config.host_min_priority) {
    if (config.host_pages == 0 || policy_ == WritePolicy::kWriteThrough) return;
    marks_.assign(static_cast<std::size_t>(config.num_replicas),
                  std::vector<std::uint8_t>(static_cast<std::size_t>(end)));
}

void StoreRules::set_all(const PrefixTree& tree, std::int32_t replica, TreePosition at,
                         std::uint8_t value) noexcept {
    const TreeNode* node = PrefixTree::position(at.node, at.depth).node;
    for (std::int32_t end = at.depth; !node->is_root(); end = node->end()) {
        const BlockId* ids = node->ids(tree.page_size());
        for (std::int32_t i = 0; i < end - node->start; ++i) mark(replica, ids[i]) = value;
        node = node->parent;
    }
}

std::int32_t StoreRules::find_end(const PrefixTree& tree, std::int32_t replica, TreePosition at,
                                  std::int32_t first) const noexcept {
    if (min_priority_ > 0) {
        const TreeNode* node = PrefixTree::position(at.node, at.depth).node;
        for (; node->end() > first; node = node->parent) {
            if (tree.policy().retention(node->id).priority >= min_priority_) continue;
            at.depth = std::max(first, node->start);
        }
    }
    if (policy_ != WritePolicy::kSelective) return at.depth;
    std::array<BlockId, 64> pages;
    while (first < at.depth) {
        const auto n = std::min(at.depth - first, static_cast<std::int32_t>(pages.size()));
        tree.copy_pages({at.node, first + n}, first, pages.data());
        const auto end = pages.begin() + n;
        const auto found = std::find_if(
            pages.begin(), end, [&](BlockId page) { return mark(replica, page) < threshold_; });
        if (found != end) return first + static_cast<std::int32_t>(found - pages.begin());
        first += n;
    }
    return at.depth;
}

}  // namespace kvcore
