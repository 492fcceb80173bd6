// SPDX-License-Identifier: Apache-2.0
#include "transfer/transfer_ledger.hpp"

#include <stdexcept>

namespace kvcore {
namespace {

// Returns true if a transfer is in flight. A thread that waits for its own transfers would wait
// forever.
bool is_in_flight(std::uint64_t ticket, std::thread::id owner) {
    if (ticket == 0) return false;
    if (owner != std::this_thread::get_id()) return true;
    throw std::logic_error("a thread waits for its own transfers; finish them first");
}

}  // namespace

OwedStatus TransferLedger::take_owed(SequenceHandle handle, Transfers& transfers) {
    state_copies.make_room_to_take(handle, transfers);
    const OwedStatus pages = copies.take_owed(handle, transfers);
    if (state_copies.take_owed(handle, transfers)) return OwedStatus::kTaken;
    const Sequence* waiting = sequences.find(handle);
    const bool waits_for_room =
        pages == OwedStatus::kNone && waiting != nullptr && flights.holds_back(waiting->replica, 0);
    return waits_for_room ? OwedStatus::kUnderWay : pages;
}

void TransferLedger::drop_owed(SequenceHandle handle) noexcept {
    copies.drop_owed(handle);
    state_copies.drop_owed(handle);
}

bool TransferLedger::is_under_way(SequenceHandle handle) const noexcept {
    bool is_found = false;
    for_each_blocked([&](std::uint64_t ticket, std::thread::id, SequenceHandle sequence) {
        is_found |= ticket != 0 && sequence == handle;
    });
    return is_found;
}

bool TransferLedger::must_wait(SequenceHandle handle) const {
    const Sequence* const sequence = sequences.find(handle);
    if (sequence == nullptr) return false;
    bool is_found = false;
    for_each_blocked([&](std::uint64_t ticket, std::thread::id owner, SequenceHandle blocked) {
        is_found = is_found || (blocked == handle && is_in_flight(ticket, owner));
    });
    for (const TierFlight& flight : flights.all()) {
        const bool makes_room = flight.is_spill() && flight.replica == sequence->replica;
        is_found = is_found || (makes_room && is_in_flight(flight.ticket, flight.owner));
    }
    return is_found;
}

void TransferLedger::drop_forgotten(Replica& home) noexcept {
    home.for_each_level([](Level& level) { level.drop_forgotten_refs(); });
    copies.drop_forgotten();
    flights.drop_forgotten();
    store_queue.drop_forgotten();
}

}  // namespace kvcore
