// SPDX-License-Identifier: Apache-2.0
#include "cache/verbs.hpp"
#include "level/page_ids.hpp"

namespace kvcore::verbs {

bool finish(CacheData& cache, std::uint64_t ticket, bool done) {
    return cache.ledger.finish(ticket, done, [&](Sequence& sequence, SequenceHandle handle) {
        begin_again(cache, sequence, handle);
    });
}

// Everything that can fail comes first.
void note_late_reads(CacheData& cache, const PageMove* stores, std::int64_t n, std::uint64_t mark) {
    for (std::int64_t i = 0; i < n; ++i) {
        Replica& home = cache.replica_at(stores[i].replica);
        page_ids::require(home, stores[i].source);
        home.make_late_reads();
    }
    for (std::int64_t i = 0; i < n; ++i) {
        cache.replica_at(stores[i].replica).late_reads->note(stores[i].source, mark);
    }
}

}  // namespace kvcore::verbs
