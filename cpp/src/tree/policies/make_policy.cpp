// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "kvcore/errors.hpp"
#include "kvcore/eviction.hpp"
#include "tree/policies/arc.hpp"
#include "tree/policies/cost.hpp"
#include "tree/policies/fifo.hpp"
#include "tree/policies/hinted.hpp"
#include "tree/policies/lfu.hpp"
#include "tree/policies/lru.hpp"
#include "tree/policies/priority.hpp"
#include "tree/policies/slru.hpp"

namespace kvcore {
namespace {

std::unique_ptr<EvictionPolicy> make_cost_policy(std::int32_t attention_tokens,
                                                 std::int32_t page_size) {
    if (attention_tokens < 1) {
        throw std::invalid_argument(
            detail::concat("attention_tokens is ", attention_tokens, ", must be at least 1 token"));
    }
    const std::int32_t pages = std::max(1, attention_tokens / page_size);
    return std::make_unique<CostPolicy>(CostRank(static_cast<std::uint64_t>(pages)));
}

std::unique_ptr<EvictionPolicy> make_hinted_policy(std::int64_t return_grace) {
    if (return_grace < 0) {
        throw std::invalid_argument(
            detail::concat("return_grace is ", return_grace, ", must be at least 0 units of time"));
    }
    return std::make_unique<HintedPolicy>(return_grace);
}

constexpr std::pair<std::string_view, EvictionOrder> kNames[] = {
    {"lru", EvictionOrder::kLru},           {"lfu", EvictionOrder::kLfu},
    {"slru", EvictionOrder::kSlru},         {"fifo", EvictionOrder::kFifo},
    {"priority", EvictionOrder::kPriority}, {"cost", EvictionOrder::kCost},
    {"arc", EvictionOrder::kArc},           {"hinted", EvictionOrder::kHinted},
};

}  // namespace

EvictionOrder eviction_order(std::string_view name) {
    for (const auto& [known, order] : kNames) {
        if (known == name) return order;
    }
    std::string names;
    for (const auto& known : kNames) {
        names.append(names.empty() ? "" : ", ").append(known.first);
    }
    throw std::invalid_argument(
        detail::concat("eviction is \"", std::string(name), "\", must be one of ", names));
}

std::unique_ptr<EvictionPolicy> make_policy(const EvictionConfig& config, std::int32_t page_size) {
    if (page_size < 1) {
        throw std::invalid_argument(
            detail::concat("page_size is ", page_size, ", must be at least 1 token"));
    }
    switch (config.order) {
        case EvictionOrder::kLru:
            return std::make_unique<LruPolicy>();
        case EvictionOrder::kLfu:
            return std::make_unique<LfuPolicy>();
        case EvictionOrder::kSlru:
            return std::make_unique<SlruPolicy>();
        case EvictionOrder::kFifo:
            return std::make_unique<FifoPolicy>();
        case EvictionOrder::kPriority:
            return std::make_unique<PriorityPolicy>();
        case EvictionOrder::kCost:
            return make_cost_policy(config.attention_tokens, page_size);
        case EvictionOrder::kArc:
            return std::make_unique<ArcPolicy>();
        case EvictionOrder::kHinted:
            return make_hinted_policy(config.return_grace);
    }
    throw std::invalid_argument(detail::concat("eviction order ", static_cast<int>(config.order),
                                               " does not exist; take one of EvictionOrder"));
}

}  // namespace kvcore
