// SPDX-License-Identifier: Apache-2.0
// The host tier: what is copied there and back, and when it can be found. The bytes are moved by
// the caller, while the mutex is free; until it says that they are, nothing of them is found.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "admission.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

void CacheManager::require_host_copies(const std::vector<HostCopy>* host_copies) const {
    if (config_.host_pages == 0 || host_copies != nullptr) return;
    throw std::invalid_argument(
        detail::concat("host_copies is missing, must be given to a manager "
                       "with ",
                       config_.host_pages, " host pages"));
}

// Where the tier has whole pages beyond the hit so far, it goes on there: nothing is left to copy
// out of a partly equal page then.
std::int64_t CacheManager::find_hit_below(Admission& admission, const BlockStore& host,
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

std::uint32_t CacheManager::next_ticket() {
    do {
        ++last_ticket_;
    } while (last_ticket_ == 0 || flights_.count(last_ticket_) != 0);
    return last_ticket_;
}

// The pages behind the tree's part of the hit are the request's own; they are filled from below.
void CacheManager::owe_loads(const Admission& admission, const Sequence& sequence,
                             SequenceHandle handle, std::vector<HostCopy>& host_copies) {
    BlockStore& host = *replica_at(sequence.replica).host;
    HostFlight flight;
    flight.replica = sequence.replica;
    flight.sequence = handle;
    flight.place = host.hold(admission.below);
    const std::int32_t depth = PrefixTree::depth_of(flight.place);
    const std::int32_t first = admission.hit_pages;
    flight.host_pages.resize(static_cast<std::size_t>(depth - first));
    host.copy_pages({flight.place, depth}, first, flight.host_pages.data());
    const std::uint32_t ticket = next_ticket();
    for (std::int32_t column = first; column < depth; ++column) {
        host_copies.push_back({sequence.replica, HostDirection::kLoad,
                               sequence.pages[static_cast<std::size_t>(column)],
                               flight.host_pages[static_cast<std::size_t>(column - first)],
                               ticket});
    }
    flights_.emplace(ticket, std::move(flight));
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
// its way already, and no more than there is room for.
void CacheManager::choose_stores(Replica& replica, const Sequence& sequence, std::int32_t end,
                                 HostFlight& flight) {
    const std::int32_t first = PrefixTree::depth_of(sequence.host_node);
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
    flight.host_pages.resize(pages.size());
    const std::int64_t taken =
        replica.host->take(static_cast<std::int64_t>(pages.size()), flight.host_pages.data());
    pages.resize(static_cast<std::size_t>(taken));
    flight.host_pages.resize(pages.size());
    const auto last = first + flight.ahead + static_cast<std::int32_t>(taken);
    flight.tokens = replica.tree.tokens_of({sequence.node, last}, first);
}

// A full tier costs next to nothing: nothing is looked at that there is no room for.
void CacheManager::owe_stores(SequenceHandle handle, Sequence& sequence,
                              std::vector<HostCopy>& host_copies) {
    if (sequence.storing != 0) return;
    Replica& replica = replica_at(sequence.replica);
    if (sequence.host_node == nullptr) {
        sequence.host_node = replica.host->open(PrefixTree::name_of(sequence.node));
        advance_host_place(replica, sequence, sequence.committed);
    }
    const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(
        sequence.committed,
        PrefixTree::depth_of(sequence.host_node) + replica.host->num_available()));
    advance_host_place(replica, sequence, end);
    if (end <= PrefixTree::depth_of(sequence.host_node)) return;
    HostFlight flight;
    flight.replica = sequence.replica;
    flight.sequence = handle;
    choose_stores(replica, sequence, end, flight);
    if (flight.host_pages.empty()) return;
    flight.place = std::exchange(sequence.host_node, nullptr);
    flight.source = sequence.node;
    replica.tree.pin(flight.source);
    for (const BlockId page : flight.device_pages) {
        replica.storing[static_cast<std::size_t>(page)] = true;
    }
    sequence.storing = next_ticket();
    for (std::size_t i = 0; i < flight.host_pages.size(); ++i) {
        host_copies.push_back({sequence.replica, HostDirection::kStore, flight.device_pages[i],
                               flight.host_pages[i], sequence.storing});
    }
    flights_.emplace(sequence.storing, std::move(flight));
}

// The place goes back to the sequence, should that still be where it was.
void CacheManager::finish_store(std::uint32_t ticket, const HostFlight& flight, bool done) {
    Replica& replica = replica_at(flight.replica);
    BlockStore& host = *replica.host;
    const auto n = static_cast<std::int32_t>(flight.host_pages.size());
    for (const BlockId page : flight.device_pages) {
        replica.storing[static_cast<std::size_t>(page)] = false;
    }
    replica.tree.unpin(flight.source, false);
    TreeNode* place = flight.place;
    const std::int64_t ahead = std::int64_t{flight.ahead} * config_.page_size;
    const std::int32_t joint = PrefixTree::depth_of(place) + flight.ahead;
    if (done && flight.is_wanted) place = host.advance(place, flight.tokens.data(), ahead);
    if (done && flight.is_wanted && PrefixTree::depth_of(place) == joint) {
        place = host.publish(place, flight.tokens.data() + ahead, flight.host_pages.data(), n);
    } else {
        host.give_back(flight.host_pages.data(), n);
    }
    if (done) replica.metrics.stored_pages += n;
    Sequence* sequence = sequences_.find(flight.sequence);
    if (sequence != nullptr && sequence->storing == ticket) {
        sequence->storing = 0;
        sequence->host_node = place;
    } else {
        host.let_go(place);
    }
}

// A request whose pages did not arrive is where a claim begins: what it holds may be anything.
void CacheManager::finish_load(const HostFlight& flight, bool done) {
    Replica& replica = replica_at(flight.replica);
    replica.host->let_go(flight.place);
    if (done) {
        replica.metrics.loaded_pages += static_cast<std::int64_t>(flight.host_pages.size());
        return;
    }
    Sequence* sequence = sequences_.find(flight.sequence);
    if (sequence == nullptr) return;
    drop_columns(replica, *sequence, 0);
    move_back(replica, *sequence, 0);
    sequence->frozen = 0;
    sequence->is_sealed = false;
    sequence->hit_tokens = sequence->written = 0;
    sequence->counted_from = sequence->counted_end = 0;
}

void CacheManager::finish_host_copies(const std::vector<HostCopy>& copies, bool done) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < copies.size(); ++i) {
        const std::uint32_t ticket = copies[i].ticket;
        if (i > 0 && copies[i - 1].ticket == ticket) continue;
        const auto found = flights_.find(ticket);
        if (found == flights_.end()) {
            throw InvalidHandleError(detail::concat("host copies of ticket ", ticket,
                                                    " are not under way: they were finished "
                                                    "before; finish them once"));
        }
        const HostFlight flight = std::move(found->second);
        flights_.erase(found);
        if (flight.source != nullptr) {
            finish_store(ticket, flight, done);
        } else {
            finish_load(flight, done);
        }
    }
}

}  // namespace kvcore
