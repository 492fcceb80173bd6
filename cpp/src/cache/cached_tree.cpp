// SPDX-License-Identifier: Apache-2.0
#include "cache/cached_tree.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "tree/tree_node.hpp"

namespace kvcore::cached_tree {
namespace {

using Places = std::unordered_map<const TreeNode*, std::int32_t>;

// Ranks runs in the order in which the policy would evict them. A pinned run, and a leaf that the
// policy does not name, gets the last rank. The rank of a parent is at least the ranks of its
// children, and its own turn if the policy names it.
void rank_runs(const Replica& home, const std::vector<const TreeNode*>& nodes, CachedTree& found) {
    const std::vector<NodeId> victims = home.tree.upcoming_victims(home.num_departures());
    std::unordered_map<NodeId, std::int32_t> turns;
    turns.reserve(victims.size());
    for (std::size_t i = 0; i < victims.size(); ++i) {
        turns.emplace(victims[i], static_cast<std::int32_t>(i));
    }
    const auto last = static_cast<std::int32_t>(victims.size());
    for (std::size_t i = nodes.size(); i-- > 0;) {
        CachedRun& run = found.runs[i];
        const TreeNode& node = *nodes[i];
        const auto turn = turns.find(node.id);
        if (node.pins > 0 || (node.num_children == 0 && turn == turns.end())) {
            run.rank = last;
        } else if (turn != turns.end()) {
            run.rank = std::max(run.rank, turn->second);
        }
        if (run.parent < 0) continue;
        std::int32_t& above = found.runs[static_cast<std::size_t>(run.parent)].rank;
        above = std::max(above, run.rank);
    }
}

}  // namespace

CachedTree list(const CacheData& cache, std::int32_t replica) {
    const Replica& home = cache.replica_at(replica);
    const std::vector<const TreeNode*> nodes = home.tree.runs();
    const auto page_size = std::int64_t{home.tree.page_size()};
    CachedTree found;
    found.num_resets = cache.cache_copies.num_resets();
    found.runs.resize(nodes.size());
    found.tokens.reserve(static_cast<std::size_t>(home.tree.num_cached() * page_size));
    Places places;
    places.reserve(nodes.size());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        const TreeNode* node = nodes[i];
        CachedRun& run = found.runs[i];
        run.first = node->start;
        run.num_columns = node->num_pages;
        if (node->parent->is_root()) {
            run.name_space = static_cast<std::int32_t>(found.name_spaces.size());
            const auto known = places.emplace(node->parent, run.name_space);
            run.name_space = known.first->second;
            if (known.second) found.name_spaces.emplace_back(PrefixTree::name_of(node));
        } else {
            run.parent = places.at(node->parent);
            run.name_space = found.runs[static_cast<std::size_t>(run.parent)].name_space;
        }
        places.emplace(node, static_cast<std::int32_t>(i));
        found.tokens.insert(found.tokens.end(), node->tokens,
                            node->tokens + page_size * node->num_pages);
    }
    rank_runs(home, nodes, found);
    return found;
}

void check_span(const CacheData& cache, const ColumnSpan& span) {
    static_cast<void>(cache.replica_at(span.replica));
    const auto page_size = std::int64_t{cache.config.page_size};
    const std::int64_t columns = span.n / page_size;
    const bool is_whole = span.first >= 0 && span.n % page_size == 0 && columns > span.first;
    if (is_whole && columns <= std::numeric_limits<std::int32_t>::max()) return;
    throw std::invalid_argument(detail::concat("columns from ", span.first, " on of ", span.n,
                                               " tokens are requested, must be at least one "
                                               "whole column of ",
                                               page_size, " tokens"));
}

TreePosition find(const CacheData& cache, const ColumnSpan& span) {
    check_span(cache, span);
    Replica& home = cache.replica_at(span.replica);
    TreeNode* root = home.tree.find_namespace(span.name_space);
    if (root == nullptr || span.num_resets != cache.cache_copies.num_resets()) return {};
    TreePosition at = home.tree.match(root, span.tokens, span.n).at;
    // With quotas, a hold counts pages, so the run is cut at the end of the hold. An export holds
    // the windows of all its columns.
    if (home.owners != nullptr && at.depth > span.first) {
        at = PrefixTree::position(at.node, quotas::longest_held(home, at, span.first));
        if (at.depth > span.first) at.node = home.tree.split(at);
    }
    return at.depth > span.first ? at : TreePosition{};
}

void check_offer(const CacheData& cache, const ColumnSpan& span, const CachedColumn* columns) {
    const auto n = static_cast<std::size_t>(span.n / cache.config.page_size - span.first);
    const std::size_t windows = cache.grouping.windows().size();
    for (std::size_t i = 0; i < n; ++i) {
        const bool has_windows = (columns[i].windows >> windows) == 0;
        if (has_windows && (columns[i].state < 0 || cache.has_states)) continue;
        throw std::invalid_argument(
            detail::concat("column ", i, " is offered with windows ", int{columns[i].windows},
                           " and state ", columns[i].state, ", but there are ", windows,
                           " windows and ", cache.has_states ? "" : "no ", "states"));
    }
    if (!cache.config.prefix_caching) {
        throw std::invalid_argument(
            "columns are offered to a manager without prefix caching, which would never find them");
    }
}

}  // namespace kvcore::cached_tree
