// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/priority.hpp"

#include <algorithm>

namespace kvcore {

void PriorityPolicy::make_room(NodeId last) {
    RankedPolicy::make_room(last);
    ending_.make_room(last);
}

void PriorityPolicy::retain(NodeId node, const Retention& asked) noexcept {
    const Retention retention = at_present(asked);
    PriorityRun& run = runs_[node];
    if (retention.until == Retention::kForever) {
        run.lasting = std::max(run.lasting, retention.priority);
    }
    Retention& highest = run.highest;
    if (retention.priority < highest.priority) return;
    if (retention.priority == highest.priority && retention.until <= highest.until) return;
    highest = retention;
    watch(node);
    move(node);
}

// If both priorities last for ever, or both end, the run takes the later end.
bool PriorityPolicy::joins(NodeId node, const Retention& asked) const noexcept {
    const Retention retention = at_present(asked);
    const Retention& highest = runs_[node].highest;
    return highest.priority == retention.priority &&
           (highest.until == Retention::kForever) == (retention.until == Retention::kForever);
}

void PriorityPolicy::split(NodeId upper, NodeId lower) noexcept {
    RankedPolicy::split(upper, lower);
    watch(upper);
}

void PriorityPolicy::erase(NodeId node) noexcept {
    ending_.erase(node);
    RankedPolicy::erase(node);
}

void PriorityPolicy::advance(std::int64_t now) noexcept {
    now_ = now;
    for (NodeId node = ending_.first(); node != kNoNode && ending_.first_key() <= now;
         node = ending_.first()) {
        PriorityRun& run = runs_[node];
        run.highest = {run.lasting, Retention::kForever};
        ending_.erase(node);
        move(node);
    }
}

void PriorityPolicy::watch(NodeId node) noexcept {
    const std::int64_t until = runs_[node].highest.until;
    if (until == Retention::kForever) {
        ending_.erase(node);
    } else {
        ending_.put(node, until);
    }
}

}  // namespace kvcore
