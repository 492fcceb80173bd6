// SPDX-License-Identifier: Apache-2.0
// The eviction policies that come with kvcore, by name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "kvcore/eviction.hpp"

namespace kvcore {

/// What goes first. A use is a reservation or an insertion that walks the run, the first included.
enum class EvictionOrder : std::uint8_t {
    kLru,       // least recently released
    kLfu,       // fewest uses, then least recently used
    kSlru,      // used once before those used again, each by recency
    kFifo,      // entered first
    kPriority,  // lowest priority, then least recently used
    kCost,      // least prefill time saved per byte, with ageing
    kArc,       // by recency or by frequency, as what returns after its eviction tells
};

/// An order and what it is told beforehand.
struct EvictionConfig {
    EvictionOrder order = EvictionOrder::kLru;
    // kCost: tokens in front of one for which attention takes as long as all else that is computed
    // for it; at least 1.
    std::int32_t attention_tokens = 24'576;
};

/// By its name: lru, lfu, slru, fifo, priority, cost or arc. Throws std::invalid_argument for
/// another one.
[[nodiscard]] EvictionOrder eviction_order(std::string_view name);

/// Makes a policy for each tree that asks.
using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

/// A policy for a tree whose pages have so many tokens. Throws std::invalid_argument unless
/// page_size and attention_tokens are at least 1, and for an order that there is not.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_policy(const EvictionConfig& config,
                                                          std::int32_t page_size);

}  // namespace kvcore
