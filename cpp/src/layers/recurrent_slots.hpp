// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/evictable_window_pages.hpp"
#include "layers/unreachable_tails.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// The state slots of a replica. A slot belongs to a request that computes in it, or to a column as
/// the state at its end (a checkpoint), or to no owner.
///
/// A checkpoint belongs to a column of the tree: it stays with its column when a run is cut, and is
/// dropped when the column becomes free. When slots are needed, checkpoints without holds are
/// dropped, the least recently used first. UnreachableTails stores which runs have a checkpoint.
///
/// Owns: the slots and their order. Invariant: a slot is free, a request's, a checkpoint's, or
/// leaving: only copies hold it. A hit finds a checkpoint when it is ready: its copy is complete.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) per method; taking a slot is O(held checkpoints). No memory after construction.
class RecurrentSlots final : public PoolListener {
   public:
    using Slot = std::int32_t;
    static constexpr Slot kNone = -1;

    /// `runs`: the UnreachableTails of the tree that has the columns, with room for a checkpoint
    /// per slot. `next`: another listener for freed columns.
    RecurrentSlots(std::int64_t num_slots, BlockPool& columns, UnreachableTails& runs,
                   PoolListener* next);

    /// Free slots, and checkpoints without holds.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return static_cast<std::int64_t>(free_.size()) + num_unused_;
    }
    /// Free slots.
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return static_cast<std::int64_t>(free_.size());
    }
    /// The checkpoint at the end of a column, ready or not; kNone if the column has no checkpoint.
    [[nodiscard]] Slot find(BlockId column) const noexcept {
        return of_column_[static_cast<std::size_t>(column)] - 1;
    }
    [[nodiscard]] bool has(BlockId column) const noexcept {
        const Slot slot = find(column);
        return slot != kNone && at(slot).is_ready;
    }
    /// The longest prefix of `at` that ends with a checkpoint, in columns. O(columns after it).
    [[nodiscard]] std::int32_t longest_hit(TreePosition at,
                                           std::int32_t column_tokens) const noexcept;

    /// Takes a slot for a request. Throws IntegrityError if no slot is available.
    [[nodiscard]] Slot take();
    /// Makes a checkpoint a request's slot, with its content and its holds.
    void take_over(Slot checkpoint) noexcept;
    /// Makes a taken slot the ready checkpoint of a column without a checkpoint: the last column on
    /// the path to `end`, in the run of its node.
    void hand_over(Slot slot, BlockId column, TreePosition end) noexcept;
    /// The request gives up its slot.
    void give_back(Slot slot) noexcept;
    /// Takes a slot for the checkpoint of a column without a checkpoint, the last column on the
    /// path to `end`. A hit finds the checkpoint after `make_ready`. kNone if no slot is available.
    [[nodiscard]] Slot add(BlockId column, TreePosition end);
    void make_ready(Slot checkpoint) noexcept;
    /// Removes a checkpoint.
    void drop(Slot checkpoint) noexcept;
    void drop_of(BlockId column) noexcept {
        if (find(column) != kNone) drop(find(column));
    }
    /// Counts a use.
    void renew(Slot checkpoint) noexcept;
    /// Drops every checkpoint without holds.
    void forget() noexcept;

    /// A held slot keeps its content until `let_go` was called as often as `hold`, even if its
    /// owner changes.
    void hold(Slot slot) noexcept;
    void let_go(Slot slot) noexcept;
    [[nodiscard]] std::uint32_t num_holds(Slot slot) const noexcept { return at(slot).holds; }
    [[nodiscard]] bool is_checkpoint(Slot slot) const noexcept {
        return at(slot).owner == Owner::kColumn;
    }

    /// Drops the checkpoints of columns that became free.
    void freed(const BlockId* ids, std::int64_t n) noexcept override;
    /// Drops the checkpoints of columns that move from the tree to a request.
    void forget_columns(const BlockId* ids, std::int64_t n) noexcept;
    /// Evicts up to `n` pages from `tree`, whose columns are pages, and drops their checkpoints:
    /// first pages after the last checkpoint of a run, and the rest in the order of the policy.
    /// Writes their ids to `out` [n]. Returns the number of evicted pages.
    [[nodiscard]] std::int64_t evict(std::int64_t n, BlockId* out, PrefixTree& tree,
                                     WindowPolicy& policy) noexcept;

    void count_hit() noexcept { ++num_hits_; }
    [[nodiscard]] StateStats stats() const noexcept;
    /// Pages that `evict` evicted since the last `reset_counts`.
    [[nodiscard]] const EvictionCounts& evicted() const noexcept { return evicted_; }
    void reset_counts() noexcept {
        num_hits_ = num_made_ = num_evicted_ = 0;
        evicted_ = {};
    }

    /// Throws IntegrityError unless the invariant holds. `used`: the slots of requests; `cached`
    /// [columns]: true for columns of the tree. O(slots).
    void check_integrity(const std::vector<Slot>& used, const std::vector<bool>& cached) const;

   private:
    enum class Owner : std::uint8_t { kNobody, kRequest, kColumn, kLeaving };
    struct Entry {
        Owner owner = Owner::kNobody;
        bool is_ready = false;
        std::uint32_t holds = 0;
        BlockId column = 0;
        Slot previous = kNone;  // checkpoints in the order of their last use
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

    ZeroedArray<Slot> of_column_;  // slot + 1; 0: no checkpoint
    UnreachableTails& runs_;
    PoolListener* next_;
    std::vector<Entry> slots_;
    std::vector<Slot> free_;
    Slot oldest_ = kNone;
    Slot youngest_ = kNone;
    std::int64_t num_unused_ = 0;  // checkpoints without holds
    std::int64_t num_checkpoints_ = 0;
    std::int64_t num_hits_ = 0;
    std::int64_t num_made_ = 0;
    std::int64_t num_evicted_ = 0;
    EvictionCounts evicted_;
};

}  // namespace kvcore
