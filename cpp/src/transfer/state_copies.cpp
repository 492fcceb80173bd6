// SPDX-License-Identifier: Apache-2.0
#include "transfer/state_copies.hpp"

#include <algorithm>
#include <utility>

#include "support/memory.hpp"
#include "support/tickets.hpp"

namespace kvcore {

RecurrentSlots& StateCopies::states(std::int32_t replica) const noexcept {
    return *replicas_[static_cast<std::size_t>(replica)]->states;
}

void StateCopies::make_room(std::size_t n, Transfers* transfers) {
    if (transfers == nullptr) return kvcore::make_room(list_, n);
    kvcore::make_room(transfers->state_copies, n);
    kvcore::make_room(copies_, n);
}

bool StateCopies::is_named(SequenceHandle handle) const noexcept {
    return std::any_of(copies_.begin(), copies_.end(),
                       [handle](const Copy& copy) { return names(copy, handle); });
}

void StateCopies::add(const StateMove& move, SequenceHandle from, SequenceHandle into,
                      Transfers* transfers, bool has_run) noexcept {
    const bool is_checkpoint = sequences_.find(into) == nullptr;
    RecurrentSlots& states = this->states(move.replica);
    if (transfers == nullptr) {
        if (is_checkpoint) states.make_ready(move.destination);
        prune();
        // There is room.
        return list_.push_back({move, into, is_checkpoint, is_checkpoint || has_run});
    }
    for (const SequenceHandle handle : {from, into}) {
        Sequence* sequence = sequences_.find(handle);
        if (sequence != nullptr && !is_named(handle)) ++sequence->num_pending;
    }
    StateHold source(states, move.source);
    StateHold destination(states, move.destination);
    copies_.push_back({move, from, into, std::move(source), std::move(destination), 0, {}});
    give_out(copies_.back(), *transfers);
}

void StateCopies::give_out(Copy& copy, Transfers& transfers) noexcept {
    copy.ticket = tickets_.of(transfers);
    copy.owner = std::this_thread::get_id();
    transfers.state_copies.push_back(copy.move);  // there is room
}

void StateCopies::leave_sequences(Copy& copy) noexcept {
    const SequenceHandle from = std::exchange(copy.from, {});
    const SequenceHandle into = std::exchange(copy.into, {});
    for (const SequenceHandle handle : {from, into}) {
        Sequence* sequence = sequences_.find(handle);
        if (sequence != nullptr && !is_named(handle)) --sequence->num_pending;
    }
}

bool StateCopies::finish(std::uint64_t ticket, bool done) noexcept {
    return end_ticket(copies_, ticket, [&](Copy& copy) {
        const bool is_owed = !done && sequences_.find(copy.into) != nullptr;
        if (is_owed) return false;
        // The checkpoint may have been dropped with its column meanwhile.
        RecurrentSlots& states = this->states(copy.move.replica);
        const RecurrentSlots::Slot slot = copy.move.destination;
        if (copy.into.generation == 0 && states.is_checkpoint(slot)) {
            done ? states.make_ready(slot) : states.drop(slot);
        }
        leave_sequences(copy);
        return true;
    });
}

void StateCopies::make_room_to_take(SequenceHandle handle, Transfers& transfers) const {
    const auto n = std::count_if(copies_.begin(), copies_.end(), [handle](const Copy& copy) {
        return copy.ticket == 0 && names(copy, handle);
    });
    kvcore::make_room(transfers.state_copies, static_cast<std::size_t>(n));
}

bool StateCopies::take_owed(SequenceHandle handle, Transfers& transfers) noexcept {
    bool is_taken = false;
    for (Copy& copy : copies_) {
        if (copy.ticket != 0 || !names(copy, handle)) continue;
        give_out(copy, transfers);
        is_taken = true;
    }
    return is_taken;
}

void StateCopies::drop_owed(SequenceHandle handle) noexcept {
    for (Copy& copy : copies_) {
        if (copy.ticket != 0) continue;
        if (copy.from == handle) copy.from = {};
        if (copy.into != handle) continue;
        leave_sequences(copy);
        copy.ticket = kEnded;
    }
    remove_ended(copies_);
}

// The next copy on the list that reads or writes the destination of copy `index`; nullptr if no
// later copy does.
const StateCopies::Listed* StateCopies::next_use(std::size_t index) const noexcept {
    const StateMove& move = list_[index].move;
    for (std::size_t i = index + 1; i < list_.size(); ++i) {
        const StateMove& next = list_[i].move;
        const bool uses = next.replica == move.replica &&
                          (next.source == move.destination || next.destination == move.destination);
        if (uses) return &list_[i];
    }
    return nullptr;
}

// Removes useless copies, which would pile up if the caller never took the list. A copy is useless
// if the next use of its destination overwrites the slot, or reads the slot after kernels ran: the
// copy was due before these kernels. Copies of checkpoints, and of the state before drafts, read a
// slot after kernels ran.
void StateCopies::prune() noexcept {
    if (list_.size() < prune_at_) return;
    for (std::size_t i = 0; i < list_.size(); ++i) {
        const Listed* next = next_use(i);
        const bool is_read =
            next == nullptr || (next->move.source == list_[i].move.destination && !next->has_run);
        if (!is_read) list_[i].move.replica = -1;
    }
    const auto is_useless = [](const Listed& listed) { return listed.move.replica < 0; };
    list_.erase(std::remove_if(list_.begin(), list_.end(), is_useless), list_.end());
    prune_at_ = std::max<std::size_t>(64, 2 * list_.size());
}

std::vector<StateMove> StateCopies::take_list() {
    std::vector<StateMove> taken;
    taken.reserve(list_.size());
    for (std::size_t i = 0; i < list_.size(); ++i) {
        const bool is_gone = !list_[i].is_checkpoint && sequences_.find(list_[i].into) == nullptr;
        if (is_gone && next_use(i) == nullptr) continue;
        taken.push_back(list_[i].move);
    }
    list_.clear();
    return taken;
}

}  // namespace kvcore
