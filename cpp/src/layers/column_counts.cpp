// SPDX-License-Identifier: Apache-2.0
// What columns have, counted and checked.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/errors.hpp"
#include "layers/column_pages.hpp"

namespace kvcore {

std::vector<GroupStats> ColumnPages::stats() const {
    std::vector<GroupStats> stats;
    for (const Grouping::Group& group : grouping_.groups()) {
        GroupStats& each = stats.emplace_back();
        if (group.window >= 0) {
            each.given_back = given_back_[static_cast<std::size_t>(group.window)];
            each.filled = filled_[static_cast<std::size_t>(group.window)];
        }
        const std::size_t counted =
            group.window < 0 ? ColumnCounts::kFull : static_cast<std::size_t>(group.window);
        each.stored_pages = stored_.of[counted] * group.num_lanes;
        each.loaded_pages = loaded_.of[counted] * group.num_lanes;
        for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
            const auto column = static_cast<BlockId>(c);
            if (columns_.ref_count(column) == 0) continue;
            const bool has_pages = page(column, group.first_lane) != kNoPage;
            const bool is_read =
                group.window < 0 || !is_idle(column, static_cast<std::size_t>(group.window));
            if (has_pages && is_read) each.held_pages += group.num_lanes;
            if (!is_cached_[static_cast<std::size_t>(column)]) continue;
            (has_pages ? each.cached_pages : each.holes) += group.num_lanes;
        }
        // Of what keeps everything, the tree alone knows what nobody holds.
        if (group.window < 0) each.held_pages -= tree_.num_evictable() * group.num_lanes;
    }
    return stats;
}

void ColumnPages::check_integrity(const std::vector<std::uint32_t>& readers) const {
    using detail::require_law;
    pages_.check_integrity();
    std::int64_t held = 0;
    std::int64_t idle = 0;
    std::int64_t holds = 0;
    std::int64_t cached = 0;
    std::vector<bool> seen(static_cast<std::size_t>(pages_.end_id()));
    for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
        const auto column = static_cast<BlockId>(c);
        const bool is_live = columns_.ref_count(column) > 0;
        const bool is_cached = is_cached_[static_cast<std::size_t>(c)];
        if (is_cached) cached += count_window_pages(column);
        for (std::int32_t lane = 0; lane < grouping_.num_lanes(); ++lane) {
            const BlockId id = page(column, lane);
            if (id == kNoPage) continue;
            require_law(is_live, "columns: a free one has no pages");
            require_law(!seen[static_cast<std::size_t>(id)], "columns: a page is in one lane");
            seen[static_cast<std::size_t>(id)] = true;
            ++held;
        }
        require_law(!is_cached || has_full_pages(column),
                    "columns: one of the tree has all its full pages");
        for (std::size_t w = 0; w < num_windows_; ++w) {
            const Entry e = entry(column, w);
            require_law(readers_[e] >= readers[e], "columns: readers are counted");
            holds += readers_[e] - readers[e];
            require_law(readers_[e] > 0 || !has(column, w) || is_idle(column, w),
                        "columns: pages without readers are the tree's");
            require_law(idle_.contains(e) || !is_idle(column, w), "columns: idle pages can go");
            require_law(!idle_.contains(e) || has(column, w), "columns: what can go is there");
            if (is_idle(column, w)) idle += grouping_.windows()[w].num_lanes;
        }
    }
    require_law(holds == num_holds_, "columns: hits that are kept are counted");
    require_law(cached == num_cached_, "columns: pages of the tree are counted");
    require_law(idle == num_idle_, "columns: idle pages are counted");
    require_law(held + pages_.num_free() == pages_.num_blocks(),
                "columns: free + held pages == total");
}

}  // namespace kvcore
