// SPDX-License-Identifier: Apache-2.0
#include <new>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"

namespace kvcore::verbs {

HeldHit match(CacheData& cache, const RequestView& request) {
    const Sequence& sequence = cache.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(cache.config, sequence, request, 0);
    rules::require_windows(cache, sequence, request, 0);
    FoundHit hit;
    find_hit(cache, hit, sequence, request, ReserveOptions::kUnlimited);
    return {cache, hit, sequence, request};
}

ReserveStatus allocate(CacheData& cache, HeldHit& hit, RequestView& request, std::int64_t n,
                       Transfers* transfers) {
    if (transfers != nullptr || cache.config.host_pages > 0) {
        rules::require_transfers(cache, transfers);
    }
    RequestView view = request;
    view.reserve_to = n;
    check_batch(cache, {&view, 1}, 1);
    Sequence& sequence = cache.rows[0];
    hit.require_unmoved(sequence, request);
    hit.require_cached();
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    const OwedCopies::Call scope(cache.ledger.copies);
    if (!cache.ledger.copies.empty()) cache.protect_read_pages(sequence, request.start);
    Replica& home = cache.home_of(sequence);
    hit.let_go();
    ReserveStatus status = ReserveStatus::kNoSpace;
    const std::int64_t evicted = home.num_evicted();
    bool is_whole = true;
    try {
        hit.cut(home);
        const Plan plan = plan_reservation(cache, hit.found(), sequence, view, {1});
        is_whole = !plan.declines_partial || !hit.found().is_partial();
        status = carry_out(cache, plan, sequence, view, 0, transfers);
    } catch (const std::bad_alloc&) {
        hit.hold(home);
        throw;
    } catch (const IntegrityError&) {
        hit.give_up();
        throw;
    }
    if (status != ReserveStatus::kOk) {
        const bool is_there = is_whole || evicted == home.num_evicted();
        is_there ? hit.hold(home) : hit.give_up();
    }
    request.start = view.start;
    request.active = view.active;
    return status;
}

}  // namespace kvcore::verbs
