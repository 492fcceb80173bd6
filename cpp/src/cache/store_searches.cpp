// SPDX-License-Identifier: Apache-2.0
#include "cache/store_searches.hpp"

#include <algorithm>

#include "cache/reserve.hpp"

namespace kvcore::store_searches {

StoreSearch search(CacheData& cache, std::int32_t replica, std::string_view name_space,
                   const TokenId* tokens, std::int64_t n) {
    Replica& home = cache.replica_at(replica);
    StoreSearch found;
    found.replica = replica;
    const auto most = static_cast<std::int32_t>(n / cache.config.page_size);
    const bool lacks_slots = home.states != nullptr && !home.stores_states();
    if (!home.has_stores() || lacks_slots || most == 0) return found;
    const TreePosition at = home.find(name_space, tokens, n);
    const TreePosition below = home.host->find(name_space, tokens, n);
    found.stored = below.depth;
    found.have = found.legal = std::max(at.depth, below.depth);
    if (home.narrows_hits() && found.have > 0) {
        found.legal = below.depth > 0 ? tiered::longest_hit(home, at, below) : home.longest_hit(at);
    }
    if (found.legal >= most) return found;
    found.most = most;
    found.has_gaps = home.columns != nullptr && cache.grouping.num_full_lanes() == 0;
    found.parent = cache.ledger.store_queue.key_at(home, name_space, below);
    return found;
}

StoreSearch search(CacheData& cache, const RequestView& request, std::int64_t max_hit) {
    const Sequence& sequence = cache.sequences.at(request.sequence);
    if (!may_hit(sequence, request)) return {};
    StoreSearch found = search(cache, sequence.replica, request.name_space, request.tokens,
                               cache.hit_limit(request, max_hit));
    found.sequence = request.sequence;
    return found;
}

}  // namespace kvcore::store_searches
