// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "oracle/oracle.hpp"

/// Rows of one replica with the same leading pages, and the number of tokens that all have written.
using SharedRows = std::tuple<std::int32_t, std::vector<std::int32_t>, std::int64_t>;

/// Compute them by comparing the page ids of all rows, for every length.
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
        // Lengths at which rows can differ: ends of pages, and ends of written tokens.
        std::set<std::int64_t> lengths;
        for (const Request* row : rows) {
            const std::int64_t written = checked.oracle().written(*row);
            lengths.insert(written);
            for (std::int64_t at = 0; at < written; at += config.page_size) lengths.insert(at);
        }
        lengths.erase(0);
        std::map<std::vector<std::int32_t>, std::int64_t> longest;
        for (const std::int64_t tokens : lengths) {
            std::map<std::vector<BlockId>, std::vector<std::int32_t>> holders;  // by leading pages
            for (std::int64_t i = 0; i < count(rows); ++i) {
                const Request& row = *item(rows, i);
                if (checked.oracle().written(row) < tokens) continue;
                std::vector<BlockId> ids = checked.manager().pages_of(row.sequence);
                ids.resize(static_cast<std::size_t>(kvcore::ceil_div(tokens, config.page_size)));
                holders[ids].push_back(static_cast<std::int32_t>(i));
            }
            for (const auto& [ids, who] : holders) {
                if (who.size() > 1) longest[who] = tokens;
            }
        }
        for (const auto& [who, tokens] : longest) all.emplace_back(replica, who, tokens);
    }
    std::sort(all.begin(), all.end());
    return all;
}
