// SPDX-License-Identifier: Apache-2.0
// What the host tier hears of pages between the commits that store them, and with write-back the
// stores of what is about to be evicted. Such a store reads pages that stay in the tree until it is
// over: then the call that needs them is made again, finds that they were offered, and evicts them.
#include <algorithm>
#include <new>

#include "level/quotas.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {

void TierFlights::note_commit(const Sequence& sequence, std::int32_t first, std::int32_t end,
                              const std::vector<DuplicatePage>& duplicates) noexcept {
    if (!rules_.has_marks()) return;
    auto duplicate = duplicates.begin();
    for (std::int32_t c = first; c < end; ++c) {
        if (duplicate != duplicates.end() && first + duplicate->index == c) {
            rules_.use(sequence.replica, duplicate++->cached);
        } else {
            rules_.enter(sequence.replica, sequence.pages[c]);
        }
    }
}

void TierFlights::expect_hit(SequenceHandle handle) {
    if (rules_.is_selective() && handle.index >= standings_.size()) {
        standings_.resize(std::size_t{handle.index} + 1);
    }
}

void TierFlights::note_hit(SequenceHandle handle, const Sequence& sequence,
                           std::int32_t first) noexcept {
    if (rules_.has_marks()) {
        for (std::int32_t c = first; c < sequence.pages.committed(); ++c) {
            rules_.use(sequence.replica, sequence.pages[c]);
        }
    }
    if (rules_.is_selective()) standings_[handle.index].is_due = true;
}

bool TierFlights::holds_back(std::int32_t replica, std::int64_t pages) const noexcept {
    std::int64_t held_back = 0;
    for (const TierFlight& flight : flights_) {
        if (flight.replica == replica) held_back += flight.held_back;
    }
    return held_back > 0 && pages <= held_back;
}

// Of the last `most` pages of a run, from its end.
std::int64_t TierFlights::count_offered(std::int32_t replica, TreePosition end,
                                        std::int64_t most) const noexcept {
    const BlockId* ids = end.node->ids(page_size_);
    std::int64_t n = 0;
    while (n < most && rules_.was_offered(replica, ids[end.node->num_pages - 1 - n])) ++n;
    return n;
}

void TierFlights::store_path(const Path& path, Standing& standing, Transfers& transfers) {
    if (grouping_.is_plain()) return store_pages(path, standing, transfers);
    WindowRow reader;
    reader.prompt_end = path.at.depth;
    const std::int64_t tokens = std::int64_t{path.at.depth} * page_size_;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        reader.first[w] = grouping_.first_column(grouping_.windows()[w], tokens);
    }
    store_columns(path, reader, standing, transfers);
}

// A prefix whose end goes next. Whatever comes of it, it was offered. Returns how many pages can be
// had once it is stored; 0: nothing was given out.
std::int64_t TierFlights::offer(std::int32_t replica, TreePosition at, Transfers& transfers) {
    Replica& home = home_of(replica);
    rules_.offer(home.tree, replica, at);
    const std::int64_t available = home.num_available();
    const std::size_t before = flights_.size();
    try {
        if (home.owners != nullptr && !quotas::may_hold(home, at, 0)) return 0;
        Standing standing;
        store_path({replica, at, {}}, standing, transfers);
    } catch (const std::bad_alloc&) {
        return 0;
    }
    if (flights_.size() == before) return 0;
    const std::int64_t held = available - home.num_available();
    flights_.back().held_back = std::max<std::int64_t>(1, held);
    return flights_.back().held_back;
}

// Several runs at a time: one that is being stored is in use, so that the next one is another.
bool TierFlights::spill(std::int32_t replica, PageNeed need, EvictionGuard guard,
                        Transfers& transfers) {
    if (!rules_.writes_back()) return false;
    if (!grouping_.is_plain()) return spill_columns(replica, need, guard, transfers);
    Replica& home = home_of(replica);
    std::int64_t coming = 0;
    while (home.pool.num_free() + coming < need.pages) {
        const PrefixTree::Victim next = home.tree.next_victim(guard);
        if (next.end.node == nullptr) break;
        const std::int64_t missing = need.pages - home.pool.num_free() - coming;
        const std::int64_t offered =
            count_offered(replica, next.end, std::min(next.num_pages, missing));
        if (offered > 0) {
            home.evict(offered, guard);
        } else {
            coming += offer(replica, next.end, transfers);
        }
    }
    return coming > 0;
}

// The last one first: what is let go of without a use is the next to be evicted, so they stand as
// they did.
void TierFlights::let_go_of_spills(std::uint64_t ticket) noexcept {
    if (!rules_.writes_back()) return;
    for (auto flight = flights_.rbegin(); flight != flights_.rend(); ++flight) {
        if (flight->ticket == ticket && flight->is_spill()) flight->source.end(false);
    }
}

// One run, or what left one together, at a time: windows that are read have no place in the order.
bool TierFlights::spill_columns(std::int32_t replica, PageNeed need, EvictionGuard guard,
                                Transfers& transfers) {
    Replica& home = home_of(replica);
    for (;;) {
        const bool lacks_pages = home.num_free() < need.pages;
        const bool lacks_columns = home.pool.num_free() < need.columns;
        if (!lacks_pages && !lacks_columns) return false;
        const TreePosition next = home.columns->next_kept(lacks_pages, guard);
        const bool is_new = next.node != nullptr &&
                            !rules_.was_offered(replica, Replica::last_column(home.tree, next));
        if (is_new && offer(replica, next, transfers) > 0) return true;
        if (!home.evict_one(lacks_pages, lacks_columns, guard)) return false;
    }
}

}  // namespace kvcore
