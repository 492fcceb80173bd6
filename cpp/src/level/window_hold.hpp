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
#include "level/replica.hpp"

namespace kvcore {

/// Keeps the window pages of a prefix that is in the tree, for who may take it: a reader of all
/// that a hit of so many tokens reads. A pin keeps the other pages.
///
/// Owns: its part as a reader, or nothing. Ending it is no use of the pages. While it is a reader,
/// whoever has it pins the run where the prefix ends.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(columns that windows read). Only the constructor throws: std::bad_alloc.
class WindowHold {
   public:
    WindowHold() noexcept = default;
    /// Of its columns those from `from` on, where somebody holds those in front. Holds nothing
    /// where a column is a page.
    WindowHold(Replica& home, TreePosition at, std::int64_t tokens, std::int32_t from = 0) {
        if (home.columns != nullptr && at.depth > 0)
            held_ = std::make_unique<Held>(*home.columns, home.tree, at, tokens, from);
    }
    /// The same in any tree with such columns.
    WindowHold(ColumnPages& columns, const PrefixTree& tree, TreePosition at, std::int64_t tokens)
        : held_(std::make_unique<Held>(columns, tree, at, tokens, 0)) {}

    /// Between these, the pages may go.
    void leave() noexcept {
        if (held_ != nullptr) held_->leave();
    }
    void enter() noexcept {
        if (held_ != nullptr) held_->enter();
    }

    /// Where the prefix ends, in the run that the caller pins from now on.
    void move_to(TreePosition end) noexcept {
        if (held_ != nullptr) held_->move_to(end);
    }

    /// Holds nothing from now on.
    void reset() noexcept { held_.reset(); }
    /// The same, for somebody else is the reader in its place.
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

    std::unique_ptr<Held> held_;  // none: what moves most, and holds nothing, is a pointer
};

}  // namespace kvcore
