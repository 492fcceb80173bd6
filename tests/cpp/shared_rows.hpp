// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "oracle.hpp"

/// Rows of one replica that hold the same leading pages, and how many tokens all have written.
using SharedRows = std::tuple<std::int32_t, std::vector<std::int32_t>, std::int64_t>;

/// Worked out by comparing the page ids of all rows, from every length on.
template <class Manager>
std::vector<SharedRows> find_shared_rows(Manager& checked, const std::vector<Request*>& batch) {
    const kvcore::CacheConfig& config = checked.config();
    std::vector<SharedRows> all;
    for (std::int32_t replica = 0; replica < config.num_replicas; ++replica) {
        std::vector<const Request*> rows;
        for (const Request* request : batch) {
            const bool is_here = checked.oracle().claim_of(*request).replica == replica;
            if (is_here) rows.push_back(request);
        }
        std::map<std::vector<BlockId>, std::vector<std::int32_t>> holders;  // of leading pages
        for (std::int64_t i = 0; i < count(rows); ++i) {
            std::vector<BlockId> ids = checked.manager().pages_of(item(rows, i)->sequence);
            for (; !ids.empty(); ids.pop_back()) {
                holders[ids].push_back(static_cast<std::int32_t>(i));
            }
        }
        std::map<std::vector<std::int32_t>, std::int64_t> longest;  // pages
        for (const auto& [ids, who] : holders) {
            if (who.size() > 1) longest[who] = std::max(longest[who], count(ids));
        }
        for (const auto& [who, pages] : longest) {
            std::int64_t tokens = pages * config.page_size;
            for (const std::int32_t row : who) {
                tokens = std::min(tokens, checked.oracle().written(*item(rows, row)));
            }
            if (tokens > 0) all.emplace_back(replica, who, tokens);
        }
    }
    std::sort(all.begin(), all.end());
    return all;
}
