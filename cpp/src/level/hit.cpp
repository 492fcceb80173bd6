// SPDX-License-Identifier: Apache-2.0
#include "level/hit.hpp"

namespace kvcore::tiered {
namespace {

// Returns `other` if `at` is empty: ColumnsUp needs a node, but no column of it is read.
TreePosition some(TreePosition at, TreePosition other) noexcept {
    return at.depth > 0 ? at : other;
}

/// The columns of a prefix on the device and in the host tier, from its end to its start.
struct BothUp {
    BothUp(TreePosition at, TreePosition below, std::int32_t tokens) noexcept
        : at(at), below(below), here(some(at, below), tokens), there(some(below, at), tokens) {}

    /// True if the device or the tier has the wanted data of a column: `is_here(column)`,
    /// `is_there(record)`.
    template <class Here, class There>
    [[nodiscard]] bool any(std::int32_t column, const Here& is_here, const There& is_there) {
        return (column < at.depth && is_here(here[column])) ||
               (column < below.depth && is_there(there[column]));
    }

    TreePosition at;
    TreePosition below;
    ColumnsUp here;
    ColumnsUp there;
};

std::int32_t longest_with_window(const Replica& home, TreePosition at, TreePosition below,
                                 std::size_t window, std::int32_t end) noexcept {
    const Grouping& grouping = home.grouping();
    BothUp both(at, below, grouping.column_tokens());
    return grouping.longest_hit(grouping.windows()[window], end, [&](std::int32_t column) {
        return both.any(
            column, [&](BlockId id) { return home.columns->has(id, window); },
            [&](BlockId id) { return home.host->columns->has(id, window); });
    });
}

std::int32_t longest_with_state(const Replica& home, TreePosition at, TreePosition below,
                                std::int32_t end) noexcept {
    BothUp both(at, below, home.tree.page_size());
    const auto is_here = [&](BlockId id) { return home.has_checkpoint(id); };
    const auto is_there = [&](BlockId id) { return home.host->has_checkpoint(id); };
    while (end > 0 && !both.any(end - 1, is_here, is_there)) --end;
    return end;
}

}  // namespace

std::int32_t longest_hit(const Replica& home, TreePosition at, TreePosition below) noexcept {
    const std::size_t windows = home.grouping().windows().size();
    std::int32_t depth = std::max(at.depth, below.depth);
    std::int32_t before = 0;
    do {
        before = depth;
        for (std::size_t w = 0; w < windows; ++w) {
            depth = longest_with_window(home, at, below, w, depth);
        }
        if (home.states != nullptr) depth = longest_with_state(home, at, below, depth);
    } while (depth != before);
    return depth;
}

std::int64_t count_columns(const Replica& home, std::string_view name_space, const TokenId* tokens,
                           std::int64_t n) noexcept {
    const TreePosition at = home.find(name_space, tokens, n);
    const TreePosition below = home.find_stored(name_space, tokens, n);
    if (!home.narrows_hits()) return std::max(at.depth, below.depth);
    if (below.depth > 0) return longest_hit(home, at, below);
    return at.depth == 0 ? 0 : home.longest_hit(at);
}

}  // namespace kvcore::tiered
