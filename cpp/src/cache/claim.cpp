// SPDX-License-Identifier: Apache-2.0
#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"

namespace kvcore::verbs {
namespace {

// Gives back the slots of a sequence. Copies in flight still hold the slots that they read or
// write.
void give_back_slot(CacheData& cache, Replica& home, const Sequence& sequence,
                    SequenceHandle handle) noexcept {
    home.note_hit({sequence.pages.node(), sequence.pages.committed()}, sequence.hit_tokens);
    cache.ledger.state_copies.drop_owed(handle);
    RecurrentState& row = cache.states.of(handle);
    for (const RecurrentSlots::Slot slot : {row.slot, row.kept}) {
        if (slot != RecurrentSlots::kNone) home.states->give_back(slot);
    }
    row = {};
}

}  // namespace

SequenceHandle claim(CacheData& cache, std::int32_t replica) {
    Replica& home = cache.replica_at(replica);
    if (home.num_sequences >= cache.config.max_sequences) {
        throw CapacityError(detail::concat("replica ", replica, " is full: ", home.num_sequences,
                                           " of ", cache.config.max_sequences,
                                           " sequences are claimed; release one first"));
    }
    const SequenceHandle handle = cache.sequences.claim(replica);
    try {
        cache.counts.begin(handle);
        if (unlikely(cache.misses != nullptr)) cache.misses->begin(handle);
        if (unlikely(cache.advice != nullptr)) cache.advice->begin(handle);
        cache.windows.make_room(handle);
        cache.states.begin(handle);
    } catch (...) {
        cache.sequences.release(handle);
        throw;
    }
    ++home.num_sequences;
    return handle;
}

bool release(CacheData& cache, SequenceHandle handle, RequestHistory* history,
             std::int64_t returns_in, Misses* misses) {
    Sequence& leaving = cache.sequences.at(handle);
    if (unlikely(misses != nullptr)) {
        *misses = cache.misses == nullptr ? Misses{} : cache.misses->of(handle);
    }
    cache.count_generated(handle, leaving);
    if (history != nullptr) *history = cache.counts.history(handle, leaving);
    Replica& home = cache.home_of(leaving);
    if (unlikely(cache.advice != nullptr)) {
        cache.advice->release(home, handle, leaving, cache.tenants.of(handle));
    }
    const bool is_pending = leaving.num_pending > 0;
    if (is_pending) cache.ledger.copies.drop_owed(handle);
    if (home.states != nullptr) give_back_slot(cache, home, leaving, handle);
    TreeNode* node = leaving.pages.node();
    cache.windows.clear(home, handle, leaving.pages);
    if (home.keeps_by_priority && node != nullptr) {
        const TreePosition end = {node, PrefixTree::depth_of(node)};
        cache.priorities.retain(home.tree, handle, end, 0);
        const std::int64_t returns = cache.priorities.time_of_return(returns_in);
        home.tree.expect(end, returns);
        cache.ledger.flights.expect(handle, returns);
    }
    cache.priorities.forget(handle);
    cache.tenants.set(handle, 0);
    leaving.pages.clear(home.pool);
    if (node != nullptr) home.tree.shrink(node);
    cache.ledger.flights.forget(handle);
    --home.num_sequences;
    cache.sequences.release(handle);
    return is_pending;
}

void begin_again(CacheData& cache, Sequence& sequence, SequenceHandle handle) noexcept {
    Replica& home = cache.home_of(sequence);
    if (home.states != nullptr) give_back_slot(cache, home, sequence, handle);
    cache.count_generated(handle, sequence);
    cache.counts.uncount(cache.tokens_of(sequence, handle), handle, sequence,
                         cache.config.page_size);
    if (cache.misses != nullptr) cache.misses->uncount(handle);
    if (cache.advice != nullptr) {
        cache.advice->release(home, handle, sequence, cache.tenants.of(handle));
    }
    cache.windows.clear(home, handle, sequence.pages);
    sequence.pages.clear(home.pool);
    cache.ledger.flights.forget(handle);
    sequence.reuse = Reuse::kOpen;
    sequence.written = 0;
}

void begin_again(CacheData& cache, SequenceHandle handle) {
    Sequence& sequence = cache.sequences.at(handle);
    if (sequence.num_pending > 0) {
        if (cache.ledger.is_under_way(handle)) rules::refuse_pending(-1);
        cache.ledger.drop_owed(handle);
        sequence.num_pending = 0;
    }
    cache.ledger.copy_list.forget(handle, sequence.pages, 0);
    begin_again(cache, sequence, handle);
}

void set_priority(CacheData& cache, SequenceHandle handle, const RequestPriority& priority) {
    const Sequence& sequence = cache.sequences.at(handle);
    const bool has_tenant = priority.tenant != RequestPriority::kSameTenant;
    const Owner owner = has_tenant ? quotas::owner_of(cache.config, priority.tenant) : Owner{0};
    if (owner != 0) cache.tenants.make_room(handle);
    cache.priorities.set(handle, priority);
    if (has_tenant) cache.set_tenant(sequence, handle, owner);
}

void advance(CacheData& cache, std::int64_t now) noexcept {
    if (now <= cache.priorities.now()) return;
    cache.priorities.set_now(now);
    for (const auto& replica : cache.replicas) {
        replica->for_each_level([&](Level& level) { level.tree.advance(now); });
    }
}

}  // namespace kvcore::verbs
