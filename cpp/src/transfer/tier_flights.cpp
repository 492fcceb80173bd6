// SPDX-License-Identifier: Apache-2.0
#include "transfer/tier_flights.hpp"

#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/make_room.hpp"

namespace kvcore {

TierFlights::TierFlights(const CacheConfig& config, const Grouping& grouping,
                         const std::vector<std::unique_ptr<Replica>>& replicas, Tickets& tickets,
                         SequenceTable& sequences, const WindowRows& windows, PageHolds& holds,
                         StoreQueue& queue)
    : page_size_(config.page_size),
      grouping_(grouping),
      replicas_(replicas),
      tickets_(tickets),
      sequences_(sequences),
      windows_(windows),
      holds_(holds),
      queue_(queue),
      rules_(config, replicas[0]->pool.end_id()),
      tells_hits_(config.host_eviction.order != EvictionOrder::kLru) {
    if (config.host_pages == 0) return;
    const auto n = static_cast<std::size_t>(replicas[0]->pool.end_id());
    storing_.assign(replicas.size(), std::vector<bool>(n));
}

std::unique_ptr<TierFlight> TierFlights::prepare_load(SequenceHandle handle, std::int32_t replica,
                                                      const TieredHit& hit, bool has_state,
                                                      Transfers& transfers) {
    Replica& home = home_of(replica);
    TierIndex& host = *home.host;
    auto flight = std::make_unique<TierFlight>();
    flight->replica = replica;
    flight->sequence = handle;
    flight->is_load = true;
    flight->first = hit.at.depth;
    const TreePosition below{host.tree().split(hit.below), hit.below.depth};
    flight->source = PathHold(host.pool(), host.tree(), below.node, below.depth,
                              home.host_columns.get(), home.host_states.get());
    const TieredHit found{hit.at, below, hit.tokens};
    if (grouping_.is_plain()) {
        choose_load(home, found, *flight);
    } else {
        choose_column_load(home, found, *flight);
    }
    make_room(transfers.tier_moves, static_cast<std::size_t>(flight->num_pages));
    make_room(flights_, 1);
    if (has_state) flight->stored_state = home.hold_stored_state(below);
    if (flight->stored_state) make_room(transfers.state_moves, 1);
    return flight;
}

// The pages behind the tree's part of the hit are the request's own; they are filled from below.
void TierFlights::choose_load(const Replica& home, const TieredHit& hit, TierFlight& flight) const {
    const auto n = static_cast<std::size_t>(hit.below.depth - hit.at.depth);
    flight.num_pages = static_cast<std::int64_t>(n);
    flight.host_pages.resize(n);
    home.host->copy_pages(hit.below, hit.at.depth, flight.host_pages.data());
    flight.device_pages.reserve(n);
}

void TierFlights::make_room_for_loads(std::size_t loads, std::size_t pages, Transfers& transfers) {
    make_room(transfers.tier_moves, pages);
    make_room(flights_, loads);
    if (replicas_[0]->host_states != nullptr) make_room(transfers.state_moves, loads);
}

void TierFlights::owe_load(TierFlight& load, Sequence& sequence, ColumnStates::Slot slot,
                           Transfers& transfers) {
    load.ticket = tickets_.of(transfers);
    load.owner = std::this_thread::get_id();
    if (load.stored_state) {
        load.state = StateHold(*home_of(load.replica).states, slot);
        transfers.state_moves.push_back(
            {load.replica, load.stored_state.slot(), slot, Tier::kHost, Tier::kDevice});
    }
    ++sequence.num_pending;
    if (!grouping_.is_plain()) return owe_column_load(load, sequence, transfers);
    for (std::size_t i = 0; i < load.host_pages.size(); ++i) {
        const BlockId page = sequence.pages[load.first + static_cast<std::int32_t>(i)];
        load.device_pages.push_back(page);
        transfers.tier_moves.push_back({load.replica, load.host_pages[i], page, page_size_,
                                        load.sequence, Tier::kHost, Tier::kDevice});
    }
    home_of(load.replica)
        .pool.share(load.device_pages.data(), static_cast<std::int64_t>(load.device_pages.size()));
    flights_.push_back(std::move(load));
}

// Moves the place on over what is stored of the sequence's first `end` pages. Tokens are read from
// the tree, not from the request, so that they are those of the pages.
void TierFlights::advance(Standing& standing, const Path& path, std::int32_t end) const {
    const std::int32_t first = standing.place.depth();
    if (end <= first) return;
    const std::vector<TokenId> tokens =
        home_of(path.replica).tree.tokens_of({path.at.node, end}, first);
    standing.place.advance(tokens.data(), static_cast<std::int64_t>(tokens.size()));
}

// All that the tier has of a sequence's prefix, or no place: from a shorter one on it would be
// found by no more pages at a time than there is room for.
void TierFlights::find_place(Standing& standing, const Path& path) const {
    TierIndex& host = *home_of(path.replica).host;
    Standing found;
    found.place = {host, host.open(PrefixTree::name_of(path.at.node))};
    advance(found, path, path.at.depth);
    standing.place = std::move(found.place);
}

// What is stored is worth as much as on the device.
void TierFlights::find_parts(const Path& path, std::int32_t first, std::int32_t end,
                             TierFlight& flight) const {
    const Replica& home = home_of(path.replica);
    if (!home.host->tree().policy().interest().retention) return;
    const TreeNode* node = PrefixTree::position(path.at.node, end).node;
    for (; node->end() > first; node = node->parent) {
        flight.parts.push_back(
            {std::min(end, node->end()), home.tree.policy().retention(node->id)});
    }
    std::reverse(flight.parts.begin(), flight.parts.end());
}

// Of cached pages that the tier does not have, those to be stored for a sequence: not what is on
// its way already, and no more than there is room for. Taking them from the tier comes last, since
// nothing after it fails.
void TierFlights::choose_stores(const Standing& standing, const Path& path, std::int32_t end,
                                TierFlight& flight) const {
    Replica& home = home_of(path.replica);
    const std::int32_t first = standing.place.depth();
    TreeNode* node = path.at.node;
    std::vector<BlockId>& pages = flight.device_pages;
    pages.resize(static_cast<std::size_t>(end - first));
    home.tree.copy_pages({node, end}, first, pages.data());
    const std::vector<bool>& storing = storing_[static_cast<std::size_t>(path.replica)];
    const auto is_on_its_way = [&](BlockId page) -> bool {
        return storing[static_cast<std::size_t>(page)];
    };
    const auto own = std::find_if_not(pages.begin(), pages.end(), is_on_its_way);
    pages.erase(std::find_if(own, pages.end(), is_on_its_way), pages.end());
    flight.ahead = static_cast<std::int32_t>(own - pages.begin());
    pages.erase(pages.begin(), own);
    const auto last = first + flight.ahead + static_cast<std::int32_t>(pages.size());
    flight.tokens = home.tree.tokens_of({node, last}, first);
    find_parts(path, first, last, flight);
    flight.host_pages.resize(pages.size());
    const auto taken = static_cast<std::size_t>(
        home.take_stored(static_cast<std::int64_t>(pages.size()), flight.host_pages.data()));
    pages.resize(taken);
    flight.host_pages.resize(taken);
    flight.tokens.resize((static_cast<std::size_t>(flight.ahead) + taken) *
                         static_cast<std::size_t>(page_size_));
}

// A full tier costs next to nothing: nothing is looked at that there is no room for.
void TierFlights::owe_stores(SequenceHandle handle, const Sequence& sequence,
                             Transfers& transfers) {
    if (sequence.pages.holds_forgotten()) return;
    if (handle.index >= standings_.size()) standings_.resize(std::size_t{handle.index} + 1);
    Standing& standing = standings_[handle.index];
    if (standing.storing != 0) return;
    standing.is_due = false;
    const Path path = path_of(handle, sequence);
    if (grouping_.is_plain()) return store_pages(path, standing, transfers);
    store_columns(path, windows_.of(handle), standing, transfers);
}

void TierFlights::store_pages(const Path& path, Standing& standing, Transfers& transfers) {
    Replica& home = home_of(path.replica);
    if (!standing.place) find_place(standing, path);
    const auto room = static_cast<std::int32_t>(
        std::min<std::int64_t>(path.at.depth, standing.place.depth() + home.host->num_available()));
    const std::int32_t end =
        rules_.end_of_due(home.tree, path.replica, {path.at.node, room}, standing.place.depth());
    advance(standing, path, end);
    const std::int32_t stored = standing.place.depth();
    if (end <= stored) return;
    make_room(flights_, 1);
    make_room(transfers.tier_moves, static_cast<std::size_t>(end - stored));
    TierFlight flight;
    choose_stores(standing, path, end, flight);
    if (flight.host_pages.empty()) return;
    flight.replica = path.replica;
    flight.sequence = path.sequence;
    flight.place = std::move(standing.place);
    const auto n = static_cast<std::int32_t>(flight.device_pages.size());
    flight.num_pages = n;
    flight.source = PathHold(home.pool, home.tree, path.at.node, stored + flight.ahead + n, nullptr,
                             home.states.get());
    standing.storing = flight.number = free_number();
    give_out_store(std::move(flight), transfers);
}

void TierFlights::give_out_store(TierFlight flight, Transfers& transfers) noexcept {
    flight.ticket = tickets_.of(transfers);
    flight.owner = std::this_thread::get_id();
    std::vector<bool>& storing = storing_[static_cast<std::size_t>(flight.replica)];
    for (std::size_t i = 0; i < flight.host_pages.size(); ++i) {
        const BlockId page = flight.device_pages[i];
        if (flight.host_pages[i] < 0) continue;
        storing[static_cast<std::size_t>(page)] = true;
        if (!grouping_.is_plain()) {
            give_out_column(flight, page, flight.host_pages[i], transfers);
            continue;
        }
        transfers.tier_moves.push_back({flight.replica, page, flight.host_pages[i], page_size_,
                                        flight.sequence, Tier::kDevice, Tier::kHost});
    }
    flights_.push_back(std::move(flight));
}

// What names a store for its sequence, in half the memory of a ticket.
std::uint32_t TierFlights::free_number() noexcept {
    const auto is_taken = [this](const TierFlight& each) { return each.number == last_number_; };
    do {
        ++last_number_;
    } while (last_number_ == 0 || std::any_of(flights_.begin(), flights_.end(), is_taken));
    return last_number_;
}

// These columns on the way to the place are to be written to stores.
void TierFlights::tell_below(const TierFlight& flight, std::int32_t first,
                             std::int32_t end) const noexcept {
    if (flight.goes_below) queue_.arrived(flight.replica, {flight.place.node(), end}, first);
}

// Behind what earlier flights have brought, should that be there. What there is no memory to
// publish is not stored, and the place is to be found again. What is left of its pages was not
// published.
void TierFlights::publish(TierFlight& flight) const noexcept {
    StorePlace& place = flight.place;
    std::vector<BlockId>& pages = flight.host_pages;
    std::int32_t published = 0;
    try {
        const std::int32_t joint = place.depth() + flight.ahead;
        const TokenId* tokens = flight.tokens.data();
        place.advance(tokens, std::int64_t{flight.ahead} * page_size_);
        if (place.depth() != joint) return;
        tokens += std::int64_t{flight.ahead} * page_size_;
        const auto end = joint + static_cast<std::int32_t>(pages.size());
        for_each_part(flight, joint, end, [&](std::int32_t last, const Retention& retention) {
            place.publish(tokens + std::int64_t{published} * page_size_, pages.data() + published,
                          last - joint - published, nullptr, retention);
            published = last - joint;
        });
        tell_below(flight, joint, place.depth());
    } catch (const std::bad_alloc&) {
        place.reset();
    }
    pages.erase(pages.begin(), pages.begin() + published);
}

// The place goes back to the sequence, should that still be where it was.
void TierFlights::finish_store(TierFlight& flight, bool done) noexcept {
    if (!grouping_.is_plain()) return finish_column_store(flight, done);
    Replica& home = home_of(flight.replica);
    const auto n = static_cast<std::int64_t>(flight.host_pages.size());
    std::vector<bool>& storing = storing_[static_cast<std::size_t>(flight.replica)];
    for (const BlockId page : flight.device_pages) {
        storing[static_cast<std::size_t>(page)] = false;
    }
    flight.source.end(false);
    if (done) home.metrics.stored_pages += n;
    if (n > 0 && done && flight.is_wanted) publish(flight);
    home.host->give_back(flight.host_pages.data(),
                         static_cast<std::int64_t>(flight.host_pages.size()));
    hand_back_place(flight, done);
}

void TierFlights::hand_back_place(TierFlight& flight, bool done) noexcept {
    if (flight.state) finish_checkpoint(flight, done);
    if (Standing* standing = owner_of(flight)) {
        standing->storing = 0;
        standing->place = std::move(flight.place);
    } else {
        flight.place.reset();
    }
}

bool TierFlights::is_under_way(SequenceHandle handle) const noexcept {
    return std::any_of(flights_.begin(), flights_.end(), [handle](const TierFlight& flight) {
        return flight.holds_up() && flight.sequence == handle;
    });
}

StorePlace TierFlights::find_cut(SequenceHandle handle, std::int32_t replica,
                                 std::int32_t columns) const {
    const Standing* standing = find(handle);
    if (standing == nullptr || !standing->place || standing->place.depth() <= columns) return {};
    TierIndex& host = *home_of(replica).host;
    return {host, host.hold({standing->place.node(), columns})};
}

void TierFlights::move_back(SequenceHandle handle, std::int32_t columns, StorePlace cut) noexcept {
    Standing* standing = find(handle);
    if (standing == nullptr) return;
    standing->storing = 0;
    standing->examined = std::min(standing->examined, columns);
    if (cut) standing->place = std::move(cut);
}

void TierFlights::forget(SequenceHandle handle) noexcept {
    Standing* standing = find(handle);
    if (standing == nullptr) return;
    const bool has_records = standing->place && !grouping_.is_plain();
    if (has_records) keep_end(home_of(sequences_.find(handle)->replica), standing->place);
    *standing = {};
}

void TierFlights::drop_forgotten(std::int32_t replica) noexcept {
    const auto is_gone = [](const StorePlace& place) {
        return place && PrefixTree::is_forgotten(place.node());
    };
    for (TierFlight& flight : flights_) {
        if (flight.replica != replica) continue;
        if (flight.is_load) {
            Sequence* sequence = sequences_.find(flight.sequence);
            if (sequence != nullptr && flight.source.is_forgotten()) {
                sequence->pages.bar(PrefixTree::findable_depth(flight.source.node()));
            }
        } else if (flight.source.is_forgotten() || is_gone(flight.place)) {
            flight.is_wanted = false;
            flight.place.reset();
        }
    }
    for (StoreFill& fill : fills_) {
        if (fill.flight.replica != replica || !is_gone(fill.flight.place)) continue;
        fill.flight.is_wanted = false;
        fill.windows.reset();
        fill.flight.place.reset();
    }
    for (Standing& standing : standings_) {
        if (!is_gone(standing.place)) continue;
        standing.place.reset();
        standing.examined = 0;
    }
}

void TierFlights::loosen() noexcept {
    for (TierFlight& flight : flights_) {
        const std::vector<BlockId>& pages = flight.read_pages();
        flight.source.loosen(pages.data(), static_cast<std::int64_t>(pages.size()));
        if (flight.is_load || owner_of(flight) != nullptr) continue;
        flight.is_wanted = false;
        flight.place.reset();
    }
    for (StoreFill& fill : fills_) {
        fill.flight.is_wanted = false;
        fill.windows.reset();
        fill.flight.place.reset();
    }
}

void TierFlights::fasten() noexcept {
    for (TierFlight& flight : flights_) {
        const std::vector<BlockId>& pages = flight.read_pages();
        flight.source.fasten(pages.data(), static_cast<std::int64_t>(pages.size()));
    }
}

}  // namespace kvcore
