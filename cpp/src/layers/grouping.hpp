// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// What a column of tokens is made of where layers do not all keep everything.
///
/// A column is as many tokens as the largest page holds: what the prefix tree, hits and commits
/// count in. Each bundle has one page there, or several smaller ones. All its pages have a lane
/// each, numbered through all bundles in their order:
///
///     bundles  0 full   1 sliding   2 sliding, pages of half the size
///     lanes    0        1           2 3
///
/// Owns: nothing but numbers. Threads: constant. Cost: O(1).
class Grouping {
   public:
    /// Most groups that do not keep everything. No model known has more than two.
    static constexpr std::size_t kMaxWindows = 7;

    /// A group whose pages are given back, or taken, while others stay: by its index below a
    /// "window", whatever its kind.
    struct Window {
        CacheGroup rule;
        std::int32_t first_lane = 0;
        std::int32_t num_lanes = 0;
        // Columns in front of an end that the next turn may read, or one that differs from this in
        // its last page.
        std::int32_t reach = 0;
    };
    struct Group {
        std::int32_t first_lane = 0;
        std::int32_t num_lanes = 0;
        std::int32_t window = -1;  // none: it keeps everything
    };
    struct Bundle {
        std::int32_t first_lane = 0;
        std::int32_t pages_per_column = 1;
        std::int32_t window = -1;  // none: it keeps everything
    };
    /// When requests take pages and give them back.
    struct Service {
        bool reserves_chunks = false;  // for what runs next, in groups that keep everything too
        std::int64_t kept_tokens = 0;  // that windows keep behind those they read
    };

    /// Of columns of so many tokens. Throws std::invalid_argument for groups that cannot be, with
    /// the numbers.
    Grouping(std::int32_t column_tokens, const std::vector<CacheGroup>& groups);

    /// One page per column, which stays as long as its tokens: what most models are.
    [[nodiscard]] bool is_plain() const noexcept { return bundles_.empty(); }
    [[nodiscard]] std::int32_t column_tokens() const noexcept { return column_tokens_; }
    [[nodiscard]] std::int32_t num_lanes() const noexcept { return num_lanes_; }
    /// Of one with pages of all bundles.
    [[nodiscard]] std::int32_t pages_per_column() const noexcept {
        return is_plain() ? 1 : num_lanes_;
    }
    /// Lanes of groups that keep everything.
    [[nodiscard]] std::int32_t num_full_lanes() const noexcept { return num_full_lanes_; }
    [[nodiscard]] const std::vector<Window>& windows() const noexcept { return windows_; }
    /// As they were given.
    [[nodiscard]] const std::vector<Group>& groups() const noexcept { return groups_; }
    [[nodiscard]] const std::vector<Bundle>& bundles() const noexcept { return bundles_; }

    /// The first column that a window still reads with `n` tokens written.
    [[nodiscard]] std::int32_t first_column(const Window& window, std::int64_t n) const noexcept {
        return static_cast<std::int32_t>(window.rule.skipped_tokens(n) / column_tokens_);
    }
    /// Columns of the longest prefix of `end` ones that a window can serve. Upwards from the end:
    /// each hole is as far as the next prefix to try may go. `has(column)` is asked once of each.
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
    /// Pages that a request of `n` tokens which hits nothing cannot do without, however short its
    /// chunks are.
    [[nodiscard]] std::int64_t least_pages(std::int64_t n, const Service& service) const noexcept;
    /// The longest request for which so many pages could do.
    [[nodiscard]] std::int64_t most_tokens(std::int64_t num_pages,
                                           const Service& service) const noexcept;
    /// Columns that a replica can have at a time: with so many pages, and requests of so many
    /// tokens.
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
