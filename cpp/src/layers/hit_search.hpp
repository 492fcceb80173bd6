// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"

namespace kvcore {

/// The longest prefix of a prompt that the tree has and every window can serve: whole columns, and
/// where those are wanted, tokens of one more that are copied.
///
/// Such a part needs less of what is in front of it the further on it ends, but its own column of
/// every window. So where the longest part cannot be served, one of another column may be, and
/// further in front one of another branch; and where a chunk ends inside a column, nothing in front
/// of it is needed.
///
/// Owns: nothing. Threads: none of its own. Cost: that of ColumnPages::longest_hit, and O(columns
/// that windows read + log children) for each branch behind it.
class HitSearch {
   public:
    /// Of `tokens` [n].
    HitSearch(const ColumnPages& columns, const PrefixTree& tree, const TokenId* tokens,
              std::int64_t n) noexcept;

    /// `found` is the longest one that the tree has; `fewest`: tokens of a part that are worth it,
    /// 0: none that it does not name.
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
    bool has_ends_inside_ = false;  // of chunks, inside of columns
};

}  // namespace kvcore
