// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "groups/column_pages.hpp"
#include "groups/column_states.hpp"
#include "groups/grouping.hpp"
#include "index/policies/lru.hpp"
#include "kvcore/block_pool.hpp"
#include "kvcore/cache_types.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/tier_index.hpp"

namespace kvcore {

/// The pages of one replica: which are free, which are cached, here and in the tier below.
///
/// Where layers do not all keep everything, pool and tree are those of columns, which have pages of
/// each bundle (ColumnPages); else a column is a page.
///
/// Owns: the pool, the tree, the columns' pages, the tier's index where there is one, and the
/// replica's counters.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: that of the pool's and the tree's verbs.
struct Replica {
    /// LRU unless another policy is given.
    Replica(const CacheConfig& config, const Grouping& grouping,
            std::unique_ptr<EvictionPolicy> policy = nullptr)
        : pool(grouping.is_plain() ? config.num_pages
                                   : grouping.most_columns(config.num_pages, config.max_sequences,
                                                           config.max_seq_len)),
          tree(config.page_size, timed(grouping, std::move(policy))) {
        if (times_ != nullptr) {
            columns =
                std::make_unique<ColumnPages>(grouping, config.num_pages, pool, tree, *times_);
        }
        if (!config.states.empty()) {
            states = std::make_unique<ColumnStates>(config.num_state_slots, pool, columns.get());
        }
        narrows_hits_ = columns != nullptr || states != nullptr;
        if (config.host_pages == 0) return;
        host = std::make_unique<TierIndex>(config.host_pages, config.page_size);
    }

   private:
    const TimedPolicy* times_ = nullptr;  // the tree's, where there are columns
    bool narrows_hits_ = false;

   public:
    BlockPool pool;
    PrefixTree tree;
    const bool keeps_by_priority = tree.policy().interest().retention;
    std::unique_ptr<ColumnPages> columns;  // none where a column is a page
    std::unique_ptr<ColumnStates> states;  // none without layers that keep a state
    std::int64_t num_sequences = 0;        // claimed
    Metrics metrics;
    std::unique_ptr<TierIndex> host;  // none without a host tier

    [[nodiscard]] std::int64_t num_pages() const noexcept {
        return columns == nullptr ? pool.num_blocks() : columns->pages().num_blocks();
    }
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return columns == nullptr ? pool.num_free() : columns->pages().num_free();
    }
    /// Pages in the tree.
    [[nodiscard]] std::int64_t num_cached() const noexcept {
        return columns == nullptr ? tree.num_cached() : columns->num_cached();
    }
    /// Pages that eviction would free.
    [[nodiscard]] std::int64_t num_evictable() const noexcept {
        return columns == nullptr ? tree.num_evictable() : columns->num_evictable();
    }
    /// Pages that can be had: free ones and those that eviction would free.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return num_free() + num_evictable();
    }
    /// What is in the tree need not be what a hit can take.
    [[nodiscard]] bool narrows_hits() const noexcept { return narrows_hits_; }
    /// Columns of the longest prefix of that one which all groups can serve: narrowed by one after
    /// the other until nothing shrinks.
    [[nodiscard]] std::int32_t longest_hit(TreePosition at) const noexcept {
        std::int32_t before = -1;
        while (at.depth != before) {
            before = at.depth;
            if (columns != nullptr) at.depth = columns->longest_hit(at);
            if (states != nullptr) at.depth = states->longest_hit(at, tree.page_size());
        }
        return at.depth;
    }
    /// The checkpoint where a hit ends; kNone without states.
    [[nodiscard]] StateHold hold_state(TreePosition at) noexcept {
        if (states == nullptr || at.depth == 0) return {};
        const ColumnStates::Slot slot = states->find(last_column(at));
        return slot == ColumnStates::kNone ? StateHold() : StateHold(*states, slot);
    }
    [[nodiscard]] BlockId last_column(TreePosition at) const noexcept {
        BlockId column = 0;
        tree.copy_pages(at, at.depth - 1, &column);
        return column;
    }
    /// Free pages first, then evicted ones: those change hands without a detour through the pool.
    /// The caller has made sure that there are enough. Of columns the ids alone: there is room.
    void take_pages(std::int64_t n, BlockId* out, EvictionGuard guard = {}) noexcept {
        const std::int64_t free = std::min(n, pool.num_free());
        detail::require_law(pool.allocate(free, out), "reserve: admitted pages are there");
        if (free == n) return;
        const std::int64_t evicted = tree.evict(n - free, out + free, guard);
        detail::require_law(evicted == n - free, "reserve: admitted pages are there");
        if (states != nullptr) states->forget_columns(out + free, evicted);
        metrics.evicted_pages += evicted;
    }
    /// So many pages in so many columns are free from now on: the caller knows that they can be
    /// had.
    void make_room(std::int64_t n_pages, std::int64_t n_columns, EvictionGuard guard) noexcept {
        metrics.evicted_pages += columns->make_room(n_pages, n_columns, guard);
    }
    /// Only where the peak could move is it worth counting what the cache protects.
    void note_peak() noexcept {
        std::int64_t& peak = metrics.peak_used_pages;
        const std::int64_t not_free = num_pages() - num_free();
        if (not_free > peak) peak = std::max(peak, not_free - num_evictable());
    }

   private:
    // Columns are compared with idle pages: by when they were let go of.
    [[nodiscard]] std::unique_ptr<EvictionPolicy> timed(const Grouping& grouping,
                                                        std::unique_ptr<EvictionPolicy> policy) {
        if (grouping.is_plain()) return policy;
        if (policy == nullptr) policy = std::make_unique<LruPolicy>();
        auto timed = std::make_unique<TimedPolicy>(std::move(policy));
        times_ = timed.get();
        return timed;
    }
};

}  // namespace kvcore
