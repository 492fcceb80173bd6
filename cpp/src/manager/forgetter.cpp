// SPDX-License-Identifier: Apache-2.0
#include "manager/forgetter.hpp"

#include <algorithm>

#include "index/tree_node.hpp"
#include "manager/page_ids.hpp"

namespace kvcore {

std::int64_t Forgetter::forget(std::int32_t replica, const BlockId* pages, std::int64_t n) {
    Replica& home = state_.replica_at(replica);
    const std::vector<BlockId> columns = page_ids::columns_of(home, pages, n);
    const std::vector<TreePosition> ends = home.tree.find_pages(page_ids::mark(home, columns));
    if (ends.empty()) return 0;
    const PrefixTree::Branches branches = home.tree.find_branches(ends);
    PrefixTree::Branches stored;
    if (home.host != nullptr) {
        stored = home.host->tree().find_branches(find_stored(home, ends));
    }
    // Nothing below can fail.
    if (state_.events != nullptr) state_.events->seal();
    const std::int64_t cached = home.num_cached();
    bar_copies(replica, branches);
    home.tree.forget(branches);
    if (home.host != nullptr) home.host->tree().forget(stored);
    bar_holders(replica);
    state_.flights.drop_forgotten(replica);
    state_.store_queue.drop_forgotten();
    state_.cache_copies.drop_forgotten();
    return cached - home.num_cached();
}

// What was stored of these pages is as wrong as they are, and would come back otherwise.
std::vector<TreePosition> Forgetter::find_stored(const Replica& home,
                                                 const std::vector<TreePosition>& ends) const {
    std::vector<TreePosition> found;
    for (const TreePosition& end : ends) {
        const std::vector<TokenId> tokens = home.tree.tokens_of(end, 0);
        const TreePosition below = home.host->match(PrefixTree::name_of(end.node), tokens.data(),
                                                    static_cast<std::int64_t>(tokens.size()));
        if (below.depth == end.depth) found.push_back(below);
    }
    return found;
}

// A page that was begun as a copy of a forgotten one is as wrong. Whose copy is under way is known;
// of copies that are made (by partial hits, forks and truncations), only that a page which is not
// committed may be one of any page there: its request commits none of it.
void Forgetter::bar_copies(std::int32_t replica, const PrefixTree::Branches& branches) noexcept {
    for (Sequence& sequence : state_.sequences.live()) {
        PageRow& row = sequence.pages;
        const std::int32_t column = row.committed();
        if (sequence.replica != replica || row.node() == nullptr || row.size() <= column) continue;
        const TreeNode* node = PrefixTree::position(row.node(), column).node;
        const bool is_behind = std::any_of(
            branches.tops.begin(), branches.tops.end(),
            [&](const TreeNode* top) { return top->parent == node && top->start == column; });
        if (is_behind) row.bar(column);
    }
}

void Forgetter::bar_holders(std::int32_t replica) noexcept {
    for (Sequence& sequence : state_.sequences.live()) {
        TreeNode* node = sequence.pages.node();
        if (sequence.replica != replica || node == nullptr) continue;
        if (!PrefixTree::is_forgotten(node)) continue;
        sequence.pages.bar(PrefixTree::findable_depth(node));
        sequence.reuse = Reuse::kSealed;  // a longer prefix would go on from what is cached
    }
    for (const OwedCopies::Copy& copy : state_.copies.all()) {
        const TreePosition at = copy.source.at();
        Sequence* sequence = state_.sequences.find(copy.copy.sequence);
        if (copy.copy.replica != replica || at.node == nullptr || sequence == nullptr) continue;
        if (!PrefixTree::is_forgotten(PrefixTree::position(at.node, at.depth).node)) continue;
        sequence->pages.bar(sequence->pages.find(copy.destination.page()));
    }
}

}  // namespace kvcore
