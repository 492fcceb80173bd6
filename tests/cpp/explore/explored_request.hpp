// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "explore/explored_memory.hpp"
#include "explore/explored_scenario.hpp"
#include "kvcore/request.hpp"

/// A request as its user sees it.
struct ExploredRequest {
    bool is_known = false;    // was claimed before
    bool is_claimed = false;  // is claimed now
    bool has_run = false;     // the model has run, and the step follows
    bool is_sealed = false;   // the model has run since the claim
    kvcore::SequenceHandle sequence;
    std::vector<kvcore::TokenId> tokens;
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t chunk = 0;
    std::uint32_t seen_version = 0;             // of its row, at the last fetch
    std::vector<kvcore::BlockId> seen_columns;  // of its row, at the last fetch

    [[nodiscard]] kvcore::RequestView view() const {
        return {sequence, tokens.data(), start, active, static_cast<std::int64_t>(tokens.size()),
                {}};
    }
    [[nodiscard]] std::int64_t end() const { return static_cast<std::int64_t>(tokens.size()); }

    /// Return the `n` words that a page of its row must have for this prefix.
    [[nodiscard]] std::vector<std::uint64_t> contents_of(const std::vector<kvcore::BlockId>& row,
                                                         kvcore::BlockId page, std::int64_t n,
                                                         std::int32_t page_size) const {
        const auto found = std::find(row.begin(), row.end(), page);
        require(found != row.end(), "a copy goes to a page of its request");
        const std::int64_t first = (found - row.begin()) * page_size;
        require(first + n <= start, "a copy is of what is written");
        std::vector<std::uint64_t> contents;
        for (std::int64_t i = 1; i <= n; ++i) {
            contents.push_back(content_of(tokens.data(), first + i));
        }
        return contents;
    }
};
