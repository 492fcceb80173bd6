// SPDX-License-Identifier: Apache-2.0
// Every eviction policy of kvcore, for tests that run with each.
#pragma once

#include <array>

#include "kvcore/eviction.hpp"

namespace eviction_orders {

inline constexpr std::array kAll = {
    kvcore::EvictionOrder::kLru,  kvcore::EvictionOrder::kLfu,      kvcore::EvictionOrder::kSlru,
    kvcore::EvictionOrder::kFifo, kvcore::EvictionOrder::kPriority, kvcore::EvictionOrder::kCost,
    kvcore::EvictionOrder::kArc,  kvcore::EvictionOrder::kHinted,
};

}  // namespace eviction_orders
