// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The layout of a column of tokens if not all layers keep every token.
///
/// The largest page has the same number of tokens as a column. The prefix tree, hits and commits
/// count in columns. Each bundle has one page per column, or several smaller pages. Each page of a
/// column has its own lane. Lanes are numbered through all bundles in their order:
///
///     bundles  0 full   1 sliding   2 sliding, pages of half the size
///     lanes    0        1           2 3
///
/// Owns: only numbers. Threads: constant. Cost: O(1).
class Grouping {
   public:
    /// The largest number of groups that do not keep every token. No known model has more than two.
    static constexpr std::size_t kMaxWindows = 7;

    /// A group that takes pages or gives them back while other groups keep theirs. The code calls
    /// its index a "window", whatever its kind.
    struct Window {
        CacheGroup rule;
        std::int32_t first_lane = 0;
        std::int32_t num_lanes = 0;
        // Number of columns before an end that the next turn may read, even if it differs in the
        // last page.
        std::int32_t reach = 0;
    };
    struct Group {
        std::int32_t first_lane = 0;
        std::int32_t num_lanes = 0;
        std::int32_t window = -1;  // -1: it keeps every token
    };
    struct Bundle {
        std::int32_t first_lane = 0;
        std::int32_t pages_per_column = 1;
        std::int32_t window = -1;  // -1: it keeps every token
    };
    /// The rules by which requests take pages and give them back.
    struct Service {
        bool reserves_chunks = false;  // full groups also reserve only the next tokens
        std::int64_t kept_tokens = 0;  // kept by windows before the tokens that they read
    };

    /// Columns of `column_tokens` tokens. Throws std::invalid_argument, with the numbers, for
    /// invalid groups.
    Grouping(std::int32_t column_tokens, const std::vector<CacheGroup>& groups);

    /// True if a column is one page, which stays as long as its tokens: true of most models.
    [[nodiscard]] bool is_plain() const noexcept { return groups_.empty(); }
    [[nodiscard]] std::int32_t column_tokens() const noexcept { return column_tokens_; }
    [[nodiscard]] std::int32_t num_lanes() const noexcept { return num_lanes_; }
    /// Lanes of groups that keep every token.
    [[nodiscard]] std::int32_t num_full_lanes() const noexcept { return num_full_lanes_; }
    [[nodiscard]] const std::vector<Window>& windows() const noexcept { return windows_; }
    /// The groups in the order in which they were given.
    [[nodiscard]] const std::vector<Group>& groups() const noexcept { return groups_; }
    [[nodiscard]] const std::vector<Bundle>& bundles() const noexcept { return bundles_; }

    /// The first column that a window still reads after `n` tokens are written.
    [[nodiscard]] std::int32_t first_column(const Window& window, std::int64_t n) const noexcept {
        return static_cast<std::int32_t>(window.rule.skipped_tokens(n) / column_tokens_);
    }
    /// The longest prefix of `end` columns that a window can serve. Searches from the end: after a
    /// hole, the next prefix to try ends at the hole. Calls `has(column)` at most once per column.
    template <class Has>
    [[nodiscard]] std::int32_t longest_hit(const Window& window, std::int32_t end,
                                           const Has& has) const {
        std::int32_t first = first_column(window, std::int64_t{end} * column_tokens_);
        for (std::int32_t column = end - 1; column >= first; --column) {
            if (has(column)) continue;
            end = column;
            first = first_column(window, std::int64_t{end} * column_tokens_);
        }
        return end;
    }
    /// Pages that a request of `n` tokens without a hit needs at least, however short its chunks
    /// are.
    [[nodiscard]] std::int64_t least_pages(std::int64_t n, const Service& service) const noexcept;
    /// The longest request for which `num_pages` pages may be enough, in tokens.
    [[nodiscard]] std::int64_t most_tokens(std::int64_t num_pages,
                                           const Service& service) const noexcept;
    /// The largest number of columns that a replica can have at a time, with this number of pages
    /// and requests of at most `max_seq_len` tokens.
    [[nodiscard]] std::int64_t most_columns(std::int64_t num_pages, std::int64_t max_sequences,
                                            std::int64_t max_seq_len) const noexcept;

   private:
    void add(std::int32_t group, CacheGroup rule);
    [[nodiscard]] std::int64_t window_pages(std::int64_t columns,
                                            const Service& service) const noexcept;

    std::int32_t column_tokens_;
    std::int32_t num_lanes_ = 0;
    std::int32_t num_full_lanes_ = 0;
    std::vector<Window> windows_;
    std::vector<Group> groups_;
    std::vector<Bundle> bundles_;
};

}  // namespace kvcore
