// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "cache/queries.hpp"
#include "tree/tree_node.hpp"

namespace kvcore::look_up {
namespace {

/// Pages that some rows hold at the same place: a run of the prefix tree or, behind those, one page
/// that forks share.
struct Stretch {
    std::int64_t end = 0;  // tokens
    std::size_t most_rows_below = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> reach;  // of each row, how far it has written them: tokens
};

/// The stretches of one replica's rows, as a tree.
class Stretches {
   public:
    /// Adds a row to the stretch `key` below `above` (0: the root).
    std::size_t enter(std::size_t above, std::uint64_t key, std::int64_t end, std::int32_t row,
                      std::int64_t written) {
        const std::size_t id = ids_.try_emplace({above, key}, stretches_.size()).first->second;
        if (id == stretches_.size()) stretches_.push_back({end, 0, {}, {}});
        Stretch& stretch = stretches_[id];
        stretch.rows.push_back(row);
        stretch.reach.push_back(std::min(end, written));
        std::size_t& most = stretches_[above].most_rows_below;
        most = std::max(most, stretch.rows.size());
        return id;
    }
    /// Adds those that several rows hold, of which fewer go on together.
    void collect(std::int32_t replica, std::vector<SharedPrefix>& groups) const {
        for (std::size_t id = 1; id < stretches_.size(); ++id) {
            const Stretch& stretch = stretches_[id];
            for (const std::int64_t tokens : std::set(stretch.reach.begin(), stretch.reach.end())) {
                SharedPrefix group{replica, tokens, {}};
                for (std::size_t i = 0; i < stretch.rows.size(); ++i) {
                    if (stretch.reach[i] >= tokens) group.rows.push_back(stretch.rows[i]);
                }
                const bool all_go_on =
                    tokens == stretch.end && stretch.most_rows_below == group.rows.size();
                if (group.rows.size() > 1 && !all_go_on) groups.push_back(std::move(group));
            }
        }
    }

   private:
    std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> ids_;
    std::vector<Stretch> stretches_{1};
};

// From the root of its namespace down.
std::vector<const TreeNode*> path_to(const TreeNode* node) {
    std::vector<const TreeNode*> path;
    for (; node != nullptr && !node->is_root(); node = node->parent) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return path;
}

// A row's stretches. A twin begins where a run does: it was committed behind one.
void enter(Stretches& stretches, const PageRow& pages, std::int32_t row, std::int64_t written,
           std::int64_t page_size) {
    std::size_t at = 0;
    const std::int32_t cached = pages.num_cached();
    for (const TreeNode* node : path_to(pages.node())) {
        if (node->end() > cached || written <= node->start * page_size) break;
        const std::uint64_t key = std::uint64_t{node->id} << 1;
        at = stretches.enter(at, key, node->end() * page_size, row, written);
    }
    const auto num_pages = static_cast<std::int32_t>(ceil_div(written, page_size));
    const std::int32_t end = std::min(pages.frozen(), num_pages);
    for (std::int32_t column = cached; column < end; ++column) {
        const std::uint64_t key = static_cast<std::uint64_t>(pages[column]) << 1 | 1;
        at = stretches.enter(at, key, (column + 1) * page_size, row, written);
    }
}

}  // namespace

std::vector<SharedPrefix> shared_prefixes(const ManagerState& state, const RequestBatch& batch) {
    std::vector<Stretches> parts(state.replicas.size());
    std::vector<std::int32_t> num_rows(state.replicas.size());
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const Sequence& sequence = state.sequences.at(batch[i].sequence);
        const auto home = static_cast<std::size_t>(sequence.replica);
        const std::int64_t written = std::min(sequence.written, batch[i].start);
        enter(parts[home], sequence.pages, num_rows[home]++, written, state.config.page_size);
    }
    std::vector<SharedPrefix> groups;
    for (std::size_t r = 0; r < parts.size(); ++r) {
        parts[r].collect(static_cast<std::int32_t>(r), groups);
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const auto& a, const auto& b) { return a.num_tokens > b.num_tokens; });
    return groups;
}

}  // namespace kvcore::look_up
