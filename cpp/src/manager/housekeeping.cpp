// SPDX-License-Identifier: Apache-2.0
#include "manager/housekeeping.hpp"

#include <algorithm>
#include <array>

#include "manager/page_ids.hpp"

namespace kvcore::housekeeping {

namespace {

// Copies hold pages by references now that the tree held for them before.
void tell_held(Replica& replica) noexcept {
    if (replica.columns != nullptr) return replica.columns->tell_held();
    for (std::int64_t i = replica.pool.first_id(); i < replica.pool.end_id(); ++i) {
        const auto page = static_cast<BlockId>(i);
        if (replica.pool.ref_count(page) > 0) replica.owners->hold(&page, 1);
    }
}

}  // namespace

bool finish(ManagerState& state, Claims& claims, std::uint64_t ticket, bool done) {
    const bool has_copies = state.copies.finish(ticket, done);
    const bool has_states = state.state_copies.finish(ticket, done);
    const bool has_flights = state.flights.finish(
        ticket, done,
        [&](Sequence& sequence, SequenceHandle handle) { claims.begin_again(sequence, handle); });
    return has_copies || has_states || has_flights;
}

// All that can fail comes first.
void note_late_reads(ManagerState& state, const PageMove* stores, std::int64_t n,
                     std::uint64_t mark) {
    for (std::int64_t i = 0; i < n; ++i) {
        Replica& home = state.replica_at(stores[i].replica);
        page_ids::require(home, stores[i].source);
        home.make_late_reads();
    }
    for (std::int64_t i = 0; i < n; ++i) {
        state.replica_at(stores[i].replica).late_reads->note(stores[i].source, mark);
    }
}

void advance(ManagerState& state, std::int64_t now) noexcept {
    if (now <= state.terms.now()) return;
    state.terms.set_now(now);
    for (const auto& replica : state.replicas) {
        replica->tree.advance(now);
        if (replica->host != nullptr) replica->host->tree().advance(now);
    }
}

// What is only being copied is nobody's use of a page: it is not found any more either, though the
// page itself stays until the copy is over.
void reset_prefix_cache(ManagerState& state) noexcept {
    if (state.events != nullptr) state.events->begin_reset();
    state.cache_copies.loosen();
    state.flights.loosen();
    state.store_queue.loosen();
    state.copies.loosen();
    state.holds.loosen();
    state.holds.fasten();
    state.copies.fasten();
    state.flights.fasten();
    state.store_queue.fasten();
    state.cache_copies.fasten();
    for (const auto& replica : state.replicas) {
        replica->metrics.evicted.reset += replica->num_cached();
        replica->metrics.host_evicted.reset += replica->num_stored();
        std::array<BlockId, 256> evicted;
        for (std::int64_t n = 1; n > 0;) {
            n = replica->tree.evict(static_cast<std::int64_t>(evicted.size()), evicted.data());
            std::reverse(evicted.begin(), evicted.begin() + n);  // the first is taken first
            replica->pool.free(evicted.data(), n);
        }
        // Of columns that are held, what windows do not read.
        if (replica->columns != nullptr) replica->columns->forget_idle();
        if (replica->owners != nullptr) tell_held(*replica);
        if (replica->states != nullptr) replica->states->forget();
        if (replica->host != nullptr) replica->host->reset();
        if (replica->host_states != nullptr) replica->host_states->forget();
        replica->metrics.evicted.reset -= replica->num_cached();
        replica->metrics.host_evicted.reset -= replica->num_stored();
    }
    if (state.events != nullptr) state.events->end_reset();
}

void reset_metrics(ManagerState& state) noexcept {
    state.counts.reset();
    for (const auto& replica : state.replicas) {
        replica->metrics = {};
        if (replica->owners != nullptr) replica->owners->reset_tallies();
        if (replica->columns != nullptr) replica->columns->reset_counts();
        if (replica->states != nullptr) replica->states->reset_counts();
        if (replica->host_columns != nullptr) replica->host_columns->reset_counts();
        if (replica->host_states != nullptr) replica->host_states->reset_counts();
        replica->note_peak();
    }
}

}  // namespace kvcore::housekeeping
