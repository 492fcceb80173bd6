// SPDX-License-Identifier: Apache-2.0
#include "manager/tiered_hit.hpp"

namespace kvcore::tiered {
namespace {

// A node for a prefix that is not there either: its columns are not asked for.
TreePosition some(TreePosition at, TreePosition other) noexcept {
    return at.depth > 0 ? at : other;
}

TreePosition find(const PrefixTree& tree, std::string_view name_space, const TokenId* tokens,
                  std::int64_t n) noexcept {
    TreeNode* root = tree.find_namespace(name_space);
    return root == nullptr ? TreePosition{} : tree.match(root, tokens, n).at;
}

// As ColumnPages has it for one tree.
std::int32_t longest_hit(const Replica& home, TreePosition at, TreePosition below,
                         std::size_t window, std::int32_t end) noexcept {
    const Grouping& grouping = home.columns->grouping();
    const std::int64_t tokens = grouping.column_tokens();
    ColumnsUp here(some(at, below), grouping.column_tokens());
    ColumnsUp there(some(below, at), grouping.column_tokens());
    const auto is_there = [&](std::int32_t column) {
        return (column < at.depth && home.columns->has(here[column], window)) ||
               (column < below.depth && home.host_columns->has(there[column], window));
    };
    const Grouping::Window& rule = grouping.windows()[window];
    std::int32_t first = grouping.first_column(rule, end * tokens);
    for (std::int32_t column = end - 1; column >= first; --column) {
        if (is_there(column)) continue;
        end = column;
        first = grouping.first_column(rule, end * tokens);
    }
    return end;
}

}  // namespace

std::int32_t longest_hit(const Replica& home, TreePosition at, TreePosition below) noexcept {
    std::int32_t depth = std::max(at.depth, below.depth);
    std::int32_t before = 0;
    do {
        before = depth;
        for (std::size_t w = 0; w < home.columns->grouping().windows().size(); ++w) {
            depth = longest_hit(home, at, below, w, depth);
        }
    } while (depth != before);
    return depth;
}

std::int64_t count_columns(const Replica& home, std::string_view name_space, const TokenId* tokens,
                           std::int64_t n) noexcept {
    const TreePosition at = find(home.tree, name_space, tokens, n);
    const TreePosition below =
        home.host == nullptr ? TreePosition{} : home.host->match(name_space, tokens, n);
    if (home.columns != nullptr && below.depth > 0) return longest_hit(home, at, below);
    if (home.narrows_hits()) return at.depth == 0 ? 0 : home.longest_hit(at);
    return std::max(at.depth, below.depth);
}

}  // namespace kvcore::tiered
