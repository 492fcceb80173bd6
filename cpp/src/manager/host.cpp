// SPDX-License-Identifier: Apache-2.0
// The host tier: what is copied there and back, and when it can be found. The bytes are moved by
// the caller, while the mutex is free; until it says that they are, nothing of them is found.
#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "manager/admission.hpp"

namespace kvcore {

// Where the tier has whole pages beyond the hit so far, it goes on there: nothing is left to copy
// out of a partly equal page then.
std::int64_t CacheManager::find_hit_below(Admission& admission, const TierIndex& host,
                                          const RequestView& request, std::int64_t hit) const {
    const std::int64_t longest = (request.end - 1) / config_.page_size;
    if (admission.match.at.depth >= longest) return hit;
    const TreePosition below = host.match(request.name_space, request.tokens, request.end - 1);
    const std::int64_t reach = std::int64_t{below.depth} * config_.page_size;
    if (reach <= hit) return hit;
    admission.below = below;
    admission.match.partial = {};
    admission.match.partial_tokens = 0;
    return reach;
}

// The pages behind the tree's part of the hit are the request's own; they are filled from below.
void CacheManager::prepare_load(Reservation& made, const Sequence& sequence,
                                const RequestView& request, Transfers& transfers) {
    TierIndex& host = *replica_at(sequence.replica).host;
    const TreePosition& below = made.admission.below;
    auto flight = std::make_unique<HostFlight>();
    flight->replica = sequence.replica;
    flight->sequence = request.sequence;
    flight->direction = HostDirection::kLoad;
    flight->source = PathHold(host.pool(), host.tree(), host.tree().split(below), below.depth);
    const std::int32_t first = made.admission.hit_pages;
    const auto n = static_cast<std::size_t>(below.depth - first);
    flight->host_pages.resize(n);
    host.copy_pages({flight->source.node(), below.depth}, first, flight->host_pages.data());
    flight->device_pages.reserve(n);
    make_room(transfers.host_copies, n);
    make_room(ledger_->flights, 1);
    made.load = std::move(flight);
}

// Of several rows: each has made room for its own load alone.
void CacheManager::make_room_for_loads(const std::vector<Reservation>& made, Transfers& transfers) {
    std::size_t loads = 0;
    std::size_t pages = 0;
    for (const Reservation& each : made) {
        if (each.load == nullptr) continue;
        ++loads;
        pages += each.load->host_pages.size();
    }
    make_room(transfers.host_copies, pages);
    make_room(ledger_->flights, loads);
}

void CacheManager::owe_load(Reservation& made, Sequence& sequence, Transfers& transfers) noexcept {
    HostFlight& flight = *made.load;
    flight.ticket = ledger_->ticket_of(transfers);
    flight.owner = std::this_thread::get_id();
    const auto first = static_cast<std::size_t>(made.admission.hit_pages);
    for (std::size_t i = 0; i < flight.host_pages.size(); ++i) {
        const BlockId page = sequence.pages[first + i];
        flight.device_pages.push_back(page);
        transfers.host_copies.push_back(
            {sequence.replica, HostDirection::kLoad, page, flight.host_pages[i]});
    }
    replica_at(sequence.replica)
        .pool.share(flight.device_pages.data(),
                    static_cast<std::int64_t>(flight.device_pages.size()));
    ++sequence.num_pending;
    ledger_->flights.push_back(std::move(flight));
}

// Moves a sequence's place in the tier on over what is stored there of its first `end` pages.
// Tokens are read from the tree, not from the request, so that they are those of the pages.
void CacheManager::advance_host_place(Replica& replica, Sequence& sequence, std::int32_t end) {
    const std::int32_t first = PrefixTree::depth_of(sequence.host_node);
    if (end <= first) return;
    const std::vector<TokenId> tokens = replica.tree.tokens_of({sequence.node, end}, first);
    sequence.host_node = replica.host->advance(sequence.host_node, tokens.data(),
                                               static_cast<std::int64_t>(tokens.size()));
}

// Of cached pages that the tier does not have, those to be stored for a sequence: not what is on
// its way already, and no more than there is room for. Taking them from the tier comes last, since
// nothing after it fails.
void CacheManager::choose_stores(Replica& replica, const Sequence& sequence, std::int32_t end,
                                 HostFlight& flight) {
    const std::int32_t first = PrefixTree::depth_of(sequence.host_node);
    const auto page_size = static_cast<std::size_t>(replica.tree.page_size());
    std::vector<BlockId>& pages = flight.device_pages;
    pages.resize(static_cast<std::size_t>(end - first));
    replica.tree.copy_pages({sequence.node, end}, first, pages.data());
    const auto is_on_its_way = [&](BlockId page) -> bool {
        return replica.storing[static_cast<std::size_t>(page)];
    };
    const auto own = std::find_if_not(pages.begin(), pages.end(), is_on_its_way);
    pages.erase(std::find_if(own, pages.end(), is_on_its_way), pages.end());
    flight.ahead = static_cast<std::int32_t>(own - pages.begin());
    pages.erase(pages.begin(), own);
    const auto last = first + flight.ahead + static_cast<std::int32_t>(pages.size());
    flight.tokens = replica.tree.tokens_of({sequence.node, last}, first);
    flight.host_pages.resize(pages.size());
    const auto taken = static_cast<std::size_t>(
        replica.host->take(static_cast<std::int64_t>(pages.size()), flight.host_pages.data()));
    pages.resize(taken);
    flight.host_pages.resize(taken);
    flight.tokens.resize((static_cast<std::size_t>(flight.ahead) + taken) * page_size);
}

// All that the tier has of a sequence's prefix, or no place: from a shorter one on it would be
// found by no more pages at a time than there is room for.
void CacheManager::find_host_place(Replica& replica, Sequence& sequence) {
    sequence.host_node = replica.host->open(PrefixTree::name_of(sequence.node));
    try {
        advance_host_place(replica, sequence, sequence.committed);
    } catch (const std::bad_alloc&) {
        replica.host->let_go(std::exchange(sequence.host_node, nullptr));
        throw;
    }
}

// A full tier costs next to nothing: nothing is looked at that there is no room for.
void CacheManager::owe_stores(SequenceHandle handle, Sequence& sequence, Transfers& transfers) {
    if (sequence.storing != 0) return;
    Replica& replica = replica_at(sequence.replica);
    if (sequence.host_node == nullptr) find_host_place(replica, sequence);
    const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(
        sequence.committed,
        PrefixTree::depth_of(sequence.host_node) + replica.host->num_available()));
    advance_host_place(replica, sequence, end);
    const std::int32_t stored = PrefixTree::depth_of(sequence.host_node);
    if (end <= stored) return;
    make_room(ledger_->flights, 1);
    make_room(transfers.host_copies, static_cast<std::size_t>(end - stored));
    HostFlight flight;
    choose_stores(replica, sequence, end, flight);
    if (flight.host_pages.empty()) return;
    flight.ticket = ledger_->ticket_of(transfers);
    flight.owner = std::this_thread::get_id();
    flight.replica = sequence.replica;
    flight.sequence = handle;
    flight.place = {*replica.host, std::exchange(sequence.host_node, nullptr)};
    const auto n = static_cast<std::int32_t>(flight.device_pages.size());
    flight.source = PathHold(replica.pool, replica.tree, sequence.node, stored + flight.ahead + n);
    sequence.storing = flight.number = ledger_->free_number();
    for (std::size_t i = 0; i < flight.host_pages.size(); ++i) {
        replica.storing[static_cast<std::size_t>(flight.device_pages[i])] = true;
        transfers.host_copies.push_back({sequence.replica, HostDirection::kStore,
                                         flight.device_pages[i], flight.host_pages[i]});
    }
    ledger_->flights.push_back(std::move(flight));
}

// The place goes back to the sequence, should that still be where it was. What there is no memory
// to publish is not stored, and the place is to be found again.
void CacheManager::finish_store(HostFlight& flight, bool done) noexcept {
    Replica& replica = replica_at(flight.replica);
    TierIndex& host = *replica.host;
    const auto n = static_cast<std::int32_t>(flight.host_pages.size());
    for (const BlockId page : flight.device_pages) {
        replica.storing[static_cast<std::size_t>(page)] = false;
    }
    flight.source.end(false);
    if (done) replica.metrics.stored_pages += n;
    TreeNode* place = flight.place.release();
    bool is_published = false;
    if (done && flight.is_wanted) {
        try {
            const std::int64_t ahead = std::int64_t{flight.ahead} * config_.page_size;
            const std::int32_t joint = PrefixTree::depth_of(place) + flight.ahead;
            place = host.advance(place, flight.tokens.data(), ahead);
            if (PrefixTree::depth_of(place) == joint) {
                place =
                    host.publish(place, flight.tokens.data() + ahead, flight.host_pages.data(), n);
                is_published = true;
            }
        } catch (const std::bad_alloc&) {
            host.let_go(std::exchange(place, nullptr));
        }
    }
    if (!is_published) host.give_back(flight.host_pages.data(), n);
    Sequence* sequence = sequences_.find(flight.sequence);
    if (sequence != nullptr && sequence->storing == flight.number) {
        sequence->storing = 0;
        sequence->host_node = place;
    } else if (place != nullptr) {
        host.let_go(place);
    }
}

// A request whose pages did not arrive is where a claim begins: what it holds may be anything.
void CacheManager::finish_load(HostFlight& flight, bool done) noexcept {
    Replica& replica = replica_at(flight.replica);
    const auto n = static_cast<std::int64_t>(flight.device_pages.size());
    flight.source.end(true);
    if (done) replica.metrics.loaded_pages += n;
    Sequence* sequence = sequences_.find(flight.sequence);
    if (sequence != nullptr) {
        --sequence->num_pending;
        if (!done) begin_again(*sequence);
    }
    replica.pool.free(flight.device_pages.data(), n);
}

}  // namespace kvcore
