// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcore/page_moves.hpp"
#include "level/replica.hpp"

namespace kvcore {

/// Calls visit(move) for each page copy that copies one column to another. Skips lanes without
/// tokens to copy, and lanes without a page in the source or the destination. Without groups a
/// column is one page, and its copy is the only page copy.
template <class Visit>
void for_each_page_move(const Replica& home, const PageMove& columns, const Visit& visit) {
    if (home.columns == nullptr) return visit(columns);
    const Grouping& grouping = home.columns->grouping();
    for (const Grouping::Bundle& bundle : grouping.bundles()) {
        const std::int32_t page_size = grouping.column_tokens() / bundle.pages_per_column;
        for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
            PageMove move = columns;
            move.num_tokens = std::min(page_size, columns.num_tokens - i * page_size);
            move.source = home.columns->page(columns.source, bundle.first_lane + i);
            move.destination = home.columns->page(columns.destination, bundle.first_lane + i);
            const bool is_copied = move.num_tokens > 0 && move.source != ColumnPages::kNoPage &&
                                   move.destination != ColumnPages::kNoPage;
            if (is_copied) visit(move);
        }
    }
}

/// The maximum number of page copies for the copy of one column.
[[nodiscard]] inline std::size_t moves_per_column(const Grouping& grouping) noexcept {
    return static_cast<std::size_t>(std::max(1, grouping.num_lanes()));
}

}  // namespace kvcore
