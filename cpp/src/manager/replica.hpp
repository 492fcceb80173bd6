// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "kvcore/block_pool.hpp"
#include "kvcore/cache_types.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/tier_index.hpp"

namespace kvcore {

/// The pages of one replica: which are free, which are cached, here and in the tier below.
///
/// Owns: the pool, the tree, the tier's index where there is one, and the replica's counters.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: that of the pool's and the tree's verbs.
struct Replica {
    /// LRU unless another policy is given.
    explicit Replica(const CacheConfig& config, std::unique_ptr<EvictionPolicy> policy = nullptr)
        : pool(config.num_pages), tree(config.page_size, std::move(policy)) {
        if (config.host_pages == 0) return;
        host = std::make_unique<TierIndex>(config.host_pages, config.page_size);
    }

    BlockPool pool;
    PrefixTree tree;
    const bool keeps_by_priority = tree.policy().interest().retention;
    std::int64_t num_sequences = 0;  // claimed
    Metrics metrics;
    std::unique_ptr<TierIndex> host;  // none without a host tier

    /// Pages that can be had: free ones and those that eviction would free.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return pool.num_free() + tree.num_evictable();
    }
    /// Free pages first, then evicted ones: those change hands without a detour through the pool.
    /// The caller has made sure that there are enough.
    void take_pages(std::int64_t n, BlockId* out, EvictionGuard guard = {}) noexcept {
        const std::int64_t free = std::min(n, pool.num_free());
        detail::require_law(pool.allocate(free, out), "reserve: admitted pages are there");
        if (free == n) return;
        const std::int64_t evicted = tree.evict(n - free, out + free, guard);
        detail::require_law(evicted == n - free, "reserve: admitted pages are there");
        metrics.evicted_pages += evicted;
    }
    /// Only where the peak could move is it worth counting what the cache protects.
    void note_peak() noexcept {
        std::int64_t& peak = metrics.peak_used_pages;
        const std::int64_t not_free = pool.num_blocks() - pool.num_free();
        if (not_free > peak) peak = std::max(peak, not_free - tree.num_evictable());
    }
};

}  // namespace kvcore
