// SPDX-License-Identifier: Apache-2.0
#include "layers/recurrent_slots.hpp"

#include <algorithm>

#include "kvcore/errors.hpp"
#include "layers/column_pages.hpp"
#include "layers/window_policy.hpp"

namespace kvcore {

RecurrentSlots::RecurrentSlots(std::int64_t num_slots, BlockPool& columns, UnreachableTails& runs,
                               PoolListener* next)
    : of_column_(static_cast<std::size_t>(columns.end_id())),
      runs_(runs),
      next_(next),
      slots_(static_cast<std::size_t>(num_slots)),
      free_(static_cast<std::size_t>(num_slots)) {
    auto slot = static_cast<Slot>(num_slots);
    for (Slot& each : free_) each = --slot;  // the lowest slot is taken first
    columns.set_listener(this);
}

std::int32_t RecurrentSlots::longest_hit(TreePosition at,
                                         std::int32_t column_tokens) const noexcept {
    if (at.depth == 0) return 0;
    ColumnsUp columns(at, column_tokens);
    std::int32_t depth = at.depth;
    while (depth > 0 && !has(columns[depth - 1])) --depth;
    return depth;
}

RecurrentSlots::Slot RecurrentSlots::take() {
    if (free_.empty()) {
        Slot victim = oldest_;
        while (victim != kNone && at(victim).holds > 0) victim = at(victim).next;
        detail::require_law(victim != kNone, "states: an admitted request gets its slot");
        drop(victim);
        ++num_evicted_;
    }
    const Slot slot = free_.back();
    free_.pop_back();
    at(slot).owner = Owner::kRequest;
    return slot;
}

void RecurrentSlots::take_over(Slot checkpoint) noexcept {
    leave_column(checkpoint);
    at(checkpoint).owner = Owner::kRequest;
}

void RecurrentSlots::give_back(Slot slot) noexcept {
    Entry& entry = at(slot);
    entry.owner = entry.holds > 0 ? Owner::kLeaving : Owner::kNobody;
    if (entry.holds == 0) free_.push_back(slot);
}

RecurrentSlots::Slot RecurrentSlots::add(BlockId column, TreePosition end) {
    if (num_available() == 0) return kNone;
    const Slot slot = take();
    join_column(slot, column, end);
    return slot;
}

void RecurrentSlots::hand_over(Slot slot, BlockId column, TreePosition end) noexcept {
    join_column(slot, column, end);
    make_ready(slot);
}

void RecurrentSlots::join_column(Slot slot, BlockId column, TreePosition end) noexcept {
    Entry& entry = at(slot);
    entry.owner = Owner::kColumn;
    entry.column = column;
    of_column_[static_cast<std::size_t>(column)] = slot + 1;
    link(slot);
    runs_.mark(static_cast<std::size_t>(slot), end);
    ++num_checkpoints_;
    if (entry.holds == 0) ++num_unused_;
}

void RecurrentSlots::make_ready(Slot checkpoint) noexcept {
    at(checkpoint).is_ready = true;
    ++num_made_;
}

void RecurrentSlots::leave_column(Slot slot) noexcept {
    Entry& entry = at(slot);
    of_column_[static_cast<std::size_t>(entry.column)] = 0;
    unlink(slot);
    runs_.unmark(static_cast<std::size_t>(slot));
    --num_checkpoints_;
    if (entry.holds == 0) --num_unused_;
    entry.is_ready = false;
}

void RecurrentSlots::drop(Slot checkpoint) noexcept {
    leave_column(checkpoint);
    give_back(checkpoint);
}

void RecurrentSlots::renew(Slot checkpoint) noexcept {
    unlink(checkpoint);
    link(checkpoint);
}

void RecurrentSlots::forget() noexcept {
    for (Slot slot = oldest_; slot != kNone;) {
        const Slot next = at(slot).next;
        if (at(slot).holds == 0) drop(slot);
        slot = next;
    }
}

void RecurrentSlots::hold(Slot slot) noexcept {
    Entry& entry = at(slot);
    if (entry.holds++ == 0 && entry.owner == Owner::kColumn) --num_unused_;
}

void RecurrentSlots::let_go(Slot slot) noexcept {
    Entry& entry = at(slot);
    if (--entry.holds > 0) return;
    if (entry.owner == Owner::kColumn) ++num_unused_;
    if (entry.owner == Owner::kLeaving) {
        entry.owner = Owner::kNobody;
        free_.push_back(slot);
    }
}

void RecurrentSlots::link(Slot slot) noexcept {
    at(slot).previous = youngest_;
    at(slot).next = kNone;
    (youngest_ != kNone ? at(youngest_).next : oldest_) = slot;
    youngest_ = slot;
}

void RecurrentSlots::unlink(Slot slot) noexcept {
    const Entry& entry = at(slot);
    (entry.previous != kNone ? at(entry.previous).next : oldest_) = entry.next;
    (entry.next != kNone ? at(entry.next).previous : youngest_) = entry.previous;
}

// Evicts at most one run per round: after that the path to the run may be useless.
std::int64_t RecurrentSlots::evict(std::int64_t n, BlockId* out, PrefixTree& tree,
                                   WindowPolicy& policy) noexcept {
    const auto is_there = [](std::int32_t) { return true; };
    std::int64_t evicted = 0;
    while (evicted < n) {
        auto [run, pages] = runs_.next(tree, nullptr, 0, [&](const TreeNode* each) {
            return runs_.last_checkpoint(each, is_there);
        });
        policy.aim(run == nullptr ? kNoNode : run->id);
        const NodeId victim = tree.victim();
        if (victim == kNoNode) break;
        if (run == nullptr) pages = tree.run(victim)->num_pages;
        const std::int64_t gone = tree.evict(std::min(n - evicted, pages), out + evicted);
        forget_columns(out + evicted, gone);
        (run == nullptr ? evicted_.policy : evicted_.unreachable) += gone;
        evicted += gone;
    }
    policy.aim(kNoNode);
    return evicted;
}

void RecurrentSlots::freed(const BlockId* ids, std::int64_t n) noexcept {
    forget_columns(ids, n);
    if (next_ != nullptr) next_->freed(ids, n);
}

void RecurrentSlots::forget_columns(const BlockId* ids, std::int64_t n) noexcept {
    for (std::int64_t i = 0; i < n; ++i) drop_of(ids[i]);
}

StateStats RecurrentSlots::stats() const noexcept {
    StateStats stats;
    stats.total_slots = static_cast<std::int64_t>(slots_.size());
    stats.checkpoints = num_checkpoints_;
    stats.used_slots =
        stats.total_slots - num_checkpoints_ - static_cast<std::int64_t>(free_.size());
    stats.available_slots = num_available();
    stats.checkpoint_hits = num_hits_;
    stats.checkpoints_made = num_made_;
    stats.evicted_checkpoints = num_evicted_;
    return stats;
}

void RecurrentSlots::check_integrity(const std::vector<Slot>& used,
                                     const std::vector<bool>& cached) const {
    using detail::require_law;
    std::vector<Owner> owners(slots_.size(), Owner::kNobody);
    for (const Slot slot : used) {
        require_law(owners[static_cast<std::size_t>(slot)] == Owner::kNobody,
                    "states: a slot belongs to one request");
        owners[static_cast<std::size_t>(slot)] = Owner::kRequest;
    }
    std::int64_t linked = 0;
    for (Slot slot = oldest_; slot != kNone; slot = at(slot).next) ++linked;
    std::int64_t unused = 0;
    std::int64_t checkpoints = 0;
    std::size_t nobodys = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const Entry& entry = slots_[i];
        require_law((entry.owner == Owner::kRequest) == (owners[i] == Owner::kRequest),
                    "states: slots and requests agree");
        require_law(entry.owner != Owner::kLeaving || entry.holds > 0,
                    "states: a leaving slot has a hold");
        if (entry.owner == Owner::kNobody) {
            ++nobodys;
            require_law(entry.holds == 0, "states: a held slot is not free");
        }
        if (entry.owner != Owner::kColumn) continue;
        ++checkpoints;
        if (entry.holds == 0) ++unused;
        require_law(find(entry.column) == static_cast<Slot>(i),
                    "states: a column refers to its checkpoint");
        require_law(cached[static_cast<std::size_t>(entry.column)],
                    "states: a column with a checkpoint is cached");
        require_law(entry.is_ready || entry.holds > 0, "states: a copy holds its checkpoint");
    }
    require_law(nobodys == free_.size(), "states: free slots are on the stack");
    require_law(linked == checkpoints, "states: checkpoints are in the order of use");
    require_law(checkpoints == num_checkpoints_ && unused == num_unused_,
                "states: checkpoints are counted");
}

}  // namespace kvcore
