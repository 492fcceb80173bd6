// SPDX-License-Identifier: Apache-2.0
#include "manager/admitter.hpp"

#include <algorithm>

namespace kvcore {
namespace {

// A claim that holds no page has nothing written, wherever its context stood before.
std::int64_t begin_of(const Sequence& sequence, const RequestView& request) {
    return sequence.pages.empty() ? 0 : request.start;
}

}  // namespace

void Admitter::find_hit(FoundHit& hit, const Sequence& sequence, const RequestView& request,
                        bool allow_partial) const {
    const std::int64_t begin = begin_of(sequence, request);
    const bool is_open = !sequence.is_sealed() && begin == sequence.hit_tokens;
    if (!state_.config.prefix_caching || !is_open || request.active - begin <= 1) return;
    const Replica& home = state_.home_of(sequence);
    TreeNode* root = home.tree.find_namespace(request.name_space);
    const std::int32_t fewest = state_.config.partial_page_reuse;
    PrefixMatch& match = hit.match;
    if (root != nullptr) {
        // At least one token is left to run.
        match = home.tree.match(root, request.tokens, request.end - 1, allow_partial && fewest > 0);
        // What was declined stays declined, so that reserving again changes nothing.
        const bool is_declined =
            sequence.reuse == Reuse::kDeclined && match.at.depth <= sequence.pages.committed();
        if (is_declined || match.partial_tokens < fewest) {
            match.partial = {};
            match.partial_tokens = 0;
        }
    }
    hit.tokens = std::int64_t{match.at.depth} * state_.config.page_size + match.partial_tokens;
    if (home.host != nullptr) find_below(hit, *home.host, request);
    if (hit.tokens <= sequence.hit_tokens) hit = {};
}

// Where the tier has whole pages beyond the hit so far, it goes on there: nothing is left to copy
// out of a partly equal page then.
void Admitter::find_below(FoundHit& hit, const TierIndex& host, const RequestView& request) const {
    const std::int64_t page = state_.config.page_size;
    if (hit.match.at.depth >= (request.end - 1) / page) return;
    const TreePosition below = host.match(request.name_space, request.tokens, request.end - 1);
    if (below.depth * page <= hit.tokens) return;
    hit.below = below;
    hit.tokens = below.depth * page;
    hit.match.partial = {};
    hit.match.partial_tokens = 0;
}

void Admitter::complete(Admission& admission, const Sequence& sequence, const RequestView& request,
                        std::int64_t num_steps) const {
    count(admission, sequence, request, num_steps);
    FoundHit& hit = admission.hit;
    if (admission.fits || !hit.is_partial()) return;
    // Without its source as a victim it does not fit: both are dropped.
    FoundHit whole;
    whole.match.at = hit.match.at;
    whole.tokens = std::int64_t{hit.match.at.depth} * state_.config.page_size;
    admission = {};
    if (whole.tokens > sequence.hit_tokens) hit = whole;
    count(admission, sequence, request, num_steps);
    admission.declines_partial = true;
}

void Admitter::count(Admission& admission, const Sequence& sequence, const RequestView& request,
                     std::int64_t num_steps) const {
    const FoundHit& hit = admission.hit;
    const std::int64_t begin = begin_of(sequence, request);
    admission.hit_pages = hit.is_taken() ? hit.match.at.depth : sequence.pages.committed();
    admission.start = hit.is_taken() ? hit.tokens : begin;
    admission.active = request.active;
    if (hit.tokens >= request.active) {
        admission.active = std::min(request.end, hit.tokens + (request.active - begin));
    }
    const std::int64_t tokens = request.tokens_to_hold(admission.active, num_steps);
    count_pages(admission, sequence, ceil_div(tokens, state_.config.page_size));
    count_available(admission, sequence);
}

// What is needed and what falls back to the pool.
void Admitter::count_pages(Admission& admission, const Sequence& sequence,
                           std::int64_t needed) const {
    const PageRow& row = sequence.pages;
    admission.needed = static_cast<std::int32_t>(needed);
    admission.appended =
        std::max<std::int64_t>(0, needed - std::max(row.size(), admission.hit_pages));
    admission.returned = std::min(row.size(), admission.hit_pages) - row.committed();
    if (row.frozen() <= admission.start / state_.config.page_size) return;
    const Departures::Writer writer = state_.writer(sequence, admission.start);
    // Never with a hit, which ends behind them.
    const std::int64_t end = std::min<std::int64_t>(row.frozen(), needed);
    admission.replaced =
        static_cast<std::int32_t>(std::max<std::int64_t>(0, end - writer.first_column()) -
                                  departures_.count_sole(writer, end));
    if (row.frozen() > needed) {
        admission.returned = row.count_returned(writer.pool, admission.needed);
    }
}

// What can be had, and what would have to be evicted for it.
void Admitter::count_available(Admission& admission, const Sequence& sequence) const {
    const Replica& home = state_.home_of(sequence);
    const std::int64_t free = home.pool.num_free() + admission.returned;
    admission.available = free;
    admission.evicted = std::max<std::int64_t>(0, admission.new_pages() - free);
    admission.fits = admission.evicted == 0;
    if (admission.fits) return;
    std::int64_t evictable = home.tree.num_evictable();
    const FoundHit& hit = admission.hit;
    if (hit.shares()) {
        // What the hit takes is no longer there to evict, nor is the page it copies from.
        evictable -= home.tree.num_unprotected(hit.match.at);
        if (hit.is_partial() && !home.tree.is_protected(hit.match.partial)) --evictable;
    }
    admission.available += evictable;
    admission.fits = admission.evicted <= evictable;
}

}  // namespace kvcore
