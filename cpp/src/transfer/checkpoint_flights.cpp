// SPDX-License-Identifier: Apache-2.0
// With states: what is stored of a sequence's slot. A checkpoint of the tier belongs to a record of
// its own ColumnStates, at the end of what the sequence has in the tier.
#include <algorithm>

#include "kvcore/errors.hpp"
#include "support/make_room.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {

// The store that this call gave out for a sequence.
TierFlight* TierFlights::find_store(SequenceHandle handle, const Transfers& transfers) noexcept {
    const std::uint32_t number = standings_[handle.index].storing;
    const auto found =
        std::find_if(flights_.begin(), flights_.end(), [&](const TierFlight& flight) {
            return flight.number == number && flight.ticket == transfers.ticket && !flight.is_load;
        });
    return found == flights_.end() ? nullptr : &*found;
}

// Several requests that share a prefix may come to its end in one step.
bool TierFlights::is_storing_state(std::int32_t replica, TreePosition end) const noexcept {
    return std::any_of(flights_.begin(), flights_.end(), [&](const TierFlight& flight) {
        return flight.replica == replica && !flight.is_load && flight.stored_state &&
               flight.place && flight.place.node() == end.node && flight.state_depth == end.depth;
    });
}

// Where the place of a store will be.
std::int32_t TierFlights::depth_after(const TierFlight& flight) const noexcept {
    const auto num_new =
        grouping_.is_plain() ? static_cast<std::int32_t>(flight.host_pages.size()) : flight.num_new;
    return flight.place.depth() + (num_new > 0 ? flight.ahead + num_new : 0);
}

// The state is read from where it was computed, as it is for the checkpoint of the device: so both
// copies may be made in any order, and there need be no slot for the other one.
void TierFlights::owe_checkpoint(SequenceHandle handle, Sequence& sequence, ColumnStates::Slot slot,
                                 Transfers& transfers) {
    Replica& home = home_of(sequence.replica);
    if (home.host_states == nullptr) return;
    const std::int32_t depth = sequence.pages.committed();
    if (handle.index >= standings_.size()) standings_.resize(std::size_t{handle.index} + 1);
    Standing& standing = standings_[handle.index];
    if (rules_.has_marks() && standing.storing == 0) {
        rules_.demand(home.tree, sequence.replica, {sequence.pages.node(), depth});
        owe_stores(handle, sequence, transfers);
    }
    TierFlight* flight = nullptr;
    if (standing.storing != 0) {
        flight = find_store(handle, transfers);
        if (flight == nullptr || depth_after(*flight) != depth) return;
    } else {
        const Path path = path_of(handle, sequence);
        if (!standing.place) find_place(standing, path);
        advance(standing, path, depth);
        if (standing.place.depth() != depth) return;
        if (StateHold known = home.hold_stored_state({standing.place.node(), depth})) {
            return known.end_use();
        }
        if (is_storing_state(sequence.replica, {standing.place.node(), depth})) return;
    }
    if (home.host_states->num_available() == 0) return;
    make_room(transfers.state_moves, 1);
    if (flight == nullptr) {
        make_room(flights_, 1);
        TierFlight alone;
        alone.replica = sequence.replica;
        alone.sequence = handle;
        alone.place = std::move(standing.place);
        standing.storing = alone.number = free_number();
        give_out_store(std::move(alone), transfers);
        flight = &flights_.back();
    }
    flight->state = StateHold(*home.states, slot);
    flight->stored_state = StateHold(*home.host_states, home.host_states->take());
    flight->state_depth = depth;
    ++sequence.num_pending;
    transfers.state_moves.push_back(
        {sequence.replica, slot, flight->stored_state.slot(), Tier::kDevice, Tier::kHost});
}

// It is the record's, should that have arrived and have none. Its place is where it will be.
void TierFlights::finish_checkpoint(TierFlight& flight, bool done) noexcept {
    if (Sequence* sequence = sequences_.find(flight.sequence)) --sequence->num_pending;
    land_checkpoint(home_of(flight.replica), flight, done);
}

void TierFlights::land_checkpoint(Replica& home, TierFlight& flight, bool done) noexcept {
    ColumnStates& states = *home.host_states;
    const ColumnStates::Slot slot = flight.stored_state.slot();
    const bool has_record = done && flight.place && flight.place.depth() == flight.state_depth;
    if (!has_record) return states.give_back(slot);
    const BlockId record =
        Replica::last_column(home.host->tree(), {flight.place.node(), flight.state_depth});
    if (states.find(record) != ColumnStates::kNone) return states.give_back(slot);
    states.hand_over(slot, record, {flight.place.node(), flight.state_depth});
    tell_below(flight, flight.state_depth - 1, flight.state_depth);
}

// A slot of the tier is free, on its way in, or a record's.
void TierFlights::check_states(std::int32_t replica) const {
    const Replica& home = home_of(replica);
    std::vector<ColumnStates::Slot> used;
    for (const TierFlight& flight : flights_) {
        const bool takes_slot = flight.replica == replica && !flight.is_load && flight.state;
        if (takes_slot) used.push_back(flight.stored_state.slot());
    }
    for (const StoreFill& fill : fills_) {
        const TierFlight& flight = fill.flight;
        if (flight.replica == replica && flight.stored_state) {
            used.push_back(flight.stored_state.slot());
        }
    }
    std::vector<bool> cached(static_cast<std::size_t>(home.host->num_pages()));
    home.host->tree().for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) cached[static_cast<std::size_t>(ids[i])] = true;
    });
    home.host_states->check_integrity(used, cached);
}

}  // namespace kvcore
