// SPDX-License-Identifier: Apache-2.0
// The parts that the columns have now, and the holds that keep parts for a reader.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "layers/recurrent_slots.hpp"
#include "layers/window_policy.hpp"
#include "tree/policies/lru.hpp"

namespace kvcore {

/// Keeps a slot and its content for a reader or writer.
///
/// Owns: a hold on the slot, or nothing. Threads: no locks of its own. Cost: O(1).
class StateHold {
   public:
    StateHold() noexcept = default;
    StateHold(RecurrentSlots& states, RecurrentSlots::Slot slot) noexcept
        : states_(&states), slot_(slot) {
        enter();
    }
    StateHold(StateHold&& other) noexcept
        : states_(std::exchange(other.states_, nullptr)),
          slot_(other.slot_),
          is_held_(std::exchange(other.is_held_, false)) {}
    StateHold& operator=(StateHold&& other) noexcept {
        StateHold moved(std::move(other));
        std::swap(states_, moved.states_);
        std::swap(slot_, moved.slot_);
        std::swap(is_held_, moved.is_held_);
        return *this;
    }
    ~StateHold() { leave(); }

    [[nodiscard]] explicit operator bool() const noexcept { return states_ != nullptr; }
    [[nodiscard]] RecurrentSlots::Slot slot() const noexcept { return slot_; }
    /// True if the slot has no other hold.
    [[nodiscard]] bool is_sole() const noexcept {
        return is_held_ && states_->num_holds(slot_) == 1;
    }
    /// Ends the hold, and counts a use of the checkpoint.
    void end_use() noexcept {
        if (is_held_ && states_->is_checkpoint(slot_)) states_->renew(slot_);
        leave();
    }
    void leave() noexcept {
        const bool was_held = states_ != nullptr && std::exchange(is_held_, false);
        if (was_held) states_->let_go(slot_);
    }
    void enter() noexcept {
        if (states_ != nullptr && !std::exchange(is_held_, true)) states_->hold(slot_);
    }

   private:
    RecurrentSlots* states_ = nullptr;  // nullptr: holds nothing
    RecurrentSlots::Slot slot_ = RecurrentSlots::kNone;
    bool is_held_ = false;
};

/// The parts that the columns of a pool and a tree have now: pages of each bundle and checkpoints.
///
/// Null form: if all layers keep every token, a column is one page, and `columns` is nullptr. If no
/// layer keeps a state, no column has a checkpoint, and `states` is nullptr. Each method covers the
/// null form: it does nothing, or counts the column as its one page. Callers need no `if`. Loops
/// over lanes and windows also need no `if`: a plain grouping has one full lane and no windows.
///
/// Owns: the columns' pages and the checkpoints. Invariant: both belong to columns of the same
/// pool. Threads: no locks of its own; CacheManager locks around it. Cost: as the methods of
/// ColumnPages and RecurrentSlots; in the null form one comparison.
class Residency {
   public:
    std::unique_ptr<ColumnPages> columns;    // nullptr if a column is a page
    std::unique_ptr<RecurrentSlots> states;  // nullptr without layers that keep a state

    explicit Residency(const Grouping& grouping) noexcept : grouping_(grouping) {}

    [[nodiscard]] const Grouping& grouping() const noexcept { return grouping_; }
    /// True if a hit may be shorter than the prefix that the tree has.
    [[nodiscard]] bool narrows_hits() const noexcept { return policy_ != nullptr; }

    /// The longest prefix of `at` that all groups can serve, in columns: windows and states shorten
    /// it in turn until the length stays the same.
    [[nodiscard]] std::int32_t longest_hit(TreePosition at) const noexcept {
        std::int32_t before = 0;
        do {
            before = at.depth;
            if (columns != nullptr) at.depth = columns->longest_hit(at);
            if (states != nullptr) at.depth = states->longest_hit(at, grouping_.column_tokens());
        } while (columns != nullptr && states != nullptr && at.depth != before);
        return at.depth;
    }

    /// The last column on the path to `at`, which is not at a root.
    [[nodiscard]] static BlockId last_column(const PrefixTree& tree, TreePosition at) noexcept {
        BlockId column = 0;
        tree.copy_pages(at, at.depth - 1, &column);
        return column;
    }

    // ---- pages

    /// The page of a column in a lane. In the null form the column itself is the page of lane 0.
    [[nodiscard]] BlockId page(BlockId column, std::int32_t lane) const noexcept {
        return columns == nullptr ? column : columns->page(column, lane);
    }
    /// Pages that the column has.
    [[nodiscard]] std::int64_t count_pages(BlockId column) const noexcept {
        return columns == nullptr ? 1 : columns->count_pages(column);
    }
    [[nodiscard]] bool has_full_pages(BlockId column) const noexcept {
        return columns == nullptr || columns->has_full_pages(column);
    }
    /// Calls visit(page) for each page that a column has, or has of full groups.
    template <class Visit>
    void for_each_page(BlockId column, const Visit& visit) const {
        columns == nullptr ? visit(column) : columns->for_each_page(column, visit);
    }
    template <class Visit>
    void for_each_full_page(BlockId column, const Visit& visit) const {
        columns == nullptr ? visit(column) : columns->for_each_full_page(column, visit);
    }
    /// Allocates the pages of a column's full lanes. Throws IntegrityError if the pool has too few
    /// free pages.
    void fill_full(BlockId column) {
        if (columns != nullptr) columns->fill_full(column);
    }

    // ---- readers

    /// Adds or removes a reader of a copied column in all windows. `end`: the position of the
    /// column in the tree.
    void enter(BlockId column) noexcept {
        if (columns != nullptr) columns->enter_all(column);
    }
    void leave(BlockId column, TreePosition end) noexcept {
        if (columns != nullptr) columns->leave_all(column, end);
    }
    /// Begins a moment in which readers leave columns. The pages that they leave serve a hit of the
    /// prefix that ends at `end`.
    void begin_leaving(TreePosition end) noexcept {
        if (columns == nullptr) return;
        columns->begin_leaving();
        columns->leave_from(end);
    }
    /// The pages that readers leave from now on, in the same moment, serve a hit that ends at
    /// `end`.
    void leave_from(TreePosition end) noexcept {
        if (columns != nullptr) columns->leave_from(end);
    }
    /// Removes a reader of a column in all windows, in the moment that `begin_leaving` began.
    void leave_now(BlockId column, ColumnPages::Departure how) noexcept {
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) columns->leave(column, w, how);
    }

    /// Fills holes of a cached column, the last column on the path to `end`, with the pages of
    /// `own`, a column of the same tokens that is about to be freed.
    void fill_holes(TreePosition end, BlockId cached, BlockId own) noexcept {
        if (columns != nullptr) columns->fill_holes(end, cached, own);
    }

    // ---- columns of the tree

    /// Makes room for `n` more cached columns and for the pages that `readers` requests leave.
    /// Throws std::bad_alloc.
    void make_room_to_cache(std::int64_t n, std::int64_t readers) {
        if (columns != nullptr) columns->make_room_to_cache(n, readers);
    }
    /// The column belongs to the tree from now on.
    void cache(BlockId column) noexcept {
        if (columns != nullptr) columns->cache(column);
    }
    /// Columns [n] move from the tree to other holders: their checkpoints are dropped.
    void uncache(const BlockId* ids, std::int64_t n) noexcept {
        for (std::int64_t i = 0; columns != nullptr && i < n; ++i) columns->uncache(ids[i]);
        if (states != nullptr) states->forget_columns(ids, n);
    }
    /// As `uncache`, for columns that the tree forgot: pages without readers become free.
    void disown(const BlockId* ids, std::int64_t n) noexcept {
        for (std::int64_t i = 0; columns != nullptr && i < n; ++i) columns->disown(ids[i]);
        if (states != nullptr) states->forget_columns(ids, n);
    }
    /// Counts a use of the windows and of the checkpoint that a hit of this prefix reads. Throws
    /// std::bad_alloc.
    void touch(const PrefixTree& tree, TreePosition at) {
        if (columns != nullptr) {
            columns->make_room_to_cache(0, 1);
            columns->touch(at);
        }
        if (states != nullptr && at.depth > 0) states->renew(states->find(last_column(tree, at)));
    }

    // ---- checkpoints

    [[nodiscard]] bool has_checkpoint(BlockId column) const noexcept {
        return states != nullptr && states->has(column);
    }
    /// The checkpoint at the end of a column, ready or not.
    [[nodiscard]] RecurrentSlots::Slot find_checkpoint(BlockId column) const noexcept {
        return states == nullptr ? RecurrentSlots::kNone : states->find(column);
    }
    /// Holds the checkpoint at the end of a prefix if it is ready; otherwise returns an empty hold.
    [[nodiscard]] StateHold hold_checkpoint(const PrefixTree& tree, TreePosition at) noexcept {
        if (states == nullptr || at.depth == 0) return {};
        const BlockId column = last_column(tree, at);
        return states->has(column) ? StateHold(*states, states->find(column)) : StateHold();
    }
    /// Slots that no request and no checkpoint has.
    [[nodiscard]] std::int64_t num_free_slots() const noexcept {
        return states == nullptr ? 0 : states->num_free();
    }
    /// Drops every checkpoint without holds.
    void forget_checkpoints() noexcept {
        if (states != nullptr) states->forget();
    }

    // ---- counts

    /// Pages that the parts evicted since the last `reset_part_counts`.
    [[nodiscard]] EvictionCounts evicted_parts() const noexcept {
        EvictionCounts sum;
        if (columns != nullptr) sum += columns->evicted();
        if (states != nullptr) sum += states->evicted();
        return sum;
    }
    /// Counts columns whose copies between the levels are complete.
    void count_stored(const ColumnCounts& counts) noexcept {
        if (columns != nullptr) columns->count_stored(counts);
    }
    void count_loaded(const ColumnCounts& counts) noexcept {
        if (columns != nullptr) columns->count_loaded(counts);
    }
    void reset_part_counts() noexcept {
        if (columns != nullptr) columns->reset_counts();
        if (states != nullptr) states->reset_counts();
    }
    /// Statistics of each group; none in the null form. O(columns).
    [[nodiscard]] std::vector<GroupStats> group_stats() const {
        return columns == nullptr ? std::vector<GroupStats>{} : columns->stats();
    }
    /// The number of ids that the policy lists but that are not runs of the tree.
    [[nodiscard]] std::size_t num_departures() const noexcept {
        return columns == nullptr ? 0 : columns->num_departures();
    }

   protected:
    /// Columns, kept windows and checkpoints have one order of eviction: wraps the policy for it.
    /// Returns the policy itself in the null form.
    [[nodiscard]] std::unique_ptr<EvictionPolicy> wrap(std::unique_ptr<EvictionPolicy> policy,
                                                       std::int64_t num_slots) {
        if (grouping_.is_plain() && num_slots == 0) return policy;
        if (policy == nullptr) policy = std::make_unique<LruPolicy>();
        auto wrapped =
            std::make_unique<WindowPolicy>(std::move(policy), static_cast<std::size_t>(num_slots));
        policy_ = wrapped.get();
        return wrapped;
    }
    /// Makes the parts that the layers need. `tree` evicts by the policy that `wrap` returned.
    void make_columns(std::int64_t num_pages, BlockId first_page, BlockPool& pool,
                      PrefixTree& tree) {
        if (grouping_.is_plain()) return;
        columns =
            std::make_unique<ColumnPages>(grouping_, num_pages, first_page, pool, tree, *policy_);
    }
    /// `next`: another listener for freed pages of a plain pool. Freed columns already have a
    /// listener: RecurrentSlots calls it next.
    void make_states(std::int64_t num_slots, BlockPool& pool, PoolListener* next) {
        if (num_slots == 0) return;
        if (columns != nullptr) next = columns.get();
        states = std::make_unique<RecurrentSlots>(num_slots, pool, policy_->unreachable(), next);
        if (columns != nullptr) columns->need_checkpoints();
    }
    /// The runs of the tree that no hit can end at.
    [[nodiscard]] UnreachableTails& unreachable() noexcept { return policy_->unreachable(); }
    /// Evicts up to `n` pages, or columns, from the tree. Writes their ids to `out` [n]. Adds pages
    /// that the policy chose to `counts`.
    [[nodiscard]] std::int64_t evict_from(PrefixTree& tree, std::int64_t n, BlockId* out,
                                          EvictionGuard guard, EvictionCounts& counts) noexcept {
        if (states != nullptr) return states->evict(n, out, tree, *policy_);
        const std::int64_t evicted = tree.evict(n, out, guard);
        counts.policy += evicted;
        return evicted;
    }

   private:
    const Grouping& grouping_;
    WindowPolicy* policy_ = nullptr;  // of the tree; nullptr in the null form
};

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
    WindowHold(Residency& home, TreePosition at, std::int64_t tokens, std::int32_t from = 0) {
        if (home.columns != nullptr && at.depth > 0)
            held_ = std::make_unique<Held>(*home.columns, at, tokens, from);
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
        Held(ColumnPages& columns, TreePosition at, std::int64_t tokens, std::int32_t from)
            : home_(columns), at_(at) {
            const Grouping& grouping = columns.grouping();
            first_column_ = at.depth;
            for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
                first_[w] = std::max(from, grouping.first_column(grouping.windows()[w], tokens));
                first_column_ = std::min(first_column_, first_[w]);
            }
            columns_.resize(static_cast<std::size_t>(at.depth - first_column_));
            columns.tree().copy_pages(at, first_column_, columns_.data());
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
