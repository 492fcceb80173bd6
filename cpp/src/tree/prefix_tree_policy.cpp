// SPDX-License-Identifier: Apache-2.0
// What the eviction policy is told.
#include <algorithm>

#include "kvcore/prefix_tree.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

// Of a page and its depth; every bit of it depends on every token.
std::uint64_t fingerprint(const TokenId* page, std::int32_t page_size,
                          std::int32_t depth) noexcept {
    constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15U;
    const auto mix = [](std::uint64_t state, std::uint32_t word) {
        state = (state ^ word) * kMix;
        return state ^ (state >> 32);
    };
    std::uint64_t state = mix(kMix, static_cast<std::uint32_t>(depth));
    for (std::int32_t i = 0; i < page_size; ++i) {
        state = mix(state, static_cast<std::uint32_t>(page[i]));
    }
    return state;
}

}  // namespace

// A candidate from now on, though it may have other pins or children: see EvictionPolicy.
void PrefixTree::release_to_policy(TreeNode* node) noexcept {
    node->is_candidate = true;
    policy_->release(node->id, ++clock_);
    if (!interest_.recency) return;
    while (!(node = node->parent)->is_root()) policy_->pass(node->id, clock_);
}

// A leaf that is no candidate was withdrawn while it was held, or had children.
void PrefixTree::offer_if_free(TreeNode* node) noexcept {
    if (node->pins > 0 || node->num_children > 0) return;
    if (interest_.exposure) policy_->expose(node->id);
    if (node->is_candidate) return;
    node->is_candidate = true;
    policy_->offer(node->id);
}

void PrefixTree::withdraw(TreeNode* node) noexcept {
    node->is_candidate = false;
    policy_->withdraw(node->id);
}

void PrefixTree::tell_size(const TreeNode* node) noexcept {
    if (interest_.sizes) policy_->resize(node->id, node->end(), node->num_pages);
}

void PrefixTree::tell_fingerprint(const TreeNode* node) noexcept {
    if (!interest_.fingerprints) return;
    policy_->identify(node->id, fingerprint(node->tokens, page_size_, node->start));
}

// Of the runs behind page `first` on the way to `at`.
void PrefixTree::use_between(TreePosition at, std::int32_t first) noexcept {
    const TreeNode* node = position(at.node, at.depth).node;
    for (; node->end() > first; node = node->parent) policy_->hit(node->id);
}

void PrefixTree::retain_between(TreePosition at, std::int32_t first, std::int32_t end,
                                const Retention& retention) noexcept {
    const TreeNode* node = position(at.node, std::min(at.depth, end)).node;
    for (; node->end() > first; node = node->parent) policy_->retain(node->id, retention);
}

void PrefixTree::touch(TreePosition at) {
    if (at.depth == 0) return;
    TreeNode* end = split(at);
    use(at);
    release_to_policy(end);
}

void PrefixTree::advance(std::int64_t now) noexcept {
    if (!interest_.retention || now <= now_) return;
    now_ = now;
    policy_->advance(now);
}

}  // namespace kvcore
