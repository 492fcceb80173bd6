// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "kvcore/cache_config.hpp"
#include "kvcore/metrics.hpp"
#include "layers/grouping.hpp"
#include "level/level.hpp"

namespace kvcore {

/// The level of a replica's device, and the level of its host tier.
///
/// Owns: both levels, and the replica's counters.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: that of the methods of Level.
struct Replica : Level {
    /// Uses LRU unless a policy is given.
    Replica(const CacheConfig& config, const Grouping& grouping,
            std::unique_ptr<EvictionPolicy> policy = nullptr)
        : Level(grouping,
                {config.num_pages, config.num_state_slots, config.first_page,
                 count_columns(config, grouping, config.num_pages)},
                std::move(policy), config.quotas) {
        if (config.host_pages > 0) make_host(config, grouping);
    }

    std::unique_ptr<Level> host;     // nullptr without a host tier
    std::int64_t num_sequences = 0;  // claimed
    Metrics metrics;

    /// Calls visit(level) for the device's level, and for the host tier's level if it exists.
    template <class Visit>
    void for_each_level(const Visit& visit) {
        visit(static_cast<Level&>(*this));
        if (host != nullptr) visit(*host);
    }
    /// The longest prefix that the host tier has: see `find`. No node without a host tier.
    [[nodiscard]] TreePosition find_stored(std::string_view name_space, const TokenId* tokens,
                                           std::int64_t n) const noexcept {
        return host == nullptr ? TreePosition{} : host->find(name_space, tokens, n);
    }
    /// Holds the checkpoint at the end of a prefix in the host tier if it is ready; otherwise
    /// returns an empty hold.
    [[nodiscard]] StateHold hold_stored_state(TreePosition below) noexcept {
        return host == nullptr ? StateHold() : host->hold_state(below);
    }
    /// A sequence with a hit of `n` tokens is removed: records where the hit ended, unless the
    /// sequence was cut to fewer committed tokens.
    void note_hit(TreePosition committed, std::int64_t n) noexcept {
        const std::int64_t whole = n / tree.page_size();
        if (!stores_states() || whole == 0 || whole > committed.depth) return;
        unreachable().note_hit({committed.node, static_cast<std::int32_t>(whole)});
    }
    /// True if the host tier keeps checkpoints.
    [[nodiscard]] bool stores_states() const noexcept {
        return host != nullptr && host->states != nullptr;
    }
    /// True if pages of the host tier are written to lower stores.
    [[nodiscard]] bool has_stores() const noexcept {
        return host != nullptr && host->keys != nullptr;
    }
    /// Pages that the host tier holds.
    [[nodiscard]] std::int64_t num_stored() const noexcept {
        return host == nullptr ? 0 : host->num_cached();
    }
    /// The counters, including the counters of both levels.
    [[nodiscard]] Metrics counted() const noexcept {
        Metrics sum = metrics;
        sum.evicted_pages += num_evicted();
        sum.evicted += evicted();
        if (host != nullptr) sum.host_evicted += host->evicted();
        return sum;
    }
    void reset_counts() noexcept {
        metrics = {};
        reset_level_counts();
        if (host != nullptr) host->reset_level_counts();
        note_peak();
    }
    /// Updates the peak of used pages. Counts evictable pages only if the peak may change.
    void note_peak() noexcept {
        std::int64_t& peak = metrics.peak_used_pages;
        const std::int64_t not_free = num_pages() - num_free();
        if (not_free > peak) peak = std::max(peak, not_free - num_evictable());
    }
    /// All zeros without states.
    [[nodiscard]] StateStats state_stats() const noexcept {
        if (states == nullptr) return {};
        StateStats stats = states->stats();
        if (!stores_states()) return stats;
        const StateStats below = host->states->stats();
        stats.host_slots = below.total_slots;
        stats.host_checkpoints = below.checkpoints;
        stats.stored_checkpoints = below.checkpoints_made;
        stats.loaded_checkpoints = below.checkpoint_hits;
        return stats;
    }

   private:
    [[nodiscard]] static std::int64_t count_columns(const CacheConfig& config,
                                                    const Grouping& grouping,
                                                    std::int64_t num_pages) noexcept {
        return grouping.most_columns(num_pages, config.max_sequences, config.max_seq_len);
    }
    void make_host(const CacheConfig& config, const Grouping& grouping) {
        host =
            std::make_unique<Level>(grouping,
                                    Level::Size{config.host_pages, config.num_host_state_slots, 0,
                                                count_columns(config, grouping, config.host_pages)},
                                    make_policy(config.host_eviction, config.page_size));
        if (config.has_stores) host->keys = std::make_unique<RecordKeys>(host->pool.num_blocks());
        if (config.num_host_state_slots > 0) unreachable().assume_tier();
    }
};

}  // namespace kvcore
