// SPDX-License-Identifier: Apache-2.0
#include "cache/reset.hpp"

#include "level/page_ids.hpp"

namespace kvcore::housekeeping {

bool finish(CacheData& state, Claims& claims, std::uint64_t ticket, bool done) {
    const bool has_copies = state.copies.finish(ticket, done);
    const bool has_states = state.state_copies.finish(ticket, done);
    const bool has_flights = state.flights.finish(
        ticket, done,
        [&](Sequence& sequence, SequenceHandle handle) { claims.begin_again(sequence, handle); });
    return has_copies || has_states || has_flights;
}

// Everything that can fail comes first.
void note_late_reads(CacheData& state, const PageMove* stores, std::int64_t n, std::uint64_t mark) {
    for (std::int64_t i = 0; i < n; ++i) {
        Replica& home = state.replica_at(stores[i].replica);
        page_ids::require(home, stores[i].source);
        home.make_late_reads();
    }
    for (std::int64_t i = 0; i < n; ++i) {
        state.replica_at(stores[i].replica).late_reads->note(stores[i].source, mark);
    }
}

void advance(CacheData& state, std::int64_t now) noexcept {
    if (now <= state.priorities.now()) return;
    state.priorities.set_now(now);
    for (const auto& replica : state.replicas) {
        replica->for_each_level([&](Level& level) { level.tree.advance(now); });
    }
}

void reset_metrics(CacheData& state) noexcept {
    state.counts.reset();
    for (const auto& replica : state.replicas) replica->reset_counts();
}

}  // namespace kvcore::housekeeping
