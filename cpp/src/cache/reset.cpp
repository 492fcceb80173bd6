// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "cache/verbs.hpp"

namespace kvcore::verbs {
namespace {

// A request caches no tokens that it computes from forgotten pages or computed before the reset. A
// request that has pages but neither a hit nor a step counts as begun after the reset.
void limit_all(CacheData& cache) noexcept {
    const SequenceTable::Live all = cache.sequences.live();
    for (std::size_t i = 0; i < all.size; ++i) {
        Sequence& sequence = all.data[i];
        const bool has_begun = sequence.is_sealed() || sequence.hit_tokens > 0;
        if (sequence.replica < 0 || sequence.pages.empty() || !has_begun) continue;
        sequence.pages.limit_commits(0);
        cache.seal({static_cast<std::uint32_t>(i), sequence.generation}, sequence);
    }
}

bool is_empty(const CacheData& cache) noexcept {
    return std::all_of(cache.replicas.begin(), cache.replicas.end(), [](const auto& home) {
        bool is_empty = true;
        home->for_each_level([&](const Level& level) {
            is_empty &= level.tree.num_cached() == 0 && level.tree.num_forgotten() == 0;
        });
        return is_empty;
    });
}

}  // namespace

// Evicts the pages without holders first, so that only few runs are left to forget.
bool reset_prefix_cache(CacheData& cache) {
    std::vector<PrefixTree::Branches> held;
    held.reserve(2 * cache.replicas.size());
    for (const auto& home : cache.replicas) {
        home->for_each_level([&](Level& level) { held.push_back(level.tree.make_branches()); });
    }
    // Nothing below can fail.
    const MissLog::Cause cause(cache.misses.get(), Misses::kReset);
    if (cache.advice != nullptr) cache.advice->reset();
    if (cache.events != nullptr) cache.events->begin_reset();
    cache.cache_copies.note_reset();
    // A copy under way does not count as a use of its page. The reset also forgets that page, but
    // the page stays until the copy ends.
    for (const auto& home : cache.replicas) {
        home->for_each_level([](Level& level) { level.detach_refs(); });
    }
    auto branches = held.begin();
    for (const auto& home : cache.replicas) {
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
    for (std::int32_t r = 0; r < cache.config.num_replicas; ++r) drop_forgotten(cache, r);
    limit_all(cache);
    if (cache.events != nullptr) cache.events->end_reset();
    return is_empty(cache);
}

void reset_metrics(CacheData& cache) noexcept {
    cache.counts.reset();
    if (cache.misses != nullptr) cache.misses->reset_counts();
    for (const auto& replica : cache.replicas) replica->reset_counts();
}

}  // namespace kvcore::verbs
