// SPDX-License-Identifier: Apache-2.0
// Takes some or all pages out of the cache for good, because their contents are wrong.
//
//     prefix   [ a | b | c | d ]     forget(c): no hit finds c and d again; a, b and e stay
//                      \- e ]        cached. A request that holds a .. d keeps them, and commits
//                                    nothing after b until it is truncated to b; its release
//                                    frees c and d
#include <algorithm>
#include <vector>

#include "cache/verbs.hpp"
#include "level/page_ids.hpp"
#include "tree/tree_node.hpp"

namespace kvcore::verbs {
namespace {

// Finds the stored copies of these pages: they are equally wrong, and would be loaded again.
std::vector<TreePosition> find_stored(const Replica& home, const std::vector<TreePosition>& ends) {
    std::vector<TreePosition> found;
    for (const TreePosition& end : ends) {
        const std::vector<TokenId> tokens = home.tree.tokens_of(end, 0);
        const TreePosition below = home.host->find(PrefixTree::name_of(end.node), tokens.data(),
                                                   static_cast<std::int64_t>(tokens.size()));
        if (below.depth == end.depth) found.push_back(below);
    }
    return found;
}

// Handles pages that requests hold outside the tree, which no hit finds. If such a page has written
// tokens, its request commits nothing from the page on. A request that waits for a copy of such a
// page commits nothing from the copy on. Tokens that are written to the page later are right, so a
// page without written tokens needs no limit.
void limit_owners(CacheData& cache, std::int32_t replica,
                  const std::vector<bool>& marked) noexcept {
    const auto is_marked = [&](BlockId page) { return marked[static_cast<std::size_t>(page)]; };
    for (Sequence& sequence : cache.sequences.live()) {
        if (sequence.replica != replica) continue;
        PageRow& row = sequence.pages;
        const std::int64_t filled = ceil_div(sequence.filled_end(), cache.config.page_size);
        const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(filled, row.size()));
        const auto limit = [&](std::int32_t column) {
            if (column < end && is_marked(row[column])) row.limit_commits(column);
        };
        for (const std::int32_t column : row.own_duplicates()) limit(column);
        for (std::int32_t column = row.committed(); column < end; ++column) limit(column);
    }
    for (const OwedCopies::Copy& copy : cache.ledger.copies.all()) {
        if (copy.copy.replica != replica || copy.source.at().node != nullptr) continue;
        Sequence* sequence = cache.sequences.find(copy.copy.sequence);
        if (sequence == nullptr || !is_marked(copy.source.column())) continue;
        sequence->pages.limit_commits(sequence->pages.find(copy.destination.column()));
    }
}

// A page that was begun as a copy of a forgotten page is also wrong. The target of a copy under way
// is known. Finished copies (of partial hits, forks and truncations) are not recorded: the first
// uncommitted page may be a copy of any forgotten page at its place, so its request commits no part
// of it.
void limit_copies(CacheData& cache, std::int32_t replica,
                  const PrefixTree::Branches& branches) noexcept {
    for (Sequence& sequence : cache.sequences.live()) {
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

void limit_holders(CacheData& cache, std::int32_t replica) noexcept {
    const SequenceTable::Live all = cache.sequences.live();
    for (std::size_t i = 0; i < all.size; ++i) {
        Sequence& sequence = all.data[i];
        TreeNode* node = sequence.pages.node();
        if (sequence.replica != replica || node == nullptr) continue;
        if (!PrefixTree::is_forgotten(node)) continue;
        sequence.pages.limit_commits(PrefixTree::findable_depth(node));
        sequence.reuse = Reuse::kSealed;  // a longer prefix would continue from cached pages
        const SequenceHandle handle{static_cast<std::uint32_t>(i), sequence.generation};
        if (cache.misses != nullptr) cache.misses->seal(handle);
        if (cache.advice != nullptr) {
            cache.advice->seal(cache.home_of(sequence), handle, sequence, cache.tenants.of(handle));
        }
    }
}

}  // namespace

// Transfers whose pages were forgotten bring nothing into the cache.
void drop_forgotten(CacheData& cache, std::int32_t replica) noexcept {
    limit_holders(cache, replica);
    cache.ledger.drop_forgotten(*cache.replicas[static_cast<std::size_t>(replica)]);
}

std::int64_t forget(CacheData& cache, std::int32_t replica, const BlockId* pages, std::int64_t n) {
    Replica& home = cache.replica_at(replica);
    const std::vector<BlockId> columns = page_ids::columns_of(home, pages, n);
    const std::vector<bool> marked = page_ids::mark(home, columns);
    const std::vector<TreePosition> ends = home.tree.find_pages(marked);
    const PrefixTree::Branches branches = home.tree.find_branches(ends);
    PrefixTree::Branches stored;
    if (home.host != nullptr && !ends.empty()) {
        stored = home.host->tree.find_branches(find_stored(home, ends));
    }
    // Nothing below can fail.
    limit_owners(cache, replica, marked);
    if (ends.empty()) return 0;
    const MissLog::Cause cause(cache.misses.get(), Misses::kForgotten);
    const AdviceLog::Forgetting forgetting(cache.advice.get());
    if (cache.events != nullptr) cache.events->seal();
    const std::int64_t cached = home.num_cached();
    limit_copies(cache, replica, branches);
    home.tree.forget(branches);
    if (home.host != nullptr) home.host->tree.forget(stored);
    drop_forgotten(cache, replica);
    return cached - home.num_cached();
}

}  // namespace kvcore::verbs
