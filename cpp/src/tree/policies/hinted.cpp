// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/hinted.hpp"

#include <algorithm>

namespace kvcore {

void HintedPolicy::make_room(NodeId last) {
    RankedPolicy::make_room(last);
    ending_.make_room(last);
}

void HintedPolicy::insert(NodeId node, std::int32_t depth, std::int32_t pages,
                          std::int32_t priority) noexcept {
    RankedPolicy::insert(node, depth, pages, priority);
    ending_.erase(node);
}

// Pages of a host tier come with the hint of the device. A use without a hint changes nothing
// before its release.
void HintedPolicy::retain(NodeId node, const Retention& asked) noexcept {
    const std::int64_t returns = at_present(asked.returns);
    if (returns != ReturnTime::kUnknown) set(node, returns);
}

void HintedPolicy::split(NodeId upper, NodeId lower) noexcept {
    RankedPolicy::split(upper, lower);
    watch(upper);
}

void HintedPolicy::erase(NodeId node) noexcept {
    ending_.erase(node);
    RankedPolicy::erase(node);
}

void HintedPolicy::expect(NodeId node, std::int64_t returns, bool is_shared) noexcept {
    returns = at_present(returns);
    set(node, is_shared ? std::min(returns, runs_[node].returns) : returns);
}

void HintedPolicy::advance(std::int64_t now) noexcept {
    constexpr std::int64_t kFirst = std::numeric_limits<std::int64_t>::min();
    earliest_ = now < kFirst + grace_ ? kFirst : now - grace_;
    for (NodeId node = ending_.first(); node != kNoNode && ending_.first_key() < earliest_;
         node = ending_.first()) {
        set(node, ReturnTime::kUnknown);
    }
}

void HintedPolicy::set(NodeId node, std::int64_t returns) noexcept {
    if (runs_[node].returns == returns) return;
    runs_[node].returns = returns;
    watch(node);
    move(node);
}

void HintedPolicy::watch(NodeId node) noexcept {
    const std::int64_t returns = runs_[node].returns;
    if (returns <= ReturnTime::kLatest) {
        ending_.put(node, returns);
    } else {
        ending_.erase(node);
    }
}

}  // namespace kvcore
