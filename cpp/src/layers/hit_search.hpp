// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"

namespace kvcore {

/// Finds the longest prefix of a prompt that the tree has and every window can serve: whole columns
/// and, on request, copied tokens of one more column (a part).
///
/// A part that ends later in its column reads fewer earlier columns, but it needs the pages of
/// every window in its own column. If the longest part cannot be served, a part of another column
/// may be, or a part of a branch nearer to the root. If a chunk ends inside a column, the hit reads
/// no token before that end.
///
/// Owns: nothing. Threads: no locks of its own. Cost: that of ColumnPages::longest_hit, and
/// O(columns that windows read + log children) for each branch after that hit.
class HitSearch {
   public:
    /// Searches for `tokens` [n].
    HitSearch(const ColumnPages& columns, const PrefixTree& tree, const TokenId* tokens,
              std::int64_t n) noexcept;

    /// `found`: the longest prefix that the tree has. `fewest`: the smallest number of tokens in a
    /// part; 0: no part except the part in `found`.
    [[nodiscard]] PrefixMatch longest(const PrefixMatch& found, std::int32_t fewest) const noexcept;

   private:
    [[nodiscard]] std::int64_t tokens_in(std::int32_t columns) const noexcept {
        return std::int64_t{columns} * page_size_;
    }
    [[nodiscard]] TreePosition next_branch(TreePosition at) const noexcept;
    [[nodiscard]] bool find_part(PrefixMatch& match, std::int32_t fewest) const noexcept;
    [[nodiscard]] std::int32_t longest_part(TreePosition at, const PartialPage& source,
                                            std::int32_t fewest) const noexcept;
    [[nodiscard]] bool ends_chunk(std::int64_t n) const noexcept;

    const ColumnPages& columns_;
    const PrefixTree& tree_;
    const TokenId* tokens_;
    std::int64_t n_;
    std::int32_t page_size_;
    bool has_ends_inside_ = false;  // a chunk may end inside a column
};

}  // namespace kvcore
