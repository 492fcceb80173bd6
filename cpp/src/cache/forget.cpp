// SPDX-License-Identifier: Apache-2.0
#include "cache/forget.hpp"

#include <algorithm>

#include "level/page_ids.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

std::int64_t Forgetter::forget(std::int32_t replica, const BlockId* pages, std::int64_t n) {
    Replica& home = state_.replica_at(replica);
    const std::vector<BlockId> columns = page_ids::columns_of(home, pages, n);
    const std::vector<bool> marked = page_ids::mark(home, columns);
    const std::vector<TreePosition> ends = home.tree.find_pages(marked);
    const PrefixTree::Branches branches = home.tree.find_branches(ends);
    PrefixTree::Branches stored;
    if (home.host != nullptr && !ends.empty()) {
        stored = home.host->tree.find_branches(find_stored(home, ends));
    }
    // Nothing below can fail.
    limit_owners(replica, marked);
    if (ends.empty()) return 0;
    if (state_.events != nullptr) state_.events->seal();
    const std::int64_t cached = home.num_cached();
    limit_copies(replica, branches);
    home.tree.forget(branches);
    if (home.host != nullptr) home.host->tree.forget(stored);
    limit_holders(replica);
    state_.flights.drop_forgotten(replica);
    state_.store_queue.drop_forgotten();
    state_.cache_copies.drop_forgotten();
    return cached - home.num_cached();
}

// Finds the stored copies of these pages: they are equally wrong, and would be loaded again.
std::vector<TreePosition> Forgetter::find_stored(const Replica& home,
                                                 const std::vector<TreePosition>& ends) const {
    std::vector<TreePosition> found;
    for (const TreePosition& end : ends) {
        const std::vector<TokenId> tokens = home.tree.tokens_of(end, 0);
        const TreePosition below = home.host->find(PrefixTree::name_of(end.node), tokens.data(),
                                                   static_cast<std::int64_t>(tokens.size()));
        if (below.depth == end.depth) found.push_back(below);
    }
    return found;
}

// A hit finds no page that a request holds outside the tree. The request commits no
// page from such a page on if tokens are written in it; a request that waits for a copy of the page
// commits no page from the copy on. Tokens that are written to the page later are right.
void Forgetter::limit_owners(std::int32_t replica, const std::vector<bool>& marked) noexcept {
    const auto is_marked = [&](BlockId page) { return marked[static_cast<std::size_t>(page)]; };
    for (Sequence& sequence : state_.sequences.live()) {
        if (sequence.replica != replica) continue;
        PageRow& row = sequence.pages;
        const std::int64_t filled = ceil_div(sequence.filled_end(), state_.config.page_size);
        const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(filled, row.size()));
        const auto limit = [&](std::int32_t column) {
            if (column < end && is_marked(row[column])) row.limit_commits(column);
        };
        for (const std::int32_t column : row.own_duplicates()) limit(column);
        for (std::int32_t column = row.committed(); column < end; ++column) limit(column);
    }
    for (const OwedCopies::Copy& copy : state_.copies.all()) {
        if (copy.copy.replica != replica || copy.source.at().node != nullptr) continue;
        Sequence* sequence = state_.sequences.find(copy.copy.sequence);
        if (sequence == nullptr || !is_marked(copy.source.page())) continue;
        sequence->pages.limit_commits(sequence->pages.find(copy.destination.page()));
    }
}

// A page that was begun as a copy of a forgotten page is also wrong. The target of a copy under way
// is known. Finished copies (of partial hits, forks and truncations) are not recorded: the first
// uncommitted page may be a copy of any forgotten page at its place, so its request commits no part
// of it.
void Forgetter::limit_copies(std::int32_t replica, const PrefixTree::Branches& branches) noexcept {
    for (Sequence& sequence : state_.sequences.live()) {
        PageRow& row = sequence.pages;
        const std::int32_t column = row.committed();
        if (sequence.replica != replica || row.node() == nullptr || row.size() <= column) continue;
        const TreeNode* node = PrefixTree::position(row.node(), column).node;
        const bool is_behind = std::any_of(
            branches.tops.begin(), branches.tops.end(),
            [&](const TreeNode* top) { return top->parent == node && top->start == column; });
        if (is_behind) row.limit_commits(column);
    }
}

void Forgetter::limit_holders(std::int32_t replica) noexcept {
    for (Sequence& sequence : state_.sequences.live()) {
        TreeNode* node = sequence.pages.node();
        if (sequence.replica != replica || node == nullptr) continue;
        if (!PrefixTree::is_forgotten(node)) continue;
        sequence.pages.limit_commits(PrefixTree::findable_depth(node));
        sequence.reuse = Reuse::kSealed;  // a longer prefix would continue from cached pages
    }
    for (const OwedCopies::Copy& copy : state_.copies.all()) {
        const TreePosition at = copy.source.at();
        Sequence* sequence = state_.sequences.find(copy.copy.sequence);
        if (copy.copy.replica != replica || at.node == nullptr || sequence == nullptr) continue;
        if (!PrefixTree::is_forgotten(PrefixTree::position(at.node, at.depth).node)) continue;
        sequence->pages.limit_commits(sequence->pages.find(copy.destination.page()));
    }
}

// A copy under way does not count as a use of its page. The reset also forgets that page, but the
// page stays until the copy ends.
void Forgetter::detach_copies() noexcept {
    state_.cache_copies.detach_from_tree();
    state_.flights.detach_from_tree();
    state_.store_queue.detach_from_tree();
    state_.copies.detach_from_tree();
    state_.holds.detach_from_tree();
    state_.holds.reattach();
    state_.copies.reattach();
    state_.flights.reattach();
    state_.store_queue.reattach();
    state_.cache_copies.reattach();
}

void Forgetter::drop_forgotten() noexcept {
    for (std::int32_t r = 0; r < state_.config.num_replicas; ++r) {
        limit_holders(r);
        state_.flights.drop_forgotten(r);
    }
    state_.store_queue.drop_forgotten();
    state_.cache_copies.drop_forgotten();
}

// A request caches no tokens that it computes from forgotten pages or computed before the reset. A
// request that has pages but neither a hit nor a step begins after the reset.
void Forgetter::limit_all() noexcept {
    const SequenceTable::Live all = state_.sequences.live();
    for (std::size_t i = 0; i < all.size; ++i) {
        Sequence& sequence = all.data[i];
        const bool has_begun = sequence.is_sealed() || sequence.hit_tokens > 0;
        if (sequence.replica < 0 || sequence.pages.empty() || !has_begun) continue;
        sequence.pages.limit_commits(0);
        state_.counts.seal(state_.home_of(sequence).metrics,
                           {static_cast<std::uint32_t>(i), sequence.generation}, sequence,
                           state_.config.page_size);
    }
}

bool Forgetter::is_empty() const noexcept {
    return std::all_of(state_.replicas.begin(), state_.replicas.end(), [](const auto& home) {
        bool is_empty = true;
        home->for_each_level([&](const Level& level) {
            is_empty &= level.tree.num_cached() == 0 && level.tree.num_forgotten() == 0;
        });
        return is_empty;
    });
}

// Pages without holders are evicted first: the rest are few runs.
bool Forgetter::reset() {
    std::vector<PrefixTree::Branches> held;
    held.reserve(2 * state_.replicas.size());
    for (const auto& home : state_.replicas) {
        home->for_each_level([&](Level& level) { held.push_back(level.tree.make_branches()); });
    }
    // Nothing below can fail.
    if (state_.events != nullptr) state_.events->begin_reset();
    detach_copies();
    auto branches = held.begin();
    for (const auto& home : state_.replicas) {
        home->metrics.evicted.reset += home->num_cached();
        home->metrics.host_evicted.reset += home->num_stored();
        home->for_each_level([&](Level& level) {
            level.evict_all();
            level.tree.forget_all(*branches++);
        });
        home->tell_held();
        home->metrics.evicted.reset -= home->num_cached();
        home->metrics.host_evicted.reset -= home->num_stored();
    }
    drop_forgotten();
    limit_all();
    if (state_.events != nullptr) state_.events->end_reset();
    return is_empty();
}

}  // namespace kvcore
