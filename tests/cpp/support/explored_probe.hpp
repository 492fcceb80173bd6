// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "index/children.hpp"
#include "kvcore/cache_manager.hpp"
#include "manager/impl.hpp"

namespace kvcore {

/// What a test sees of a CacheManager of one replica beyond its verbs. Reads only.
struct CacheManagerProbe {
    using Copy = OwedCopies::Copy;
    using Flight = TierFlight;

    [[nodiscard]] static const std::vector<Copy>& copies(const CacheManager& manager) {
        return manager.impl_->state.copies.all();
    }
    [[nodiscard]] static const std::vector<Flight>& flights(const CacheManager& manager) {
        return manager.impl_->state.flights.all();
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

/// The nodes of the default namespace of a tree, parents first, siblings in their order.
class TreeNodes {
   public:
    explicit TreeNodes(const kvcore::PrefixTree& tree)
        : page_size_(tree.page_size()), policy_(tree.policy()) {
        static_cast<void>(tree.num_evictable());  // counts what is protected
        nodes_.push_back(tree.find_namespace(""));
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            kvcore::for_each_child(nodes_[i],
                                   [&](kvcore::TreeNode* child) { nodes_.push_back(child); });
        }
    }

    [[nodiscard]] const std::vector<const kvcore::TreeNode*>& all() const { return nodes_; }
    /// -1 for a node that is not there.
    [[nodiscard]] int index_of(const kvcore::TreeNode* node) const {
        const auto found = std::find(nodes_.begin(), nodes_.end(), node);
        return found == nodes_.end() ? -1 : static_cast<int>(found - nodes_.begin());
    }
    [[nodiscard]] std::int32_t page_size() const { return page_size_; }

    /// Candidates for eviction, the next victim first.
    [[nodiscard]] std::vector<int> eviction_order() const {
        std::vector<kvcore::NodeId> ids(nodes_.size());
        ids.resize(policy_.upcoming(ids.data(), ids.size()));
        std::vector<int> order;
        for (const kvcore::NodeId id : ids) {
            const auto found =
                std::find_if(nodes_.begin(), nodes_.end(),
                             [id](const kvcore::TreeNode* node) { return node->id == id; });
            order.push_back(static_cast<int>(found - nodes_.begin()));
        }
        return order;
    }

   private:
    std::int32_t page_size_;
    const kvcore::EvictionPolicy& policy_;
    std::vector<const kvcore::TreeNode*> nodes_;
};
