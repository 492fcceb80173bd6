// SPDX-License-Identifier: Apache-2.0
// What goes.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "kvcore/prefix_tree.hpp"
#include "tree/child_index.hpp"
#include "tree/protection.hpp"
#include "tree/sibling_order.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

// What is left of it can be read until it is freed: its buffer, and the way up.
void PrefixTree::remove_leaf(TreeNode* leaf) noexcept {
    TreeNode* parent = leaf->parent;
    detach(leaf);
    policy_->erase(leaf->id);
    --num_nodes_;
    if (!parent->is_root()) offer_if_free(parent);
}

void PrefixTree::free_leaf(TreeNode* leaf) noexcept {
    TreeNode* parent = leaf->parent;
    std::free(leaf->tokens);
    arena_->recycle(leaf);
    if (parent->is_root()) drop_root_if_unused(parent);
}

std::int64_t PrefixTree::trim(TreeNode* leaf, std::int64_t n, BlockId* out) noexcept {
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(n, leaf->num_pages));
    const BlockId* end = leaf->ids(page_size_) + leaf->num_pages;
    std::reverse_copy(end - count, end, out);
    num_cached_ -= count;
    leaf->num_pages -= count;
    const bool is_gone = leaf->num_pages == 0;
    if (is_gone) {
        // The first page still finds the leaf among its siblings: its tokens are in place.
        remove_leaf(leaf);
    } else {
        leaf->begin_generation();
        tell_size(leaf);
    }
    if (listener_ != nullptr) listener_->removed(leaf, leaf->end(), count);
    if (is_gone) {
        free_leaf(leaf);
    } else if (leaf->num_pages < leaf->capacity / 2) {
        shrink_buffer(leaf);
    }
    return count;
}

// In a large tree every line of a victim is cold, and which lines they are is known one by one: so
// those of the next three are asked for in three stages, each a victim ahead of its use.
void PrefixTree::prefetch_victims() const noexcept {
    std::array<NodeId, 4> victims;  // the first is the leaf
    const std::size_t n = policy_->upcoming(victims.data(), victims.size());
    if (n > 1) {
        const TreeNode* next = arena_->at(victims[1]);
        if (next->parent->is_sorted) next->parent->order->prefetch(next->tokens);
    }
    if (n > 2) {
        const TreeNode* second = arena_->at(victims[2]);
        prefetch(second->tokens);
        prefetch(second->ids(page_size_));
        index_->prefetch(second);
    }
    if (n > 3) prefetch_node(arena_->at(victims[3]));
}

// What is in use is offered again when it is let go.
NodeId PrefixTree::victim() noexcept {
    for (;;) {
        const NodeId victim = policy_->victim();
        if (victim == kNoNode) return kNoNode;
        TreeNode* leaf = arena_->at(victim);
        if (leaf->num_children == 0 && leaf->pins == 0) return victim;
        withdraw(leaf);
    }
}

TreeNode* PrefixTree::run(NodeId id) const noexcept { return arena_->at(id); }

PrefixTree::Victim PrefixTree::next_victim(EvictionGuard guard) noexcept {
    protection_->settle();
    Victim found;
    TreeNode* set_aside = nullptr;
    for (NodeId next = victim(); next != kNoNode; next = victim()) {
        TreeNode* leaf = arena_->at(next);
        const std::int32_t keep = leaf == guard.node ? guard.keep : 0;
        if (leaf->num_pages > keep) {
            found = {{leaf, leaf->end()}, leaf->num_pages - keep};
            break;
        }
        withdraw(leaf);
        set_aside = leaf;
    }
    if (set_aside != nullptr) offer_if_free(set_aside);
    return found;
}

std::vector<NodeId> PrefixTree::upcoming_victims(std::size_t spare) const {
    std::vector<NodeId> victims(static_cast<std::size_t>(num_nodes_) + spare);
    victims.resize(policy_->upcoming(victims.data(), victims.size()));
    return victims;
}

std::int64_t PrefixTree::evict(std::int64_t n, BlockId* out, EvictionGuard guard) noexcept {
    protection_->settle();
    std::int64_t evicted = 0;
    TreeNode* set_aside = nullptr;
    while (evicted < n) {
        const NodeId next = victim();
        if (next == kNoNode) break;
        TreeNode* leaf = arena_->at(next);
        const std::int64_t keep = leaf == guard.node ? guard.keep : 0;
        if (leaf->num_pages <= keep) {
            withdraw(leaf);
            set_aside = leaf;
        } else {
            if (leaf->num_pages - keep <= n - evicted) prefetch_victims();
            evicted += trim(leaf, std::min(n - evicted, leaf->num_pages - keep), out + evicted);
        }
    }
    if (set_aside != nullptr) offer_if_free(set_aside);
    return evicted;
}

// A candidate that cannot go yet is withdrawn when it is met, and goes right behind what held it
// up; one that is not met yet goes in its own turn.
std::vector<BlockId> PrefixTree::evictable_pages() const {
    protection_->settle();
    std::vector<BlockId> pages;
    pages.reserve(static_cast<std::size_t>(num_evictable()));
    std::unordered_map<const TreeNode*, std::uint32_t> gone;  // children of a run
    std::unordered_set<const TreeNode*> met;
    for (const NodeId victim : upcoming_victims(0)) {
        const TreeNode* run = arena_->at(victim);
        met.insert(run);
        while (!run->is_root() && run->pins == 0 && gone[run] == run->num_children) {
            const std::reverse_iterator<const BlockId*> end(run->ids(page_size_));
            pages.insert(pages.end(), end - run->num_pages, end);
            run = run->parent;
            ++gone[run];
            if (run->is_candidate && met.count(run) == 0) break;
        }
    }
    return pages;
}

}  // namespace kvcore
