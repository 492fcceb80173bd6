// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cache/impl.hpp"
#include "kvcore/cache_manager.hpp"

namespace kvcore {

/// The internal state of a CacheManager for tests, read-only. Without an index: replica 0.
struct CacheManagerProbe {
    using Copy = OwedCopies::Copy;
    using Flight = TierFlight;

    [[nodiscard]] static const Replica& replica(const CacheManager& manager, std::int32_t index) {
        return manager.impl_->cache.replica_at(index);
    }
    [[nodiscard]] static const Grouping& grouping(const CacheManager& manager) {
        return manager.impl_->cache.grouping;
    }
    [[nodiscard]] static const Sequence& sequence(const CacheManager& manager,
                                                  SequenceHandle handle) {
        return manager.impl_->cache.sequences.at(handle);
    }
    [[nodiscard]] static const RecurrentState& state(const CacheManager& manager,
                                                     SequenceHandle handle) {
        return manager.impl_->cache.states.of(handle);
    }
    [[nodiscard]] static const std::vector<Copy>& copies(const CacheManager& manager) {
        return manager.impl_->cache.ledger.copies.all();
    }
    [[nodiscard]] static const TierFlights& flights(const CacheManager& manager) {
        return manager.impl_->cache.ledger.flights;
    }
    /// nullptr if the handle is not claimed.
    [[nodiscard]] static const Sequence* find(const CacheManager& manager, SequenceHandle handle) {
        return manager.impl_->cache.sequences.find(handle);
    }
    [[nodiscard]] static const BlockPool& pool(const CacheManager& manager) {
        return manager.impl_->cache.replicas[0]->pool;
    }
    [[nodiscard]] static const PrefixTree& tree(const CacheManager& manager) {
        return manager.impl_->cache.replicas[0]->tree;
    }
    /// nullptr without a host tier.
    [[nodiscard]] static Level* host(const CacheManager& manager) {
        return manager.impl_->cache.replicas[0]->host.get();
    }
    /// The number of the flight that stores for a sequence; 0: no flight.
    [[nodiscard]] static std::uint32_t store_of(const CacheManager& manager,
                                                SequenceHandle handle) {
        const auto* standing = manager.impl_->cache.ledger.flights.find(handle);
        return standing == nullptr ? 0 : standing->storing;
    }
    /// The end of the sequence's prefix in the host tier; nullptr: unknown.
    [[nodiscard]] static const TreeNode* host_node_of(const CacheManager& manager,
                                                      SequenceHandle handle) {
        const auto* standing = manager.impl_->cache.ledger.flights.find(handle);
        return standing == nullptr ? nullptr : standing->place.node();
    }
    /// The write policy's mark of a page; 0: no mark.
    [[nodiscard]] static int mark_of(const CacheManager& manager, BlockId page) {
        const StoreRules& rules = manager.impl_->cache.ledger.flights.rules();
        return rules.has_marks() ? rules.mark(0, page) : 0;
    }
    [[nodiscard]] static bool is_due(const CacheManager& manager, SequenceHandle handle) {
        return manager.impl_->cache.ledger.flights.is_due(handle);
    }
    /// The stamp of the last batch.
    [[nodiscard]] static std::uint32_t& batch_stamp(CacheManager& manager) {
        return manager.impl_->cache.rows.stamp;
    }
    [[nodiscard]] static const TreeNode* pinned_node(const CacheManager& manager, PinHandle pin) {
        return manager.impl_->pins.node_of(pin);
    }
};

}  // namespace kvcore
