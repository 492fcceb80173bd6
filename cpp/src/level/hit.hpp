// SPDX-License-Identifier: Apache-2.0
// Hits that the device and the host tier serve together, with groups of layers or states.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "layers/column_pages.hpp"
#include "level/replica.hpp"

namespace kvcore {

/// The longest prefix that a claim can take from the cache: whole pages of the tree and, after
/// them, either a page whose start is copied or pages of the host tier. The host tier also has
/// window pages that columns of the tree miss, or the checkpoint at the end. No group reads pages
/// that are in neither tier.
struct FoundHit {
    PrefixMatch match;
    TreePosition below;       // in the host tier; no node: no page of the tier is needed
    std::int64_t tokens = 0;  // of the whole hit; 0: not longer than the claim's hit
    // With states: whole pages continued up to this token without a checkpoint; -1: not searched.
    std::int64_t branch = -1;
    std::int64_t wanted = 0;  // whole pages that were searched for

    [[nodiscard]] bool is_taken() const noexcept { return tokens > 0; }
    /// True if the hit takes over pages of the tree.
    [[nodiscard]] bool shares() const noexcept { return is_taken() && match.at.node != nullptr; }
    [[nodiscard]] bool is_partial() const noexcept { return match.partial_tokens > 0; }
    /// True if only the host tier has the end of the hit.
    [[nodiscard]] bool ends_below() const noexcept { return below.depth > match.at.depth; }
    /// Takes no page; `branch` and `wanted` stay.
    void drop() noexcept {
        match = {};
        below = {};
        tokens = 0;
    }
};

namespace tiered {

static_assert(Grouping::kMaxWindows < 8, "a window has a bit");

[[nodiscard]] inline bool has_window(std::uint8_t windows, std::size_t window) noexcept {
    return (windows >> window & 1) != 0;
}

}  // namespace tiered

/// A column of the device's tree that gets window pages from the host tier. Another column (the
/// bringer) has them until they arrive.
struct Patch {
    std::int32_t index = 0;    // of the column in the row
    std::uint8_t windows = 0;  // a bit for each
    BlockId bringer = -1;

    [[nodiscard]] bool has(std::size_t window) const noexcept {
        return tiered::has_window(windows, window);
    }
};

namespace tiered {

/// The longest prefix, in columns, that the device and the tier can serve together to every group:
/// full groups need each column, windows the columns that they read, and states a checkpoint at the
/// end. O(columns after it + windows).
[[nodiscard]] std::int32_t longest_hit(const Replica& home, TreePosition at,
                                       TreePosition below) noexcept;
/// Columns of a prompt that the device or the tier has. Also for replicas without groups.
[[nodiscard]] std::int64_t count_columns(const Replica& home, std::string_view name_space,
                                         const TokenId* tokens, std::int64_t n) noexcept;

/// Pages of a column in these windows, a bit each.
[[nodiscard]] inline std::int64_t count_pages(const Grouping& grouping,
                                              std::uint8_t windows) noexcept {
    std::int64_t pages = 0;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        if (has_window(windows, w)) pages += grouping.windows()[w].num_lanes;
    }
    return pages;
}

/// Calls visit(patch), from the end, for each column on the path to `at` that misses pages which a
/// hit of `tokens` tokens reads. O(columns that windows read).
template <class Visit>
void for_each_patch(const Replica& home, TreePosition at, std::int64_t tokens, const Visit& visit) {
    const Grouping& grouping = home.grouping();
    std::array<std::int32_t, Grouping::kMaxWindows> first{};
    std::int32_t lowest = at.depth;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        first[w] = grouping.first_column(grouping.windows()[w], tokens);
        lowest = std::min(lowest, first[w]);
    }
    if (lowest == at.depth) return;
    Patch patch{at.depth, 0, -1};
    home.columns->for_each_column(at, lowest, [&](BlockId column) {
        --patch.index;
        patch.windows = 0;
        for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
            const bool is_missed = patch.index >= first[w] && !home.columns->has(column, w);
            if (is_missed) patch.windows |= static_cast<std::uint8_t>(1U << w);
        }
        if (patch.windows != 0) visit(patch);
    });
}

}  // namespace tiered
}  // namespace kvcore
