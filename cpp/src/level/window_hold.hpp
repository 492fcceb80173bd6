// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"
#include "level/level.hpp"

namespace kvcore {

/// Keeps the window pages of a cached prefix for a caller that may take it: is a reader of all
/// columns that a hit of `tokens` tokens reads. A pin keeps the other pages.
///
/// Owns: one reader in these columns, or nothing. The end of the hold does not count as a use of
/// the pages. While the hold is a reader, its owner must pin the run where the prefix ends.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(columns that windows read). Only the constructor throws: std::bad_alloc.
class WindowHold {
   public:
    WindowHold() noexcept = default;
    /// Holds the columns from `from` on; another holder must hold the columns before. Holds no
    /// column if a column is a page.
    WindowHold(Level& home, TreePosition at, std::int64_t tokens, std::int32_t from = 0) {
        if (home.columns != nullptr && at.depth > 0)
            held_ = std::make_unique<Held>(*home.columns, home.tree, at, tokens, from);
    }

    /// The pages may be evicted between `leave` and `enter`.
    void leave() noexcept {
        if (held_ != nullptr) held_->leave();
    }
    void enter() noexcept {
        if (held_ != nullptr) held_->enter();
    }

    /// Sets where the prefix ends, in the run that the caller pins from now on.
    void move_to(TreePosition end) noexcept {
        if (held_ != nullptr) held_->move_to(end);
    }

    /// Ends the hold.
    void reset() noexcept { held_.reset(); }
    /// Ends the hold but keeps its reader: another owner takes the reader over.
    void hand_over() noexcept {
        if (held_ != nullptr) held_->hand_over();
        held_.reset();
    }

   private:
    class Held {
       public:
        Held(ColumnPages& columns, const PrefixTree& tree, TreePosition at, std::int64_t tokens,
             std::int32_t from)
            : home_(columns), at_(at) {
            const Grouping& grouping = columns.grouping();
            first_column_ = at.depth;
            for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
                first_[w] = std::max(from, grouping.first_column(grouping.windows()[w], tokens));
                first_column_ = std::min(first_column_, first_[w]);
            }
            columns_.resize(static_cast<std::size_t>(at.depth - first_column_));
            tree.copy_pages(at, first_column_, columns_.data());
            enter();
        }
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;
        ~Held() { leave(); }

        void leave() noexcept {
            if (!std::exchange(is_reader_, false)) return;
            home_.begin_leaving();
            home_.leave_from(at_);
            for_each([&](const BlockId* columns, std::int64_t n, std::size_t window) {
                home_.leave(columns, n, window, ColumnPages::Departure::kUnused);
                home_.count_holds(-n);
            });
        }
        void hand_over() noexcept {
            is_reader_ = false;
            for_each([&](const BlockId*, std::int64_t n, std::size_t) { home_.count_holds(-n); });
        }
        void move_to(TreePosition end) noexcept { at_ = end; }
        void enter() noexcept {
            if (std::exchange(is_reader_, true)) return;
            at_ = PrefixTree::position(at_.node, at_.depth);  // the run may have been cut
            for_each([&](const BlockId* columns, std::int64_t n, std::size_t window) {
                home_.enter(columns, n, window);
                home_.count_holds(n);
            });
        }

       private:
        // Calls visit(columns, n, window) for the columns of each window.
        template <class Visit>
        void for_each(const Visit& visit) const {
            for (std::size_t w = 0; w < home_.grouping().windows().size(); ++w) {
                const std::int64_t begin = first_[w] - first_column_;
                const std::int64_t n = static_cast<std::int64_t>(columns_.size()) - begin;
                if (n > 0) visit(columns_.data() + begin, n, w);
            }
        }

        ColumnPages& home_;
        TreePosition at_;  // where the prefix ends
        bool is_reader_ = false;
        std::int32_t first_column_ = 0;
        std::array<std::int32_t, Grouping::kMaxWindows> first_{};
        std::vector<BlockId> columns_;  // from first_column_ on
    };

    std::unique_ptr<Held> held_;  // nullptr: holds nothing; cheap to move
};

}  // namespace kvcore
