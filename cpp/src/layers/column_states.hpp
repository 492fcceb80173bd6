// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/idle_pages.hpp"
#include "layers/useless_runs.hpp"

namespace kvcore {

/// Whose the slots of a replica are: a request's, which computes in it; a column's, as the state
/// at its end (a checkpoint); or nobody's.
///
/// A checkpoint belongs to a column of the tree, so a run that is cut leaves it with the lower part
/// by itself, and it goes when the column is free. Those that nobody holds go when slots are
/// needed, the one used longest ago first. UselessRuns hears which runs have one.
///
/// Owns: the slots and their order. Invariant: a slot is free, a request's, a checkpoint's, or
/// leaving: held by nothing but copies. A checkpoint is found once it is ready: its copy is done.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(1) per verb; taking a slot is O(checkpoints held). No memory after construction.
class ColumnStates final : public PoolListener {
   public:
    using Slot = std::int32_t;
    static constexpr Slot kNone = -1;

    /// `runs`: of the tree that has the columns; with room for a checkpoint per slot. `next`: whom
    /// else to tell of columns that are free.
    ColumnStates(std::int64_t num_slots, BlockPool& columns, UselessRuns& runs, PoolListener* next);

    /// Slots that can be had: free ones, and checkpoints that nobody holds.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return static_cast<std::int64_t>(free_.size()) + num_unused_;
    }
    /// Slots that nobody has.
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return static_cast<std::int64_t>(free_.size());
    }
    /// The checkpoint at the end of a column, whether it is ready or not.
    [[nodiscard]] Slot find(BlockId column) const noexcept {
        return of_column_[static_cast<std::size_t>(column)] - 1;
    }
    [[nodiscard]] bool has(BlockId column) const noexcept {
        const Slot slot = find(column);
        return slot != kNone && at(slot).is_ready;
    }
    /// Columns of the longest prefix of that one which ends with a checkpoint. O(columns between).
    [[nodiscard]] std::int32_t longest_hit(TreePosition at,
                                           std::int32_t column_tokens) const noexcept;

    /// A slot for a request. Throws IntegrityError where none can be had.
    [[nodiscard]] Slot take();
    /// A checkpoint becomes a request's slot as it is, with what holds it.
    void take_over(Slot checkpoint) noexcept;
    /// The reverse: a slot that was taken is the checkpoint of a column that has none, and ready.
    /// That is the last one on the way to `end`, in the run of its node.
    void hand_over(Slot slot, BlockId column, TreePosition end) noexcept;
    /// The request is done with it.
    void give_back(Slot slot) noexcept;
    /// A slot for a checkpoint of a column that has none, the last one on the way to `end`;
    /// found once it is ready. kNone where none can be had.
    [[nodiscard]] Slot add(BlockId column, TreePosition end);
    void make_ready(Slot checkpoint) noexcept;
    /// There is no such checkpoint any more.
    void drop(Slot checkpoint) noexcept;
    void drop_of(BlockId column) noexcept {
        if (find(column) != kNone) drop(find(column));
    }
    /// A use.
    void renew(Slot checkpoint) noexcept;
    /// Drops those that nobody holds.
    void forget() noexcept;

    /// A held slot keeps its content until it is let go as often, whoever had it.
    void hold(Slot slot) noexcept;
    void let_go(Slot slot) noexcept;
    [[nodiscard]] std::uint32_t num_holds(Slot slot) const noexcept { return at(slot).holds; }
    [[nodiscard]] bool is_checkpoint(Slot slot) const noexcept {
        return at(slot).owner == Owner::kColumn;
    }

    /// Columns that are free again have no checkpoint.
    void freed(const BlockId* ids, std::int64_t n) noexcept override;
    /// The same of columns that go from the tree to a request.
    void forget_columns(const BlockId* ids, std::int64_t n) noexcept;
    /// Takes up to `n` pages out of `tree`, where a column is a page, and forgets their
    /// checkpoints: first what is behind the last checkpoint, then what the policy says. Their ids
    /// go to `out` [n]. Returns how many.
    [[nodiscard]] std::int64_t evict(std::int64_t n, BlockId* out, PrefixTree& tree,
                                     WindowPolicy& policy) noexcept;

    void count_hit() noexcept { ++num_hits_; }
    [[nodiscard]] StateStats stats() const noexcept;
    /// Pages that `evict` took since the last `reset_counts`.
    [[nodiscard]] const EvictionCounts& evicted() const noexcept { return evicted_; }
    void reset_counts() noexcept {
        num_hits_ = num_made_ = num_evicted_ = 0;
        evicted_ = {};
    }

    /// Throws IntegrityError unless the invariant holds; `used` are the slots of requests, `cached`
    /// [columns] says which ones the tree has. O(slots).
    void check_integrity(const std::vector<Slot>& used, const std::vector<bool>& cached) const;

   private:
    enum class Owner : std::uint8_t { kNobody, kRequest, kColumn, kLeaving };
    struct Entry {
        Owner owner = Owner::kNobody;
        bool is_ready = false;
        std::uint32_t holds = 0;
        BlockId column = 0;
        Slot previous = kNone;  // checkpoints by their last use
        Slot next = kNone;
    };

    [[nodiscard]] Entry& at(Slot slot) noexcept { return slots_[static_cast<std::size_t>(slot)]; }
    [[nodiscard]] const Entry& at(Slot slot) const noexcept {
        return slots_[static_cast<std::size_t>(slot)];
    }
    void join_column(Slot slot, BlockId column, TreePosition end) noexcept;
    void link(Slot slot) noexcept;
    void unlink(Slot slot) noexcept;
    void leave_column(Slot slot) noexcept;

    ZeroedArray<Slot> of_column_;  // + 1; 0: none
    UselessRuns& runs_;
    PoolListener* next_;
    std::vector<Entry> slots_;
    std::vector<Slot> free_;
    Slot oldest_ = kNone;
    Slot youngest_ = kNone;
    std::int64_t num_unused_ = 0;  // checkpoints that nobody holds
    std::int64_t num_checkpoints_ = 0;
    std::int64_t num_hits_ = 0;
    std::int64_t num_made_ = 0;
    std::int64_t num_evicted_ = 0;
    EvictionCounts evicted_;
};

/// Keeps a slot as it is for who reads or writes it.
///
/// Owns: its part in the holds of the slot, or nothing. Threads: none of its own. Cost: O(1).
class StateHold {
   public:
    StateHold() noexcept = default;
    StateHold(ColumnStates& states, ColumnStates::Slot slot) noexcept
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
    [[nodiscard]] ColumnStates::Slot slot() const noexcept { return slot_; }
    /// Nobody else holds it.
    [[nodiscard]] bool is_sole() const noexcept {
        return is_held_ && states_->num_holds(slot_) == 1;
    }
    /// As a use of the checkpoint.
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
    ColumnStates* states_ = nullptr;  // nullptr: holds nothing
    ColumnStates::Slot slot_ = ColumnStates::kNone;
    bool is_held_ = false;
};

}  // namespace kvcore
