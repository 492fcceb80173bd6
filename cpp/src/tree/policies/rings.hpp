// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/eviction.hpp"
#include "tree/node_array.hpp"

namespace kvcore {

/// Two rings of nodes, each of which is in one of them or in none.
///
/// Owns: the neighbours of each node, and those of the two rings' ends; itself where it is in none.
/// Cost: O(1) per verb, in an array of its own.
class Rings {
   public:
    /// As EvictionPolicy::make_room. Node 0, which is no run, and a second entry are the ends.
    void make_room(NodeId last) {
        if (last == kNoNode) links_.make_room(0, {0, 0});
        links_.make_room(last + 1, {last + 1, last + 1});
    }
    /// kNoNode where the ring is empty.
    [[nodiscard]] NodeId front(bool ring) const noexcept { return node_of(link(end(ring)).next); }

    void push_back(bool ring, NodeId node) noexcept { put(node, link(end(ring)).prev, end(ring)); }
    void push_front(bool ring, NodeId node) noexcept { put(node, end(ring), link(end(ring)).next); }
    /// Nothing where it is in none.
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
    /// The first `n` nodes of a ring to `out`. Returns how many.
    std::size_t first(bool ring, NodeId* out, std::size_t n) const noexcept {
        std::size_t found = 0;
        for (std::uint32_t at = link(end(ring)).next; found < n && at > 1; at = link(at).next) {
            out[found++] = node_of(at);
        }
        return found;
    }

   private:
    // A node's entry is one behind its id: the ends are entries 0 and 1.
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

    NodeArray<Link> links_;
};

}  // namespace kvcore
