// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "layers/recurrent_slots.hpp"
#include "oracle/slow_columns.hpp"
#include "support/check.hpp"

/// A side that uses a tree as requests do, in columns: the real policy or its slow twin.
template <class Pages, class Policy>
class GroupSide {
   public:
    using BlockId = kvcore::BlockId;
    using How = kvcore::ColumnPages::Departure;
    using Retention = kvcore::Retention;
    using Tokens = std::vector<kvcore::TokenId>;
    using TreeNode = kvcore::TreeNode;
    using TreePosition = kvcore::TreePosition;
    static constexpr std::int32_t kPage = 2;

    /// `num_slots`: slots for checkpoints, if layers keep a state.
    GroupSide(const kvcore::Grouping& grouping, std::int64_t num_pages,
              std::unique_ptr<Policy> policy, std::int64_t num_slots)
        : grouping_(grouping),
          num_pages_(num_pages),
          num_slots_(num_slots),
          policy_(*policy),
          columns_(grouping.num_full_lanes() > 0 ? num_pages : 3 * num_pages),
          tree_(kPage, std::move(policy)),
          pages_(made()) {
        if constexpr (kIsReal) {
            if (num_slots == 0) return;
            states_ = std::make_unique<kvcore::RecurrentSlots>(num_slots, columns_,
                                                               policy_.unreachable(), &pages_);
            pages_.need_checkpoints();
        }
    }

    struct Row {
        Tokens tokens;
        Retention retention;
        TreeNode* node = nullptr;
        std::vector<BlockId> columns{};
        std::int32_t committed = 0;
        std::vector<std::int32_t> first{};  // first column that a window reads, by window
    };

    /// Take a hit of a prompt, of at most `most` columns, and new columns for the rest of the
    /// prompt. Return the number of evicted pages, or -1 if the prompt does not fit.
    std::int64_t claim(const Tokens& tokens, Retention retention, std::int32_t most) {
        Row row{tokens, retention};
        const TreePosition at = hit(tokens, most);
        row.node = tree_.split(at);
        tree_.pin(row.node);
        row.columns.resize(static_cast<std::size_t>(at.depth));
        tree_.copy_pages({row.node, at.depth}, 0, row.columns.data());
        row.committed = at.depth;
        read(row, std::int64_t{at.depth} * kPage);
        const auto size = static_cast<std::int64_t>(tokens.size()) / kPage;
        const std::int64_t more = size - at.depth;
        const std::int64_t wanted = more * grouping_.num_lanes();
        const bool fits = num_free() + pages_.num_evictable() >= wanted &&
                          columns_.num_free() + tree_.num_evictable() >= more;
        if (!fits) {
            drop(row, How::kUnused, false);
            return -1;
        }
        const std::int64_t went = pages_.make_room(wanted, more, {});
        CHECK(num_free() >= wanted);
        if (num_slots_ > 0 && at.depth > 0) renew(column(row, at.depth - 1));
        tree_.use({row.node, at.depth});
        tree_.retain({row.node, at.depth}, 0, at.depth, retention);
        row.columns.resize(static_cast<std::size_t>(size));
        CHECK(columns_.allocate(more, row.columns.data() + at.depth));
        for (std::int32_t c = at.depth; c < size; ++c) {
            pages_.fill_full(column(row, c));
            for (std::size_t w = 0; w < num_windows(); ++w) {
                pages_.fill(column(row, c), w);
                pages_.enter(column(row, c), w);
            }
        }
        rows_.push_back(std::move(row));
        return went;
    }
    /// Insert the row's next columns into the tree, up to column `end`.
    void commit(std::size_t i, std::int32_t end) {
        Row& row = rows_[i];
        end = std::min(end, size_of(row));
        const std::int32_t first = row.committed;
        if (end <= first) return;
        pages_.make_room_to_cache(end - first, 0);
        std::vector<kvcore::DuplicatePage> known;
        TreeNode* node =
            tree_.insert(row.node, row.tokens.data() + first * kPage, row.columns.data() + first,
                         end - first, known, row.retention);
        if (node != row.node) {
            tree_.pin(node);
            tree_.unpin(row.node, false);
            row.node = node;
        }
        row.committed = end;
        for (std::int32_t c = first + static_cast<std::int32_t>(known.size()); c < end; ++c) {
            pages_.cache(column(row, c));
        }
        for (const kvcore::DuplicatePage& each : known) swap(row, first + each.index, each.cached);
    }
    /// Make a checkpoint at the end of the committed columns.
    void checkpoint(std::size_t i) {
        const Row& row = rows_[i];
        if (num_slots_ == 0 || row.committed == 0) return;
        BlockId last = 0;
        tree_.copy_pages({row.node, row.committed}, row.committed - 1, &last);
        if constexpr (kIsReal) {
            if (states_->find(last) != kvcore::RecurrentSlots::kNone) return;
            states_->make_ready(states_->add(last, {row.node, row.committed}));
        } else {
            pages_.add_checkpoint(last);
        }
    }
    /// Move the row's windows past some columns. The bits of `how` choose the way for each column.
    void pass(std::size_t i, std::int32_t end, std::uint64_t how) {
        Row& row = rows_[i];
        pages_.begin_leaving();
        for (std::size_t w = 0; w < num_windows(); ++w) {
            for (; row.first[w] < std::min(end, size_of(row)); ++row.first[w]) {
                const std::int32_t c = row.first[w];
                const bool is_kept = c < row.committed && (how >> (c % 32) & 1) != 0;
                if (is_kept) pages_.leave_from({row.node, end_behind(row, c, how >> 32)});
                const auto other = (how >> (c + 7) % 32 & 3) == 0 ? How::kUseless : How::kPassed;
                pages_.leave(column(row, c), w, is_kept ? How::kKept : other);
            }
        }
    }
    void release(std::size_t i, std::uint64_t how) {
        Row row = std::move(rows_[i]);
        rows_.erase(rows_.begin() + static_cast<std::ptrdiff_t>(i));
        pages_.begin_leaving();
        pages_.leave_from({row.node, std::max(1, row.committed - 1)}, (how & 1) != 0);
        for (std::size_t w = 0; w < num_windows(); ++w) {
            const std::int32_t first = row.first[w];
            if (first > 0) pages_.keep(column(row, first - 1), w);
        }
        how_ = how;
        drop(row, How::kKept, true);
    }
    /// Hold the columns of a hit that windows read during an eviction, then release them.
    std::int64_t look(const Tokens& tokens, std::int32_t most, std::int64_t pages) {
        const TreePosition at = hit(tokens, most);
        if (at.depth == 0) return 0;
        Row row;
        row.node = tree_.split(at);
        tree_.pin(row.node);
        row.columns.resize(static_cast<std::size_t>(at.depth));
        tree_.copy_pages({row.node, at.depth}, 0, row.columns.data());
        row.committed = at.depth;
        read(row, std::int64_t{at.depth} * kPage);
        const std::int64_t went = evict(pages, {});
        drop(row, How::kUnused, false);
        return went;
    }
    /// Copy the last column of a hit during an eviction.
    std::int64_t copy(const Tokens& tokens, std::int32_t most, std::int64_t pages) {
        TreePosition at = hit(tokens, most);
        if (at.depth == 0) return 0;
        BlockId column = 0;
        tree_.copy_pages(at, at.depth - 1, &column);
        tree_.pin(at.node);
        pages_.enter_all(column);
        const std::int64_t went = evict(pages, {});
        pages_.leave_all(column, at);
        tree_.unpin(at.node, false);
        return went;
    }
    /// Free `pages` more pages, but no page of the guarded run.
    std::int64_t evict(std::int64_t pages, const Tokens& guarded) {
        kvcore::EvictionGuard guard;
        TreePosition at = tree_.match(root(), guarded.data(), count(guarded)).at;
        if (at.depth > 0) {
            at = kvcore::PrefixTree::position(at.node, at.depth);
            guard = {at.node, at.depth - at.node->start};
        }
        return pages_.make_room(std::min(num_free() + pages, most_pages()), 0, guard);
    }
    void touch(const Tokens& tokens) {
        tree_.touch(tree_.match(root(), tokens.data(), count(tokens)).at);
    }
    void advance(std::int64_t now) { tree_.advance(now); }
    void reset() {
        std::array<BlockId, 16> ids;
        for (std::int64_t n = 1; n > 0;) {
            n = tree_.evict(16, ids.data());
            columns_.free(ids.data(), n);
        }
    }

    /// Return everything that a caller can observe of this side.
    [[nodiscard]] std::vector<std::int64_t> seen() const {
        std::vector<std::int64_t> seen{num_free(), pages_.num_evictable(), columns_.num_free(),
                                       tree_.num_cached(), tree_.num_nodes()};
        for (BlockId c = 0; c < columns_.num_blocks(); ++c) {
            std::int64_t word = columns_.ref_count(c);
            for (std::size_t w = 0; w < num_windows(); ++w) {
                word = 4 * word + (pages_.has(c, w) ? 2 : 0) + (pages_.is_idle(c, w) ? 1 : 0);
            }
            if (num_slots_ > 0) word = 2 * word + (has_checkpoint(c) ? 1 : 0);
            seen.push_back(word);
        }
        return seen;
    }
    [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
    [[nodiscard]] std::size_t num_windows() const { return grouping_.windows().size(); }
    [[nodiscard]] Pages& pages() { return pages_; }

   private:
    static constexpr bool kIsReal = std::is_same_v<Pages, kvcore::ColumnPages>;

    [[nodiscard]] Pages made() {
        if constexpr (kIsReal) {
            return Pages(grouping_, num_pages_, 0, columns_, tree_, policy_);
        } else {
            return Pages(grouping_, num_pages_, columns_, tree_, policy_, num_slots_);
        }
    }
    [[nodiscard]] bool has_checkpoint(BlockId column) const {
        if constexpr (kIsReal) {
            return states_->has(column);
        } else {
            return pages_.checkpoints().has(column);
        }
    }
    void renew(BlockId column) {
        if constexpr (kIsReal) {
            states_->renew(states_->find(column));
        } else {
            pages_.checkpoints().renew(column);
        }
    }
    [[nodiscard]] std::int64_t num_free() const {
        if constexpr (kIsReal) {
            return pages_.pages().num_free();
        } else {
            return pages_.num_free();
        }
    }
    [[nodiscard]] TreeNode* root() const { return tree_.find_namespace(""); }
    [[nodiscard]] std::int64_t most_pages() const { return num_free() + pages_.num_evictable(); }
    static std::int64_t count(const Tokens& tokens) {
        return static_cast<std::int64_t>(tokens.size());
    }
    static std::int32_t size_of(const Row& row) {
        return static_cast<std::int32_t>(row.columns.size());
    }
    static BlockId column(const Row& row, std::int32_t c) {
        return row.columns[static_cast<std::size_t>(c)];
    }
    static std::int32_t end_behind(const Row& row, std::int32_t column, std::uint64_t how) {
        const auto ahead = static_cast<std::int32_t>(how % 3);
        return ahead == 0 ? row.committed : std::min(row.committed, column + ahead);
    }
    [[nodiscard]] TreePosition hit(const Tokens& tokens, std::int32_t most) const {
        TreePosition at = tree_.match(root(), tokens.data(), count(tokens)).at;
        at.depth = std::min(at.depth, most);
        std::int32_t before = 0;
        do {
            before = at.depth;
            at.depth = pages_.longest_hit(at);
            if constexpr (kIsReal) {
                if (states_ != nullptr) at.depth = states_->longest_hit(at, kPage);
            }
        } while (at.depth != before);
        return kvcore::PrefixTree::position(at.node, at.depth);
    }
    void read(Row& row, std::int64_t tokens) {
        for (std::size_t w = 0; w < num_windows(); ++w) {
            row.first.push_back(grouping_.first_column(grouping_.windows()[w], tokens));
            for (std::int32_t c = row.first[w]; c < row.committed; ++c) {
                pages_.enter(column(row, c), w);
            }
        }
    }
    // The tree's column takes the pages that it lacks from the row's column, and replaces it.
    void swap(Row& row, std::int32_t c, BlockId cached) {
        const BlockId own = std::exchange(row.columns[static_cast<std::size_t>(c)], cached);
        for (std::size_t w = 0; w < num_windows(); ++w) {
            if (c >= row.first[w]) pages_.enter(cached, w);
        }
        pages_.fill_holes(kvcore::TreePosition{}, cached, own);  // no listener
        columns_.free(&own, 1);
        pages_.begin_leaving();
        for (std::size_t w = 0; w < num_windows(); ++w) {
            if (c >= row.first[w]) pages_.leave(own, w, How::kUnused);
        }
    }
    void drop(const Row& row, How how, bool touch) {
        pages_.begin_leaving();
        pages_.leave_from({row.node, row.committed});
        for (std::size_t w = 0; w < num_windows(); ++w) {
            for (std::int32_t c = row.first[w]; c < size_of(row); ++c) {
                const bool varies = touch && c < row.committed;
                const bool is_spare = (how_ >> (c + 9) % 32 & 1) != 0;
                if (varies) {
                    pages_.leave_from({row.node, end_behind(row, c, how_ >> (c % 32))}, is_spare);
                }
                pages_.leave(column(row, c), w, how);
            }
        }
        columns_.free(row.columns.data() + row.committed, size_of(row) - row.committed);
        tree_.unpin(row.node, touch);
    }

    const kvcore::Grouping& grouping_;
    std::int64_t num_pages_;
    std::int64_t num_slots_;
    Policy& policy_;
    kvcore::BlockPool columns_;
    kvcore::PrefixTree tree_;
    Pages pages_;
    std::unique_ptr<kvcore::RecurrentSlots> states_;
    std::vector<Row> rows_;
    std::uint64_t how_ = 0;
};
