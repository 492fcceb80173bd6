// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "cache/impl.hpp"

namespace kvcore {

/// What a test sees of a CacheManager beyond its verbs. Reads only. Without an index: of replica 0.
struct CacheManagerProbe {
    using Copy = OwedCopies::Copy;
    using Flight = TierFlight;

    [[nodiscard]] static const Replica& replica(const CacheManager& manager, std::int32_t index) {
        return manager.impl_->state.replica_at(index);
    }
    [[nodiscard]] static const Grouping& grouping(const CacheManager& manager) {
        return manager.impl_->state.grouping;
    }
    [[nodiscard]] static const Sequence& sequence(const CacheManager& manager,
                                                  SequenceHandle handle) {
        return manager.impl_->state.sequences.at(handle);
    }
    [[nodiscard]] static const StateRow& state(const CacheManager& manager, SequenceHandle handle) {
        return manager.impl_->state.states.of(handle);
    }
    [[nodiscard]] static const std::vector<Copy>& copies(const CacheManager& manager) {
        return manager.impl_->state.copies.all();
    }
    [[nodiscard]] static const TierFlights& flights(const CacheManager& manager) {
        return manager.impl_->state.flights;
    }
    /// nullptr when it is not claimed.
    [[nodiscard]] static const Sequence* find(const CacheManager& manager, SequenceHandle handle) {
        return manager.impl_->state.sequences.find(handle);
    }
    [[nodiscard]] static const BlockPool& pool(const CacheManager& manager) {
        return manager.impl_->state.replicas[0]->pool;
    }
    [[nodiscard]] static const PrefixTree& tree(const CacheManager& manager) {
        return manager.impl_->state.replicas[0]->tree;
    }
    /// nullptr without a host tier.
    [[nodiscard]] static TierIndex* host(const CacheManager& manager) {
        return manager.impl_->state.replicas[0]->host.get();
    }
    /// Number of the flight that stores for a sequence; 0: none.
    [[nodiscard]] static std::uint32_t store_of(const CacheManager& manager,
                                                SequenceHandle handle) {
        const auto* standing = manager.impl_->state.flights.find(handle);
        return standing == nullptr ? 0 : standing->storing;
    }
    /// Where its prefix in the host tier ends; nullptr: unknown.
    [[nodiscard]] static const TreeNode* host_node_of(const CacheManager& manager,
                                                      SequenceHandle handle) {
        const auto* standing = manager.impl_->state.flights.find(handle);
        return standing == nullptr ? nullptr : standing->place.node();
    }
    /// What is remembered of a page for the write policy; 0: nothing.
    [[nodiscard]] static int mark_of(const CacheManager& manager, BlockId page) {
        const StoreRules& rules = manager.impl_->state.flights.rules();
        return rules.has_marks() ? rules.mark(0, page) : 0;
    }
    [[nodiscard]] static bool is_due(const CacheManager& manager, SequenceHandle handle) {
        return manager.impl_->state.flights.is_due(handle);
    }
    /// Of the last batch.
    [[nodiscard]] static std::uint32_t& batch_stamp(CacheManager& manager) {
        return manager.impl_->rows.stamp_;
    }
    [[nodiscard]] static const TreeNode* pinned_node(const CacheManager& manager, PinHandle pin) {
        return manager.impl_->pins.node_of(pin);
    }
};

}  // namespace kvcore
