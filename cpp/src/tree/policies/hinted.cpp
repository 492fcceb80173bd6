// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/hinted.hpp"

#include <algorithm>

namespace kvcore {

// Pages of a host tier come with the hint of the device. A use without a hint changes nothing
// before its release.
void HintedPolicy::retain(NodeId node, const Retention& asked) noexcept {
    const std::int64_t returns = at_present(asked.returns);
    if (returns != ReturnTime::kUnknown) set(node, returns);
}

void HintedPolicy::expect(NodeId node, std::int64_t returns, bool is_shared) noexcept {
    returns = at_present(returns);
    set(node, is_shared ? std::min(returns, runs_[node].returns) : returns);
}

void HintedPolicy::set(NodeId node, std::int64_t returns) noexcept {
    if (runs_[node].returns == returns) return;
    runs_[node].returns = returns;
    changed(node);
}

}  // namespace kvcore
