// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Least recently released first: a ring of candidates in the order of their release.
///
/// Owns: two node ids for each node: its neighbours in the ring, or itself if it is not a
/// candidate.
/// Invariant: the node after kNoNode is the oldest candidate, the node before it the newest. An
/// offered run becomes the first, because the run evicted last was older than all other candidates.
/// Cost: O(1) per verb, in an array that is far smaller than the nodes.
class LruPolicy final : public EvictionPolicy {
   public:
    [[nodiscard]] PolicyInterest interest() const noexcept override {
        PolicyInterest none;
        none.hits = false;
        return none;
    }
    void make_room(NodeId last) override { links_.push_back({last, last}); }
    void insert(NodeId, std::int32_t, std::int32_t, std::int32_t) noexcept override {}
    void hit(NodeId) noexcept override {}
    void release(NodeId node, std::uint64_t time) noexcept override;
    void split(NodeId, NodeId) noexcept override {}
    void erase(NodeId node) noexcept override { withdraw(node); }
    void offer(NodeId node) noexcept override;
    void withdraw(NodeId node) noexcept override;
    [[nodiscard]] NodeId victim() noexcept override { return links_[kNoNode].next; }
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override;

   private:
    struct Link {
        NodeId prev;
        NodeId next;
    };

    void put_between(NodeId prev, NodeId node, NodeId next) noexcept;
    void take_out(NodeId node) noexcept;

    GrowingArray<Link> links_;
};

}  // namespace kvcore
