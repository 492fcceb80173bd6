// SPDX-License-Identifier: Apache-2.0
#include "level/tier_index.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

[[noreturn]] void refuse_publish(BlockId id) {
    throw InvalidHandleError(detail::concat(
        "page ", id, " cannot be published: it is free; take pages before they are filled"));
}

}  // namespace

TierIndex::TierIndex(std::int64_t num_pages, std::int32_t page_size,
                     std::unique_ptr<EvictionPolicy> policy)
    : pool_(num_pages), tree_(page_size, std::move(policy)) {}

TreePosition TierIndex::match(std::string_view name_space, const TokenId* tokens,
                              std::int64_t n) const noexcept {
    TreeNode* root = tree_.find_namespace(name_space);
    return root == nullptr ? TreePosition{} : tree_.match(root, tokens, n).at;
}

TreeNode* TierIndex::open(std::string_view name_space) {
    TreeNode* root = tree_.open_namespace(name_space);
    tree_.pin(root);
    return root;
}

TreeNode* TierIndex::hold(TreePosition at) {
    TreeNode* place = tree_.split(at);
    tree_.pin(place);
    return place;
}

void TierIndex::let_go(TreeNode* place) noexcept {
    tree_.unpin(place, true);
    tree_.shrink(place);
}

TreeNode* TierIndex::advance(TreeNode* place, const TokenId* tokens, std::int64_t n) {
    const TreePosition at = tree_.match(place, tokens, n).at;
    if (at.depth == PrefixTree::depth_of(place)) return place;
    TreeNode* further = hold(at);
    tree_.unpin(place, false);
    return further;
}

TreeNode* TierIndex::retreat(TreeNode* place, std::int32_t depth) {
    TreeNode* nearer = hold({place, depth});
    tree_.unpin(place, true);
    return nearer;
}

std::int64_t TierIndex::take(std::int64_t n, BlockId* out) noexcept {
    const std::int64_t free = std::min(n, pool_.num_free());
    static_cast<void>(pool_.allocate(free, out));
    return free == n ? n : free + tree_.evict(n - free, out + free);
}

TreeNode* TierIndex::publish(TreeNode* place, const TokenId* tokens, const BlockId* ids,
                             std::int32_t n, std::vector<DuplicatePage>* duplicates,
                             const Retention& retention) {
    for (std::int32_t i = 0; i < n; ++i) {
        if (pool_.ref_count(ids[i]) == 0) refuse_publish(ids[i]);
    }
    std::vector<DuplicatePage>& found = duplicates != nullptr ? *duplicates : duplicates_;
    found.clear();
    TreeNode* end = tree_.insert(place, tokens, ids, n, found, retention);
    if (duplicates == nullptr) {
        for (const DuplicatePage& duplicate : found) pool_.free(ids + duplicate.index, 1);
    }
    if (end == place) return place;
    tree_.pin(end);
    tree_.unpin(place, false);
    return end;
}

void TierIndex::reset() noexcept {
    std::array<BlockId, 1024> forgotten;  // a fixed size needs no allocation
    const auto most = static_cast<std::int64_t>(forgotten.size());
    std::int64_t n = most;
    while (n == most) {
        n = tree_.evict(most, forgotten.data());
        pool_.free(forgotten.data(), n);
    }
}

void TierIndex::check_integrity(std::int64_t on_their_way) const {
    pool_.check_integrity();
    tree_.check_integrity();
    tree_.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            detail::require_law(pool_.ref_count(ids[i]) == 1,
                                "tier index: a stored page has one reference, the tree's");
        }
    });
    detail::require_law(
        pool_.num_free() + num_stored() + tree_.num_forgotten() + on_their_way == num_pages(),
        "tier index: free + in flight + stored or held == total");
}

}  // namespace kvcore
