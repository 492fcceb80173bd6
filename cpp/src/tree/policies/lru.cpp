// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/lru.hpp"

namespace kvcore {

void LruPolicy::put_between(NodeId prev, NodeId node, NodeId next) noexcept {
    links_[node] = {prev, next};
    links_[prev].next = node;
    links_[next].prev = node;
}

// Changes nothing for a node outside the ring, which links to itself.
void LruPolicy::take_out(NodeId node) noexcept {
    const Link link = links_[node];
    links_[link.prev].next = link.next;
    links_[link.next].prev = link.prev;
}

void LruPolicy::release(NodeId node, std::uint64_t) noexcept {
    if (links_[kNoNode].prev == node) return;
    take_out(node);
    put_between(links_[kNoNode].prev, node, kNoNode);
}

void LruPolicy::offer(NodeId node) noexcept { put_between(kNoNode, node, links_[kNoNode].next); }

void LruPolicy::withdraw(NodeId node) noexcept {
    take_out(node);
    links_[node] = {node, node};
}

std::size_t LruPolicy::upcoming(NodeId* out, std::size_t n) const noexcept {
    std::size_t found = 0;
    for (NodeId node = kNoNode; found < n && links_[node].next != kNoNode; ++found) {
        out[found] = node = links_[node].next;
    }
    return found;
}

}  // namespace kvcore
