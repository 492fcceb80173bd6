// SPDX-License-Identifier: Apache-2.0
#include "cache/ordered_reserver.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "cache/joint_reserver.hpp"
#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

// What a question froze is as before, also where it throws.
struct Thaw {
    PageRow& row;
    const std::int32_t frozen;

    ~Thaw() { row.unfreeze(frozen); }
};

}  // namespace

ReserveStatus OrderedReserver::take(const Admission& admission, Sequence& sequence,
                                    RequestView& request, std::int64_t row, Transfers* transfers) {
    // What the rows before copy from is held, pages and checkpoints: this one may have to take it.
    const bool is_short = admission.evicted > 0 || admission.is_over_quota || admission.lacks_slot;
    if (is_short && transfers != nullptr && !transfers->empty()) return ReserveStatus::kPending;
    if (!admission.fits) {
        const std::int64_t lacking = admission.is_over_quota ? 0 : admission.lacking;
        const bool is_held_back =
            !admission.lacks_slot && state_.flights.holds_back(sequence.replica, lacking);
        if (is_held_back && transfers != nullptr) return ReserveStatus::kPending;
        if (admission.is_over_quota) {
            const Owner owner = state_.tenants.of(request.sequence);
            state_.home_of(sequence).owners->tally(owner).refused += 1;
        }
        return ReserveStatus::kNoSpace;
    }
    Reservation made = reserver_.prepare(admission, sequence, request, transfers);
    if (transfers != nullptr && reserver_.spill(made, sequence, *transfers)) {
        return ReserveStatus::kPending;
    }
    reserver_.evict(made, sequence, request.sequence);
    reserver_.apply(made, sequence, request, row, transfers);
    state_.home_of(sequence).end_room();
    return ReserveStatus::kOk;
}

ReserveStatus OrderedReserver::reserve_row(RequestView& request, const Asked& asked,
                                           std::int64_t row, Transfers* transfers) {
    const std::int64_t num_steps = asked.num_steps;
    Sequence& sequence = rows_[row];
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    if (!state_.copies.empty()) state_.freeze_read_pages(sequence, request.start);
    const std::int32_t page_size = state_.config.page_size;
    if (sequence.is_sealed() && !asked.options.has_margin() &&
        JointReserver::is_reserved(sequence.pages, request, num_steps, page_size,
                                   state_.config.reserve_chunks) &&
        (state_.grouping.is_plain() ||
         state_.windows.has_reserved(request.sequence, request.active + num_steps - 1)) &&
        (!state_.states.exist() || state_.states.is_ready(request, num_steps))) {
        sequence.written = std::min(sequence.written, request.start);
        state_.counts.count_input(state_.tokens_of(sequence, request.sequence), request.sequence,
                                  sequence, request.start, request.active);
        return ReserveStatus::kOk;
    }
    const Admission admission = admitter_.admit(sequence, request, asked);
    if (admission.is_cut && num_steps > 1 && row > 0) return ReserveStatus::kPending;
    rules::require_one_step(request, admission, num_steps, row);
    return take(admission, sequence, request, row, transfers);
}

// Whatever a row would throw is thrown before the rows in front of it are reserved. Those may evict
// what a later one would hit: it is in front of that that the call stops then.
void OrderedReserver::require_one_step(const RequestBatch& batch, std::int64_t num_steps) const {
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        const Asked asked{num_steps};
        rules::require_one_step(request, admitter_.admit(rows_[i], request, asked), num_steps, i);
    }
}

BatchReserve OrderedReserver::reserve(const RequestBatch& batch, std::int64_t num_steps,
                                      Transfers* transfers, const ReserveOptions& options) {
    if (transfers != nullptr || state_.config.host_pages > 0) {
        rules::require_transfers(state_, transfers);
    }
    rows_.check(batch, num_steps);
    if (options.must_fit > 0) {
        for (std::int64_t i = 0; i < batch.size(); ++i) {
            rules::require_fit(state_, rows_[i], batch[i], options, i);
        }
    }
    if (num_steps > 1 && state_.states.exist()) require_one_step(batch, num_steps);
    const OwedCopies::Call scope(state_.copies);
    const Asked asked{num_steps, options};
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        try {
            const ReserveStatus status = reserve_row(batch[i], asked, i, transfers);
            if (status != ReserveStatus::kOk) return {i, status};
        } catch (const std::bad_alloc&) {
            if (i == 0) throw;
            return {i, ReserveStatus::kPending};  // a call that begins with this row will say it
        }
    }
    return {batch.size(), ReserveStatus::kOk};
}

// As behind a hit of which no page is there. Nothing is copied for it but what has to go.
ReserveStatus OrderedReserver::begin_at(RequestView& request, std::int64_t n,
                                        Transfers* transfers) {
    rows_.check({&request, 1}, 1);
    Sequence& sequence = rows_[0];
    if (!sequence.pages.empty() || sequence.is_sealed()) {
        throw std::invalid_argument(detail::concat("the sequence has ", sequence.pages.size(),
                                                   " pages or was fetched, must be as it was "
                                                   "claimed; release it and claim again"));
    }
    if (n < 1 || n >= request.end) {
        throw std::invalid_argument(detail::concat("the sequence cannot begin at token ", n,
                                                   ", must be 1 .. ", request.end - 1, ": of ",
                                                   request.end, " tokens one at least runs"));
    }
    const OwedCopies::Call scope(state_.copies);
    FoundHit brought;
    brought.tokens = n;
    const Admission admission = admitter_.admit(brought, sequence, request, 1);
    const ReserveStatus status = take(admission, sequence, request, 0, transfers);
    if (status == ReserveStatus::kOk) sequence.reuse = Reuse::kSealed;
    return status;
}

bool OrderedReserver::can_ever_fit(const Sequence& sequence, const RequestView& request,
                                   const Asked& asked) const {
    if (request.end > state_.most_tokens(asked.num_steps)) return false;
    const std::int64_t tokens = std::max(request.end, asked.options.must_fit);
    if (tokens > request.end && tokens > state_.most_tokens(1)) return false;
    if (state_.config.quotas.empty()) return true;
    const Owner owner =
        Asked::is_claimed(request) ? state_.tenants.of(request.sequence) : asked.stranger;
    const std::int64_t shared =
        asked.options.must_fit > 0 ? asked.options.max_hit : ReserveOptions::kUnlimited;
    return !quotas::exceeds_ceiling(state_, sequence, request, tokens, owner, shared);
}

ReservePlan OrderedReserver::plan(const RequestView& request, const Asked& asked) const {
    rules::require_steps(asked.num_steps);
    Sequence& sequence = state_.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(state_.config, sequence, request, 0);
    rules::require_windows(state_, sequence, request, 0);
    const Thaw thaw{sequence.pages, sequence.pages.frozen()};
    state_.freeze_read_pages(sequence, request.start);
    return plan(sequence, request, asked);
}

ReservePlan OrderedReserver::plan(std::int32_t replica, const RequestView& request,
                                  const Asked& asked) const {
    rules::require_steps(asked.num_steps);
    static_cast<void>(state_.replica_at(replica));
    RequestView unclaimed = request;
    unclaimed.sequence = {};
    if (!rules::has_legal_indices(unclaimed)) rules::refuse_indices(unclaimed, 0);
    Sequence fresh;
    fresh.replica = static_cast<std::int16_t>(replica);
    return plan(fresh, unclaimed, asked);
}

ReservePlan OrderedReserver::plan(const Sequence& sequence, const RequestView& request,
                                  const Asked& asked) const {
    if (!can_ever_fit(sequence, request, asked)) return {};
    const Admission admission = admitter_.admit(sequence, request, asked);
    rules::require_one_step(request, admission, asked.num_steps, 0);
    return {admission.hit.is_taken() ? admission.hit.tokens - sequence.hit_tokens : 0,
            admission.new_pages(),
            admission.evicted,
            admission.hit.match.partial_tokens,
            admission.fits,
            admission.active,
            admitter_.count_adopted(state_.home_of(sequence), admission.hit)};
}

HeldHit OrderedReserver::match(const RequestView& request) const {
    const Sequence& sequence = state_.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(state_.config, sequence, request, 0);
    rules::require_windows(state_, sequence, request, 0);
    return {state_, admitter_.find_hit(sequence, request), sequence, request};
}

ReserveStatus OrderedReserver::allocate(HeldHit& hit, RequestView& request, std::int64_t n,
                                        Transfers* transfers) {
    if (transfers != nullptr || state_.config.host_pages > 0) {
        rules::require_transfers(state_, transfers);
    }
    RequestView view = request;
    view.reserve_to = n;
    rows_.check({&view, 1}, 1);
    Sequence& sequence = rows_[0];
    hit.require_unmoved(sequence, request);
    hit.require_cached();
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    const OwedCopies::Call scope(state_.copies);
    if (!state_.copies.empty()) state_.freeze_read_pages(sequence, request.start);
    Replica& home = state_.home_of(sequence);
    hit.let_go();
    ReserveStatus status = ReserveStatus::kNoSpace;
    const std::int64_t evicted = home.metrics.evicted_pages;
    bool is_whole = true;
    try {
        hit.cut(home);
        const Admission admission = admitter_.admit(hit.found(), sequence, view, 1);
        is_whole = !admission.declines_partial || !hit.found().is_partial();
        status = take(admission, sequence, view, 0, transfers);
    } catch (const std::bad_alloc&) {
        hit.hold(home);
        throw;
    } catch (const IntegrityError&) {
        hit.give_up();
        throw;
    }
    if (status != ReserveStatus::kOk) {
        const bool is_there = is_whole || evicted == home.metrics.evicted_pages;
        is_there ? hit.hold(home) : hit.give_up();
    }
    request.start = view.start;
    request.active = view.active;
    return status;
}

}  // namespace kvcore
