// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcore/page_moves.hpp"
#include "level/level.hpp"

namespace kvcore {

/// Calls visit(move) for each page copy that copies one column to another. Skips lanes without
/// tokens to copy, and lanes without a page in the source or the destination.
template <class Visit>
void for_each_page_move(const Replica& home, const PageMove& columns, const Visit& visit) {
    const Grouping& grouping = home.grouping();
    for (const Grouping::Bundle& bundle : grouping.bundles()) {
        const std::int32_t page_size = grouping.column_tokens() / bundle.pages_per_column;
        for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
            PageMove move = columns;
            move.num_tokens = std::min(page_size, columns.num_tokens - i * page_size);
            move.source = home.page(columns.source, bundle.first_lane + i);
            move.destination = home.page(columns.destination, bundle.first_lane + i);
            const bool is_copied = move.num_tokens > 0 && move.source != ColumnPages::kNoPage &&
                                   move.destination != ColumnPages::kNoPage;
            if (is_copied) visit(move);
        }
    }
}

/// The maximum number of page copies for the copy of one column.
[[nodiscard]] inline std::size_t moves_per_column(const Grouping& grouping) noexcept {
    return static_cast<std::size_t>(grouping.num_lanes());
}

}  // namespace kvcore
