// SPDX-License-Identifier: Apache-2.0
// With groups of layers or states: what the device and the tier below it serve together.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "layers/column_pages.hpp"
#include "level/replica.hpp"

namespace kvcore {

/// The longest prefix that a claim can take out of the cache: whole pages of the tree, and behind
/// them either a page to copy the start of, or pages of the tier below.
struct FoundHit {
    PrefixMatch match;
    TreePosition below;       // in the host tier, where the hit goes on there
    std::int64_t tokens = 0;  // all of it; 0: no longer one than the claim has
    // With states: whole pages went on up to this token without a checkpoint; -1: not looked for.
    std::int64_t branch = -1;
    std::int64_t wanted = 0;  // whole pages that were looked for

    [[nodiscard]] bool is_taken() const noexcept { return tokens > 0; }
    /// It takes over pages of the tree.
    [[nodiscard]] bool shares() const noexcept { return is_taken() && match.at.node != nullptr; }
    [[nodiscard]] bool is_partial() const noexcept { return match.partial_tokens > 0; }
    /// Its end is in the host tier alone.
    [[nodiscard]] bool ends_below() const noexcept { return below.depth > match.at.depth; }
};

/// A prefix of which the device has the first columns, and the tier below those behind them, pages
/// of windows that the device's columns miss, or the checkpoint at the end. What is in neither is
/// read by no group.
struct TieredHit {
    TreePosition at;     // of the device
    TreePosition below;  // of the tier; no node: it has nothing that is needed
    std::int64_t tokens = 0;
};

namespace tiered {

static_assert(Grouping::kMaxWindows < 8, "a window has a bit");

[[nodiscard]] inline bool has_window(std::uint8_t windows, std::size_t window) noexcept {
    return (windows >> window & 1) != 0;
}

}  // namespace tiered

/// A column of the device's tree that gets pages of windows from below, which another column brings
/// until they have arrived.
struct Patch {
    std::int32_t index = 0;    // of the column, in the row
    std::uint8_t windows = 0;  // a bit for each
    BlockId bringer = -1;

    [[nodiscard]] bool has(std::size_t window) const noexcept {
        return tiered::has_window(windows, window);
    }
};

namespace tiered {

/// The longest prefix of both, in columns, that every group can serve: full groups have each
/// column, here or below, windows those that they read, states a checkpoint at the end. O(columns
/// between them + windows).
[[nodiscard]] std::int32_t longest_hit(const Replica& home, TreePosition at,
                                       TreePosition below) noexcept;
/// Columns of a prompt that the replica has, here or below. Without groups too.
[[nodiscard]] std::int64_t count_columns(const Replica& home, std::string_view name_space,
                                         const TokenId* tokens, std::int64_t n) noexcept;

/// Pages of windows that are named by a bit each.
[[nodiscard]] inline std::int64_t count_pages(const Grouping& grouping,
                                              std::uint8_t windows) noexcept {
    std::int64_t pages = 0;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        if (has_window(windows, w)) pages += grouping.windows()[w].num_lanes;
    }
    return pages;
}

/// Calls visit(patch) for each column on the way to `at` that misses pages which a hit of so many
/// tokens reads, from the end. O(columns that windows read).
template <class Visit>
void for_each_patch(const Replica& home, TreePosition at, std::int64_t tokens, const Visit& visit) {
    const ColumnPages& columns = *home.columns;
    const Grouping& grouping = columns.grouping();
    std::array<std::int32_t, Grouping::kMaxWindows> first{};
    std::int32_t lowest = at.depth;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        first[w] = grouping.first_column(grouping.windows()[w], tokens);
        lowest = std::min(lowest, first[w]);
    }
    if (lowest == at.depth) return;
    Patch patch{at.depth, 0, -1};
    columns.for_each_column(at, lowest, [&](BlockId column) {
        --patch.index;
        patch.windows = 0;
        for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
            const bool is_missed = patch.index >= first[w] && !columns.has(column, w);
            if (is_missed) patch.windows |= static_cast<std::uint8_t>(1U << w);
        }
        if (patch.windows != 0) visit(patch);
    });
}

}  // namespace tiered
}  // namespace kvcore
