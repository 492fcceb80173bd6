// SPDX-License-Identifier: Apache-2.0
// The end of a hit, in the simplest form: tokens read one by one, a list of checkpoints, a search
// over runs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "layers/grouping.hpp"
#include "tree/tree_node.hpp"

/// Checkpoints by their columns, least recently used first.
class SlowCheckpoints {
   public:
    using BlockId = kvcore::BlockId;

    explicit SlowCheckpoints(std::int64_t num_slots)
        : num_slots_(static_cast<std::size_t>(num_slots)) {}

    /// Return true if layers keep a state.
    [[nodiscard]] bool exist() const { return num_slots_ > 0; }
    [[nodiscard]] bool has(BlockId column) const {
        return std::find(columns_.begin(), columns_.end(), column) != columns_.end();
    }
    /// Return the checkpoint that must be evicted for a new one, or -1 if a slot is free.
    [[nodiscard]] BlockId oldest_if_full() const {
        return columns_.size() == num_slots_ ? columns_.front() : -1;
    }
    void add(BlockId column) { columns_.push_back(column); }
    void forget(BlockId column) {
        columns_.erase(std::find(columns_.begin(), columns_.end(), column));
    }
    void renew(BlockId column) {
        forget(column);
        add(column);
    }

   private:
    std::size_t num_slots_;
    std::vector<BlockId> columns_;
};

/// Call visit(run) for every run of the default namespace.
template <class Visit>
void for_each_run(const kvcore::PrefixTree& tree, const Visit& visit) {
    std::vector<kvcore::TreeNode*> nodes{tree.find_namespace("")};
    while (!nodes.empty()) {
        kvcore::TreeNode* node = nodes.back();
        nodes.pop_back();
        if (!node->is_root()) visit(node);
        kvcore::for_each_child(node, [&](kvcore::TreeNode* child) { nodes.push_back(child); });
    }
}

/// Return the run that has a column; nullptr if there is none.
inline kvcore::TreeNode* run_of(const kvcore::PrefixTree& tree, kvcore::BlockId column) {
    kvcore::TreeNode* found = nullptr;
    for_each_run(tree, [&](kvcore::TreeNode* run) {
        const kvcore::BlockId* ids = run->ids(tree.page_size());
        if (std::find(ids, ids + run->num_pages, column) != ids + run->num_pages) found = run;
    });
    return found;
}

/// The longest hit in whole columns of the columns `ids`. Windows must have the pages that it
/// reads, `has(column, window)`, and if layers keep a state, it must end at a checkpoint.
template <class Has>
std::int32_t slow_longest_hit(const kvcore::Grouping& grouping,
                              const std::vector<kvcore::BlockId>& ids,
                              const SlowCheckpoints& checkpoints, const Has& has) {
    auto depth = static_cast<std::int32_t>(ids.size());
    const auto id = [&](std::int64_t c) { return ids[static_cast<std::size_t>(c)]; };
    const auto is_legal = [&] {
        if (depth > 0 && checkpoints.exist() && !checkpoints.has(id(depth - 1))) return false;
        const std::int64_t n = std::int64_t{depth} * grouping.column_tokens();
        for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
            std::int64_t t = grouping.windows()[w].rule.skipped_tokens(n);
            for (; t < n; ++t) {
                if (!has(id(t / grouping.column_tokens()), w)) return false;
            }
        }
        return true;
    };
    while (!is_legal()) --depth;
    return depth;
}
