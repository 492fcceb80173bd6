// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Two rings of nodes. A node is in at most one ring.
///
/// Owns: the neighbours of each node and of the two ring ends. A node outside the rings is its own
/// neighbour.
/// Cost: O(1) per verb, in an array of its own.
class Rings {
   public:
    /// As EvictionPolicy::make_room. Entries 0 and 1 are the ends of the rings: node 0 is not a
    /// run.
    void make_room(NodeId last) {
        if (last == kNoNode) links_.make_room(0, {0, 0});
        links_.make_room(last + 1, {last + 1, last + 1});
    }
    /// Returns the first node of a ring; kNoNode if the ring is empty.
    [[nodiscard]] NodeId front(bool ring) const noexcept { return node_of(link(end(ring)).next); }

    void push_back(bool ring, NodeId node) noexcept { put(node, link(end(ring)).prev, end(ring)); }
    void push_front(bool ring, NodeId node) noexcept { put(node, end(ring), link(end(ring)).next); }
    /// Removes a node. Does nothing for a node outside the rings.
    void erase(NodeId node) noexcept {
        const std::uint32_t at = node + 1;
        const Link out = link(at);
        links_[out.prev].next = out.next;
        links_[out.next].prev = out.prev;
        links_[at] = {at, at};
    }
    [[nodiscard]] bool contains(NodeId node) const noexcept {
        return link(node + 1).next != node + 1;
    }
    /// Writes the first `n` nodes of a ring to `out`. Returns the number of nodes written.
    std::size_t first(bool ring, NodeId* out, std::size_t n) const noexcept {
        std::size_t found = 0;
        for (std::uint32_t at = link(end(ring)).next; found < n && at > 1; at = link(at).next) {
            out[found++] = node_of(at);
        }
        return found;
    }

   private:
    // Node `id` has entry `id + 1`. Entries 0 and 1 are the ends.
    struct Link {
        std::uint32_t prev;
        std::uint32_t next;
    };
    static std::uint32_t end(bool ring) noexcept { return ring ? 1 : 0; }
    static NodeId node_of(std::uint32_t at) noexcept { return at > 1 ? at - 1 : kNoNode; }
    [[nodiscard]] const Link& link(std::uint32_t at) const noexcept { return links_[at]; }

    void put(NodeId node, std::uint32_t prev, std::uint32_t next) noexcept {
        const std::uint32_t at = node + 1;
        links_[at] = {prev, next};
        links_[prev].next = at;
        links_[next].prev = at;
    }

    GrowingArray<Link> links_;
};

}  // namespace kvcore
