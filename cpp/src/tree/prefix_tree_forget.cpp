// SPDX-License-Identifier: Apache-2.0
// What is forgotten, whoever has it.
#include <algorithm>
#include <cstdlib>

#include "kvcore/prefix_tree.hpp"
#include "support/make_room.hpp"
#include "tree/child_index.hpp"
#include "tree/children.hpp"
#include "tree/protection.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

bool PrefixTree::is_forgotten(const TreeNode* node) noexcept { return node->is_forgotten; }

std::int32_t PrefixTree::findable_depth(const TreeNode* node) noexcept {
    std::int32_t depth = node->end();
    for (; node->is_forgotten; node = node->parent) depth = node->start;
    return depth;
}

std::vector<TreePosition> PrefixTree::find_pages(const std::vector<bool>& asked) const {
    std::vector<TreePosition> found;
    std::vector<TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    while (!stack.empty()) {
        TreeNode* node = stack.back();
        stack.pop_back();
        std::int32_t page = 0;
        if (!node->is_root()) {
            const BlockId* ids = node->ids(page_size_);
            while (page < node->num_pages && !asked[static_cast<std::size_t>(ids[page])]) ++page;
        }
        if (page < node->num_pages) {
            found.push_back({node, node->start + page + 1});
        } else {
            for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
        }
    }
    return found;
}

std::vector<TreePosition> PrefixTree::locate(const std::vector<bool>& asked) const {
    std::vector<TreePosition> found;
    std::vector<TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    stack.insert(stack.end(), severed_.begin(), severed_.end());
    while (!stack.empty()) {
        TreeNode* node = stack.back();
        stack.pop_back();
        if (!node->is_root()) {
            const BlockId* ids = node->ids(page_size_);
            for (std::int32_t page = 0; page < node->num_pages; ++page) {
                if (asked[static_cast<std::size_t>(ids[page])]) {
                    found.push_back({node, node->start + page + 1});
                }
            }
        }
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    return found;
}

PrefixTree::Branches PrefixTree::find_branches(const std::vector<TreePosition>& ends) {
    Branches found;
    make_room(severed_, ends.size());
    for (const TreePosition& end : ends) {
        const auto [node, depth] = position(end.node, end.depth);
        if (depth - 1 > node->start) static_cast<void>(split({node, depth - 1}));
        found.tops.push_back(node);  // the tail keeps its node
        found.runs.push_back(node);
        for (std::size_t i = found.runs.size() - 1; i < found.runs.size(); ++i) {
            for_each_child(found.runs[i], [&](TreeNode* child) { found.runs.push_back(child); });
        }
    }
    return found;
}

// From below, as pages leave. What a pin protects is left as it is, so that whoever holds it sees
// no change: only its first run is no child of its parent any more, but keeps that by a pin.
void PrefixTree::forget(const Branches& branches) noexcept {
    protection_->settle();
    for (TreeNode* top : branches.tops) sever(top);
    std::for_each(branches.runs.rbegin(), branches.runs.rend(),
                  [this](TreeNode* node) { mark_forgotten(node); });
    std::for_each(branches.runs.rbegin(), branches.runs.rend(), [this](TreeNode* node) {
        if (node->protectors > 0) return;
        const bool is_top = node->is_severed;
        TreeNode* parent = drop_run(node);
        if (is_top) unpin(parent, false);
    });
}

PrefixTree::Branches PrefixTree::make_branches() {
    Branches room;
    const auto most = static_cast<std::size_t>(num_nodes_);
    make_room(severed_, most);
    room.tops.reserve(most);
    room.runs.reserve(most);
    return room;
}

void PrefixTree::forget_all(Branches& room) noexcept {
    const auto add_tops = [&](TreeNode* root) {
        for_each_child(root, [&](TreeNode* top) { room.tops.push_back(top); });
    };
    add_tops(default_root_);
    for (const auto& entry : roots_) add_tops(entry.second.node);
    room.runs = room.tops;  // there is room
    for (std::size_t i = 0; i < room.runs.size(); ++i) {
        for_each_child(room.runs[i], [&](TreeNode* child) { room.runs.push_back(child); });
    }
    forget(room);
}

void PrefixTree::mark_forgotten(TreeNode* node) noexcept {
    if (listener_ != nullptr) listener_->removed(node, node->start, node->num_pages);
    node->is_forgotten = true;
    node->begin_generation();
    num_forgotten_ += node->num_pages;
    if (node->is_candidate) withdraw(node);
    if (forgotten_ != nullptr) forgotten_->left(node->ids(page_size_), node->num_pages);
}

// There is room in the list.
void PrefixTree::sever(TreeNode* top) noexcept {
    detach(top);
    top->next_sibling = nullptr;
    top->is_severed = true;
    severed_.push_back(top);
    protection_->pin(top->parent);
}

// Nothing protects it or follows it. Returns what it continued; where it was severed, that has lost
// nothing but a pin yet to be given back.
TreeNode* PrefixTree::drop_run(TreeNode* node) noexcept {
    TreeNode* parent = node->parent;
    if (node->is_severed) {
        severed_.erase(std::find(severed_.begin(), severed_.end(), node));
    } else {
        detach(node);
    }
    policy_->erase(node->id);
    --num_nodes_;
    num_cached_ -= node->num_pages;
    num_forgotten_ -= node->num_pages;
    if (forgotten_ != nullptr) forgotten_->let_go(node->ids(page_size_), node->num_pages);
    std::free(node->tokens);
    arena_->recycle(node);
    return parent;
}

// A pin on a forgotten run is gone, and with the last one that protects them the runs on its way
// up, as far as they are forgotten.
void PrefixTree::drop_forgotten(TreeNode* node) noexcept {
    while (node->pins == 0 && node->num_children == 0) {
        protection_->settle();  // no run waits there that is gone
        const bool is_top = node->is_severed;
        node = drop_run(node);
        if (!is_top) continue;
        protection_->unpin(node);
        if (node->is_root()) return drop_root_if_unused(node);
        if (!node->is_forgotten) return offer_if_free(node);
    }
}

std::vector<PrefixTree::Run> PrefixTree::collect_forgotten_runs() const {
    std::vector<Run> found;
    std::vector<const TreeNode*> stack(severed_.begin(), severed_.end());
    while (!stack.empty()) {
        const TreeNode* node = stack.back();
        stack.pop_back();
        found.push_back({node->tokens, node->ids(page_size_), node->num_pages});
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    return found;
}

}  // namespace kvcore
