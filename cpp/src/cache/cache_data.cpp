// SPDX-License-Identifier: Apache-2.0
#include "cache/cache_data.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "kvcore/errors.hpp"
#include "kvcore/store_moves.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

void require_count(const char* name, std::int64_t value, std::int64_t most,
                   std::int64_t least = 1) {
    if (value < least || value > most) {
        throw std::invalid_argument(
            detail::concat(name, " is ", value, ", must be ", least, " .. ", most));
    }
}

void require_bounds(const CacheConfig& config) {
    for_each_option([&config](const char* name, auto member, OptionBounds bounds) {
        using Value = std::decay_t<decltype(config.*member)>;
        if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>) {
            require_count(name, config.*member, bounds.most, bounds.least);
        }
    });
}

void require_states(const CacheConfig& config) {
    constexpr std::int64_t kInt32 = std::numeric_limits<std::int32_t>::max();
    const bool has_host_slots = !config.states.empty() && config.host_pages > 0;
    require_count("num_host_states", config.num_host_state_slots, has_host_slots ? kInt32 : 0, 0);
    if (config.states.empty()) return require_count("num_states", config.num_state_slots, 0, 0);
    if (config.num_state_slots < config.max_sequences) {
        throw std::invalid_argument(detail::concat("num_states is ", config.num_state_slots,
                                                   ", must be at least ", config.max_sequences,
                                                   ": one slot for each claimed sequence"));
    }
    require_count("num_states", config.num_state_slots, kInt32);
    for (const StateGroup& group : config.states) {
        if (group.interval >= 0 && group.interval % config.page_size == 0) continue;
        throw std::invalid_argument(detail::concat("interval is ", group.interval,
                                                   ", must be a multiple of the page size ",
                                                   config.page_size, ", or 0"));
    }
}

void require_stores(const CacheConfig& config) {
    if (!config.has_stores || config.host_pages > 0) return;
    throw std::invalid_argument(
        "host_pages is 0, must be at least 1 with stores: the host tier feeds the stores");
}

// Each part of a column is a bit of a word; the last bit is the checkpoint.
void require_parts(const CacheConfig& config, const Grouping& grouping) {
    if (!config.has_stores || grouping.num_lanes() <= kStatePart) return;
    throw std::invalid_argument(detail::concat("a column has ", grouping.num_lanes(),
                                               " pages, must be at most ", kStatePart,
                                               " with stores; use fewer or larger pages"));
}

// A policy of the caller decides itself whether it uses priorities.
void require_tier(const CacheConfig& config, bool has_own_policy) {
    if (config.host_pages > 0 && !config.prefix_caching) {
        throw std::invalid_argument(
            detail::concat("host_pages is ", config.host_pages,
                           ", must be 0 without prefix_caching: the host tier holds cached pages"));
    }
    if (has_own_policy) return;
    if (config.host_min_priority > 0 && config.eviction.order != EvictionOrder::kPriority) {
        throw std::invalid_argument(detail::concat(
            "host_min_priority is ", config.host_min_priority,
            ", must be 0 unless eviction uses priorities: else pages have no priority; use "
            "priority eviction"));
    }
    if (config.host_eviction.order == EvictionOrder::kHinted &&
        config.eviction.order != EvictionOrder::kHinted) {
        throw std::invalid_argument(
            "host_eviction is hinted, must be another policy unless eviction is also hinted: the "
            "tier gets hints from the device; use hinted for both");
    }
    if (config.host_eviction.order == EvictionOrder::kPriority &&
        config.eviction.order != EvictionOrder::kPriority) {
        throw std::invalid_argument(
            "host_eviction is priority, must be another policy unless eviction is also priority: "
            "the tier gets priorities from the device; use priority for both");
    }
}

const CacheConfig& checked(const CacheConfig& config, bool has_own_policy) {
    require_bounds(config);
    require_count("num_pages", config.num_pages,
                  std::numeric_limits<std::int32_t>::max() - config.first_page);
    require_tier(config, has_own_policy);
    require_states(config);
    require_stores(config);
    quotas::check(config);
    return config;
}

std::vector<std::unique_ptr<Replica>> make_replicas(const CacheConfig& config,
                                                    const Grouping& grouping,
                                                    const PolicyFactory& make) {
    std::vector<std::unique_ptr<Replica>> replicas;
    for (std::int32_t i = 0; i < config.num_replicas; ++i) {
        replicas.push_back(std::make_unique<Replica>(
            config, grouping, make ? make() : make_policy(config.eviction, config.page_size)));
    }
    return replicas;
}

}  // namespace

CacheData::CacheData(const CacheConfig& given, const PolicyFactory& make_policy)
    : config(checked(given, make_policy != nullptr)),
      grouping(config.page_size, config.groups),
      replicas(make_replicas(config, grouping, make_policy)),
      windows(grouping, config.max_draft_tokens),
      states(config),
      ledger(config, grouping, replicas, sequences, windows),
      priorities(config.page_size),
      most_pooled_tokens_(grouping.is_plain()
                              ? config.num_pages * config.page_size
                              : grouping.most_tokens(config.num_pages, {config.reserve_chunks,
                                                                        windows.kept_tokens()})) {
    require_parts(config, grouping);
    if (config.event_pages > 0) events = std::make_unique<EventLog>(config, grouping, replicas);
    if (config.explain_pages > 0) misses = std::make_unique<MissLog>(config, replicas);
    if (config.advice_sample > 0) {
        const bool is_lru = !make_policy && config.eviction.order == EvictionOrder::kLru;
        advice = std::make_unique<AdviceLog>(config, replicas, is_lru);
    }
}

void CacheData::throw_no_replica(std::int32_t index) const {
    throw std::out_of_range(detail::concat("replica ", index, " does not exist, there are ",
                                           config.num_replicas, ", counted from 0"));
}

}  // namespace kvcore
