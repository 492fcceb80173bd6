// SPDX-License-Identifier: Apache-2.0
// The first half of a reservation: `admit` works out what it would do and changes nothing. `plan`
// is that half alone, so it tells exactly what `reserve` would do. The second is in
// manager/apply.cpp.
#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "manager/admission.hpp"
#include "manager/transfer_ledger.hpp"

namespace kvcore {

void CacheManager::refuse_indices(const RequestView& request, std::int64_t row) const {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat("start_idx ", request.start, ", active_idx ", request.active, ", end_idx ",
                       request.end, " break 0 <= start < active <= end; set the indices first"));
}

// A claim that has pages but was not fetched yet must not go on in another namespace: what it
// writes would be found in the one that it began in. O(runs of its hit).
void CacheManager::require_namespace(const Sequence& own, const RequestView& request,
                                     std::int64_t row) const {
    if (own.is_sealed() || own.node == nullptr || !config_.prefix_caching) return;
    if (PrefixTree::name_of(own.node) == request.name_space) return;
    throw InRow<std::invalid_argument>(
        row,
        "the claim has begun in another namespace, its pages belong there; "
        "release it and claim again to change extra_key or cache_salt");
}

void CacheManager::refuse_length(const RequestView& request, std::int64_t row,
                                 std::int64_t num_steps) const {
    const std::int64_t pages = ceil_div(request.end, config_.page_size);
    if (pages > config_.num_blocks) {
        throw InRow<CapacityError>(
            row, detail::concat(request.end, " tokens need ", pages,
                                " pages, more than the whole pool of ", config_.num_blocks,
                                "; give the pool more memory"));
    }
    const auto length =
        static_cast<std::uint64_t>(request.end) + static_cast<std::uint64_t>(num_steps) - 1;
    throw InRow<CapacityError>(
        row, detail::concat(request.end, " tokens + ", num_steps, " steps - 1 = ", length,
                            " exceed max_seq_len ", config_.max_seq_len,
                            "; end the request or run fewer steps"));
}

// Prefix reuse is open only while nothing of the claim has been fetched or written.
void CacheManager::find_hit(Admission& admission, const Sequence& sequence,
                            const RequestView& request, bool allow_partial) const {
    const std::int64_t begin = admission.start;
    const bool is_open = !sequence.is_sealed() && begin == sequence.hit_tokens;
    if (!config_.prefix_caching || !is_open || request.active - begin <= 1) return;
    const Replica& replica = replica_at(sequence.replica);
    TreeNode* root = replica.tree.find_namespace(request.name_space);
    PrefixMatch& match = admission.match;
    if (root != nullptr) {
        // At least one token is left to run.
        match = replica.tree.match(root, request.tokens, request.end - 1,
                                   allow_partial && config_.partial_page_reuse > 0);
        // What was declined stays declined, so that reserving again changes nothing.
        const bool is_declined =
            sequence.reuse == Reuse::kDeclined && match.at.depth <= sequence.committed;
        if (is_declined || match.partial_tokens < config_.partial_page_reuse) {
            match.partial = {};
            match.partial_tokens = 0;
        }
    }
    std::int64_t hit = std::int64_t{match.at.depth} * config_.page_size + match.partial_tokens;
    if (replica.host != nullptr) hit = find_hit_below(admission, *replica.host, request, hit);
    if (hit <= sequence.hit_tokens) {
        match = {};
        admission.below = {};
        return;
    }
    admission.takes_hit = true;
    admission.hit_tokens = hit;
    admission.hit_pages = match.at.depth;
    admission.start = hit;
    if (hit >= request.active) {
        admission.active = std::min(request.end, hit + (request.active - begin));
    }
}

bool CacheManager::is_own(const Sequence& sequence, std::int32_t column) noexcept {
    return column >= sequence.committed ||
           std::binary_search(sequence.kept.begin(), sequence.kept.end(), column);
}

// Nobody else holds it: neither the tree nor a fork nor a copy, but for forks that let go of it in
// the same call. The copies which they left behind may read it for longer, so that what they read
// must not be what is written from `start` on.
bool CacheManager::is_sole_holder(const Sequence& sequence, std::int32_t column,
                                  std::int64_t start) const {
    if (!is_own(sequence, column)) return false;
    const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
    std::uint32_t holders = replica_at(sequence.replica).pool.ref_count(page);
    if (holders == 1) return true;
    const auto left = leaving_.find({sequence.replica, page});
    const Leavers going = left != leaving_.end() ? left->second : Leavers{};
    const Leavers gone = ledger_->leavers_of_call(sequence.replica, page);
    holders -= going.count + gone.count;
    const std::int64_t kept = start - std::int64_t{column} * config_.page_size;
    return holders == 1 && std::max(going.reach, gone.reach) <= std::max<std::int64_t>(0, kept);
}

std::int64_t CacheManager::count_sole(const Sequence& sequence, std::int64_t start,
                                      std::int64_t end) const {
    std::int64_t count = 0;
    for (auto column = static_cast<std::int32_t>(start / config_.page_size); column < end;
         ++column) {
        count += is_sole_holder(sequence, column, start) ? 1 : 0;
    }
    return count;
}

// Pages that are free once the row is cut. Not those of forks that let go as well: they may be held
// for a copy until the call is over.
std::int64_t CacheManager::count_returned(const Sequence& sequence, std::int64_t from) const {
    const BlockPool& pool = replica_at(sequence.replica).pool;
    std::int64_t count = 0;
    for (auto column = static_cast<std::int32_t>(from); column < sequence.num_pages(); ++column) {
        const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
        count += is_own(sequence, column) && pool.ref_count(page) == 1 ? 1 : 0;
    }
    return count;
}

// Counts pages: what is needed, what falls back to the pool, what would have to be evicted for it.
void CacheManager::weigh(Admission& admission, const Sequence& sequence,
                         std::int64_t needed) const {
    const std::int32_t held = sequence.num_pages();
    const std::int64_t first_written = admission.start / config_.page_size;
    admission.needed = static_cast<std::int32_t>(needed);
    admission.appended = std::max<std::int64_t>(0, needed - std::max(held, admission.hit_pages));
    admission.returned = std::min(held, admission.hit_pages) - sequence.committed;
    if (sequence.frozen > first_written) {  // never with a hit, which ends behind them
        const std::int64_t end = std::min<std::int64_t>(sequence.frozen, needed);
        admission.replaced =
            static_cast<std::int32_t>(std::max<std::int64_t>(0, end - first_written) -
                                      count_sole(sequence, admission.start, end));
        if (sequence.frozen > needed) admission.returned = count_returned(sequence, needed);
    }

    const Replica& replica = replica_at(sequence.replica);
    const std::int64_t free = replica.pool.num_free() + admission.returned;
    admission.available = free;
    admission.evicted = std::max<std::int64_t>(0, admission.new_pages() - free);
    admission.fits = admission.evicted == 0;
    if (admission.fits) return;
    std::int64_t evictable = replica.tree.num_evictable();
    if (admission.shares()) {
        // What the hit takes is no longer there to evict, nor is the page it copies from.
        evictable -= replica.tree.num_unprotected(admission.match.at);
        const bool copies = admission.match.partial_tokens > 0;
        if (copies && !replica.tree.is_protected(admission.match.partial)) --evictable;
    }
    admission.available += evictable;
    admission.fits = admission.evicted <= evictable;
}

CacheManager::Admission CacheManager::admit(const Sequence& sequence, const RequestView& request,
                                            std::int64_t num_steps, bool allow_partial) const {
    Admission admission;
    admission.hit_pages = sequence.committed;
    // A claim that holds no page has nothing written, wherever its context stood before.
    admission.start = sequence.pages.empty() ? 0 : request.start;
    admission.active = request.active;
    find_hit(admission, sequence, request, allow_partial);
    weigh(admission, sequence, ceil_div(request.end + num_steps - 1, config_.page_size));
    if (!admission.fits && admission.match.partial_tokens > 0) {
        // Without its source as a victim it does not fit: both are dropped.
        Admission whole = admit(sequence, request, num_steps, false);
        whole.declines_partial = true;
        return whole;
    }
    return admission;
}

ReservePlan CacheManager::plan(const RequestView& request, std::int64_t num_steps) const {
    require_steps(num_steps);
    const std::lock_guard<std::mutex> lock(mutex_);
    Sequence& sequence = sequences_.at(request.sequence);
    if (!has_legal_indices(request)) refuse_indices(request, 0);
    require_namespace(sequence, request, 0);
    if (request.end > most_tokens(num_steps)) return {};
    const std::int32_t frozen = sequence.frozen;
    freeze_read_pages(sequence, request.start);
    const Admission admission = admit(sequence, request, num_steps, true);
    sequence.frozen = frozen;
    return {admission.takes_hit ? admission.hit_tokens - sequence.hit_tokens : 0,
            admission.new_pages(), admission.evicted, admission.match.partial_tokens,
            admission.fits};
}

}  // namespace kvcore
