// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/priority.hpp"

#include <algorithm>

namespace kvcore {

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
    changed(node);
}

// If both priorities last for ever, or both end, the run takes the later end.
bool PriorityPolicy::joins(NodeId node, const Retention& asked) const noexcept {
    const Retention retention = at_present(asked);
    const Retention& highest = runs_[node].highest;
    return highest.priority == retention.priority &&
           (highest.until == Retention::kForever) == (retention.until == Retention::kForever);
}

}  // namespace kvcore
