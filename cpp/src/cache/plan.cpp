// SPDX-License-Identifier: Apache-2.0
#include "cache/plan.hpp"

#include <algorithm>

#include "layers/hit_search.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

// A claim without pages has no written tokens, wherever its context stood before.
std::int64_t begin_of(const Sequence& sequence, const RequestView& request) {
    return sequence.pages.empty() ? 0 : request.start;
}

// Counts pages on the way to `at` that stay idle until a request takes a hit of `tokens` tokens.
std::int64_t count_idle(const Replica& home, TreePosition at, std::int64_t tokens) {
    const Grouping& grouping = home.grouping();
    std::int64_t pages = 0;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        const std::int32_t first = grouping.first_column(grouping.windows()[w], tokens);
        home.columns->for_each_column(at, first, [&](BlockId column) {
            if (home.columns->is_idle(column, w)) pages += grouping.windows()[w].num_lanes;
        });
    }
    return pages;
}

// With states, all cached pages are searched, to find where prompts branch.
std::int64_t searched(const Replica& home, const RequestView& request, std::int64_t limit) {
    return home.states == nullptr ? limit : request.end - 1;
}

// If no group keeps every token, held prefixes have columns that take no pages. So columns may be
// missing although pages are available.
bool has_columns(const Replica& home, const Admission& admission) {
    const std::int64_t wanted = admission.appended + admission.replaced + admission.patched;
    if (home.columns == nullptr || home.pool.num_free() >= wanted) return true;
    std::int64_t evictable = home.tree.num_evictable();
    const FoundHit& hit = admission.hit;
    if (hit.shares()) evictable -= home.tree.num_unprotected(hit.match.at);
    if (hit.is_partial() && !home.tree.is_protected(hit.match.partial)) --evictable;
    return home.pool.num_free() + evictable >= wanted;
}

}  // namespace

void Admitter::find_hit(FoundHit& hit, const Sequence& sequence, const RequestView& request,
                        std::int64_t max_hit, bool allow_partial) const {
    const std::int64_t begin = begin_of(sequence, request);
    const bool is_open = !sequence.is_sealed() && begin == sequence.hit_tokens;
    if (!state_.config.prefix_caching || !is_open || request.active - begin <= 1) return;
    if (max_hit == 0) return;
    const Replica& home = state_.home_of(sequence);
    TreeNode* root = home.tree.find_namespace(request.name_space);
    const std::int32_t fewest = state_.config.partial_page_reuse;
    // At least one token is left to run.
    const std::int64_t limit = std::min(request.end - 1, max_hit);
    hit.wanted = limit / state_.config.page_size;
    PrefixMatch& match = hit.match;
    TreePosition whole;  // the match in the tree, even if windows or states are missing
    if (root != nullptr) {
        const bool wants_part = allow_partial && fewest > 0 && home.states == nullptr;
        match = home.tree.match(root, request.tokens, searched(home, request, limit), wants_part);
        // A declined page stays declined, so that a repeated reservation changes nothing.
        const bool is_declined =
            sequence.reuse == Reuse::kDeclined && match.at.depth <= sequence.pages.committed();
        if (is_declined || match.partial_tokens < fewest) {
            match.partial = {};
            match.partial_tokens = 0;
        }
        if (home.states != nullptr) {
            narrow_to_state(hit, whole, home, limit);
        } else if (home.columns != nullptr) {
            whole = match.at;
            const HitSearch search(*home.columns, home.tree, request.tokens, limit);
            const bool has_declined = sequence.reuse == Reuse::kDeclined;
            match = search.longest(match, wants_part && !has_declined ? fewest : 0);
        }
    }
    hit.tokens = std::int64_t{match.at.depth} * state_.config.page_size + match.partial_tokens;
    if (home.host != nullptr) {
        if (home.narrows_hits()) {
            find_columns_below(hit, whole, home, request, limit);
        } else {
            find_below(hit, *home.host, request, limit);
        }
    }
    if (hit.tokens > sequence.hit_tokens) return;
    FoundHit none;
    none.branch = hit.branch;
    none.wanted = hit.wanted;
    hit = none;
}

// Prompts branch where whole pages continue without a checkpoint. A checkpoint is made at the
// branch, even if `limit` makes the hit shorter.
void Admitter::narrow_to_state(FoundHit& hit, TreePosition& whole, const Replica& home,
                               std::int64_t limit) const {
    const std::int64_t page = state_.config.page_size;
    whole = hit.match.at;
    hit.branch = whole.depth * page;
    std::int32_t legal = home.longest_hit(whole);
    if (legal == whole.depth) hit.branch = 0;
    if (whole.depth * page > limit) {
        whole = PrefixTree::position(whole.node, static_cast<std::int32_t>(limit / page));
        legal = home.longest_hit(whole);
    }
    hit.match.at = PrefixTree::position(whole.node, legal);
}

// If the tier has whole pages after the hit, the hit continues with them. Then no tokens of a
// partly equal page are copied.
void Admitter::find_below(FoundHit& hit, const Level& host, const RequestView& request,
                          std::int64_t limit) const {
    const std::int64_t page = state_.config.page_size;
    if (hit.match.at.depth >= limit / page) return;
    const TreePosition below = host.find(request.name_space, request.tokens, limit);
    if (below.depth * page <= hit.tokens) return;
    hit.below = below;
    hit.tokens = below.depth * page;
    hit.match.partial = {};
    hit.match.partial_tokens = 0;
}

// The same for columns with pages of each bundle, or with checkpoints. Pages that the tier has
// before the end also count, because the tree may lack them.
void Admitter::find_columns_below(FoundHit& hit, TreePosition whole, const Replica& home,
                                  const RequestView& request, std::int64_t limit) const {
    const std::int64_t page = state_.config.page_size;
    if (hit.match.at.depth >= limit / page) return;
    TreePosition below =
        home.host->find(request.name_space, request.tokens, searched(home, request, limit));
    if (below.depth == 0) return;
    if (home.states != nullptr) hit.branch = std::max(hit.branch, below.depth * page);
    if (below.depth * page > limit) {
        below = PrefixTree::position(below.node, static_cast<std::int32_t>(limit / page));
    }
    const std::int32_t depth = tiered::longest_hit(home, whole, below);
    if (depth * page <= hit.tokens) return;
    if (whole.node != nullptr) {
        hit.match.at = PrefixTree::position(whole.node, std::min(whole.depth, depth));
    }
    hit.below = PrefixTree::position(below.node, std::min(below.depth, depth));
    hit.tokens = depth * page;
    hit.match.partial = {};
    hit.match.partial_tokens = 0;
}

void Admitter::complete(Admission& admission, const Sequence& sequence, const RequestView& request,
                        const Asked& asked) const {
    count(admission, sequence, request, asked);
    FoundHit& hit = admission.hit;
    if (admission.fits || !hit.is_partial()) return;
    // The reservation does not fit unless the source page is evicted, so the partial hit is
    // dropped.
    FoundHit whole;
    const TreePosition all = whole.match.at = hit.match.at;
    const Replica& home = state_.home_of(sequence);
    if (home.columns != nullptr) {
        whole.match.at =
            PrefixTree::position(whole.match.at.node, home.columns->longest_hit(whole.match.at));
    }
    whole.tokens = std::int64_t{whole.match.at.depth} * state_.config.page_size;
    if (home.host != nullptr && home.columns != nullptr) {
        const std::int64_t limit = std::min(request.end - 1, asked.options.max_hit);
        find_columns_below(whole, all, home, request, limit);
    }
    const std::int64_t wanted = hit.wanted;
    admission = {};
    if (whole.tokens > sequence.hit_tokens) hit = whole;
    hit.wanted = wanted;
    count(admission, sequence, request, asked);
    admission.declines_partial = true;
}

void Admitter::count(Admission& admission, const Sequence& sequence, const RequestView& request,
                     const Asked& asked) const {
    const FoundHit& hit = admission.hit;
    const std::int64_t begin = begin_of(sequence, request);
    admission.hit_pages = hit.is_taken() ? hit.match.at.depth : sequence.pages.committed();
    admission.start = hit.is_taken() ? hit.tokens : begin;
    admission.active = request.active;
    if (hit.tokens >= request.active) {
        admission.active = std::min(request.end, hit.tokens + (request.active - begin));
    }
    if (state_.states.exist()) place_state(admission, sequence, request, asked);
    const std::int64_t tokens = state_.tokens_to_hold(request, admission.active, asked.num_steps);
    count_columns(admission, sequence, ceil_div(tokens, state_.config.page_size));
    count_returned(admission, sequence);
    count_pages(admission, sequence, request, asked.num_steps);
    std::int64_t ahead = 0;
    if (asked.options.has_margin()) {
        ahead = count_ahead(admission, sequence, request, asked, nullptr);
        admission.kept = asked.options.keep_free + ahead;
    }
    count_available(admission, sequence);
    if (state_.home_of(sequence).owners != nullptr) {
        const Owner owner =
            Asked::is_claimed(request) ? state_.tenants.of(request.sequence) : asked.stranger;
        if (ahead > 0 || asked.options.must_fit > 0) {
            ahead = count_ahead(admission, sequence, request, asked, &owner);
        }
        quotas::heed(state_.home_of(sequence), sequence, owner, ahead, admission);
    }
}

// Finds the state that the request continues from, and the end of the next run: the token where a
// checkpoint is due, or the end of the tokens that run again after rejected drafts.
void Admitter::place_state(Admission& admission, const Sequence& sequence,
                           const RequestView& request, const Asked& asked) const {
    const RecurrentStates& states = state_.states;
    RecurrentState row;
    if (Asked::is_claimed(request)) row = states.of(request.sequence);
    // A request that stands where its last run began may be running, so its slot stays unchanged.
    const bool is_over = row.kept_at < admission.start || asked.runs;
    admission.resumes =
        !admission.hit.is_taken() && is_over && states.resumes(row, admission.start);
    std::int64_t due = RecurrentStates::kNever;
    if (admission.resumes) {
        if (states.reruns_alone(row, admission.start)) due = admission.start;
        admission.start = row.kept_at;
    }
    if (!sequence.is_sealed()) row.prompt_end = states.prompt_end(request.end);
    if (admission.hit.branch >= 0) row.branch = admission.hit.branch;
    due = std::min(due, states.next_due(row, admission.start));
    admission.is_cut = due < admission.active;
    if (admission.is_cut) admission.active = due;
    const std::int64_t end = admission.active + asked.num_steps - 1;
    admission.keeps = states.is_to_keep(row, admission.start, end);
    admission.slots = (row.slot == RecurrentSlots::kNone ? 1 : 0) +
                      (admission.keeps && row.kept == RecurrentSlots::kNone ? 1 : 0);
    admission.lacks_slot = admission.slots > state_.home_of(sequence).states->num_available();
}

// Counts the columns that the row needs, and the columns that it replaces.
void Admitter::count_columns(Admission& admission, const Sequence& sequence,
                             std::int64_t needed) const {
    const PageRow& row = sequence.pages;
    admission.needed = static_cast<std::int32_t>(needed);
    admission.appended =
        std::max<std::int64_t>(0, needed - std::max(row.size(), admission.hit_pages));
    if (row.read_only_end() <= admission.start / state_.config.page_size) return;
    const Departures::Writer writer = state_.writer(sequence, admission.start);
    // A hit replaces no columns, because it ends after the read-only columns.
    const std::int64_t end = std::min<std::int64_t>(row.read_only_end(), needed);
    admission.replaced =
        static_cast<std::int32_t>(std::max<std::int64_t>(0, end - writer.first_column()) -
                                  departures_.count_sole(writer, end));
}

// Counts own pages that the pool gets back, except pages that forks, copies or holds keep.
void Admitter::count_returned(Admission& admission, const Sequence& sequence) const {
    const Replica& home = state_.home_of(sequence);
    for_each_returned(home, sequence.pages, admission, [&](BlockId column) {
        ++admission.returned_columns;
        admission.returned += home.count_pages(column);
    });
}

// Counts the same in pages; with groups the numbers differ, because a column has pages of each
// bundle.
void Admitter::count_pages(Admission& admission, const Sequence& sequence,
                           const RequestView& request, std::int64_t num_steps) const {
    admission.pages = admission.appended + admission.replaced;
    const Replica& home = state_.home_of(sequence);
    if (home.columns == nullptr) return;
    const Grouping& grouping = state_.grouping;
    const PageRow& row = sequence.pages;
    const std::int64_t tokens = admission.active + num_steps - 1;
    admission.windowed = static_cast<std::int32_t>(ceil_div(tokens, grouping.column_tokens()));
    admission.pages = admission.appended * grouping.num_full_lanes() +
                      std::int64_t{admission.replaced} * grouping.num_lanes();
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        const Grouping::Window& window = grouping.windows()[w];
        std::int32_t c = std::max(admission.hit_pages, first_read(w, admission, request));
        for (; c < std::min(row.size(), admission.windowed); ++c) {
            if (!home.columns->has(row[c], w)) admission.pages += window.num_lanes;
        }
        admission.pages += std::max<std::int64_t>(0, admission.windowed - c) * window.num_lanes;
    }
    if (admission.hit.below.node != nullptr) {
        tiered::for_each_patch(home, admission.hit.match.at, admission.start,
                               [&](const Patch& patch) {
                                   ++admission.patched;
                                   admission.pages += tiered::count_pages(grouping, patch.windows);
                               });
    }
}

// The first column that the request reads through a window after the reservation.
std::int32_t Admitter::first_read(std::size_t window, const Admission& admission,
                                  const RequestView& request) const {
    if (admission.hit.is_taken()) {
        return state_.grouping.first_column(state_.grouping.windows()[window], admission.start);
    }
    return Asked::is_claimed(request) ? state_.windows.of(request.sequence).first[window] : 0;
}

// Counts the pages that must be available in addition to the pages of this reservation: the most
// pages that the request holds at a time until it has `must_fit` tokens, if no chunk is longer than
// this one. For a window, these are the columns that a chunk and the earlier tokens that it reads
// can cover, wherever they begin. A present column with other readers makes no room for later
// columns, because it stays after the request has passed it. A page of another tenant makes no room
// in the quota of `owner`.
std::int64_t Admitter::count_ahead(const Admission& admission, const Sequence& sequence,
                                   const RequestView& request, const Asked& asked,
                                   const Owner* owner) const {
    const PageRow& row = sequence.pages;
    const Grouping& grouping = state_.grouping;
    const std::int64_t column = state_.config.page_size;
    const std::int64_t wanted = ceil_div(asked.options.must_fit, column);
    const bool is_cut = row.read_only_end() > admission.needed;
    const std::int64_t held =
        is_cut ? admission.needed : std::max({row.size(), admission.hit_pages, admission.needed});
    const std::int64_t lanes = grouping.num_full_lanes();
    std::int64_t pages = std::max<std::int64_t>(0, wanted - held) * lanes;
    const std::int64_t chunk = admission.active - admission.start + asked.num_steps - 1;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        const Grouping::Window& window = grouping.windows()[w];
        const std::int64_t first = first_read(w, admission, request);
        std::int64_t end = admission.windowed;
        const bool has_more = Asked::is_claimed(request) && !admission.hit.is_taken() && !is_cut;
        if (has_more)
            end = std::max<std::int64_t>(end, state_.windows.of(request.sequence).reserved);
        const std::int64_t read = window.rule.span - 1 + state_.windows.kept_tokens() + chunk;
        const std::int64_t shared = count_shared(w, admission, sequence, request, owner);
        const std::int64_t most =
            std::min(wanted - first - shared, (read + 2 * (column - 1)) / column);
        const std::int64_t own = std::max<std::int64_t>(0, end - first) - shared;
        pages += std::max<std::int64_t>(0, most - own) * window.num_lanes;
    }
    return pages;
}

std::int64_t Admitter::count_shared(std::size_t window, const Admission& admission,
                                    const Sequence& sequence, const RequestView& request,
                                    const Owner* owner) const {
    const Replica& home = state_.home_of(sequence);
    const std::int32_t first = first_read(window, admission, request);
    const std::int32_t lane = state_.grouping.windows()[window].first_lane;
    const auto is_shared = [&](BlockId column, std::uint32_t own) {
        if (home.columns->num_readers(column, window) > own) return true;
        const BlockId page = home.columns->page(column, lane);
        return owner != nullptr && page != ColumnPages::kNoPage &&
               home.owners->owner(page) != *owner;
    };
    std::int64_t shared = 0;
    if (admission.hit.is_taken()) {
        const TreePosition at = admission.hit.match.at;
        if (at.depth <= first) return 0;  // a hit that ends in its first page has no node
        home.columns->for_each_column(
            at, first, [&](BlockId column) { shared += is_shared(column, 0) ? 1 : 0; });
        return shared;
    }
    const PageRow& row = sequence.pages;
    for (std::int32_t c = first; c < std::min(row.size(), admission.needed); ++c) {
        shared += is_shared(row[c], 1) ? 1 : 0;
    }
    return shared;
}

std::int64_t Admitter::count_adopted(const Replica& home, const FoundHit& hit) const {
    if (!hit.shares()) return 0;
    return home.tree.num_unprotected(hit.match.at) * home.grouping().num_full_lanes() +
           count_idle(home, hit.match.at, hit.tokens);
}

// Counts the same for the source page of a partial hit, which is held until it is copied.
std::int64_t Admitter::count_source(const Replica& home, const FoundHit& hit) const {
    if (!hit.is_partial()) return 0;
    const std::int64_t is_evictable = home.tree.is_protected(hit.match.partial) ? 0 : 1;
    if (home.columns == nullptr) return is_evictable;
    const TreePosition source{hit.match.partial.node, hit.match.at.depth + 1};
    return is_evictable * state_.grouping.num_full_lanes() + count_idle(home, source, hit.tokens) -
           count_idle(home, hit.match.at, hit.tokens);
}

// Counts the available pages, and the pages to evict.
void Admitter::count_available(Admission& admission, const Sequence& sequence) const {
    const Replica& home = state_.home_of(sequence);
    const std::int64_t free = home.num_free() + admission.returned;
    admission.available = free;
    admission.evicted = std::max<std::int64_t>(0, admission.new_pages() - free);
    const bool has_room = !admission.lacks_slot && has_columns(home, admission);
    admission.fits = has_room && admission.evicted == 0;
    if (admission.fits && admission.kept == 0) return;
    // Pages of the hit cannot be evicted; until the copy, its source page cannot be evicted either.
    const std::int64_t source = count_source(home, admission.hit);
    const std::int64_t evictable =
        home.num_evictable() - count_adopted(home, admission.hit) - source;
    admission.available += evictable;
    const std::int64_t left = admission.available - admission.new_pages();
    admission.lacking = std::max(-left, admission.kept - (left + source));
    admission.fits = has_room && admission.lacking <= 0;
}

namespace quotas {
namespace {

// The most pages that an owner can hold: its quota, without pages that are reserved for others.
std::int64_t ceiling_of(const Replica& home, Owner owner) {
    const HeldCounts& counts = home.owners->counts();
    const TenantQuota& quota = counts.quota(owner);
    const std::int64_t of_others = counts.num_reserved() - quota.reserved_pages;
    return std::min(home.num_pages() - of_others, quota.max_pages);
}

// The pages that a request shares: the pages of its row, or else the cached pages of its prompt.
// With groups, pages of windows are only counted, because they change.
struct Shared {
    std::vector<BlockId> pages;
    std::int64_t in_windows = 0;
};

Shared shared_pages(const Replica& home, const Sequence& sequence, const RequestView& request,
                    std::int64_t max_hit) {
    Shared shared;
    const auto add = [&](BlockId column) {
        const auto before = static_cast<std::int64_t>(shared.pages.size());
        home.for_each_full_page(column, [&](BlockId page) { shared.pages.push_back(page); });
        const std::int64_t in_full = static_cast<std::int64_t>(shared.pages.size()) - before;
        shared.in_windows += home.count_pages(column) - in_full;
    };
    TreeNode* root = home.tree.find_namespace(request.name_space);
    if (sequence.is_sealed() || root == nullptr) {
        for (const BlockId column : sequence.pages.ids()) add(column);
        return shared;
    }
    const std::int64_t most = std::min(request.end - 1, max_hit);
    const TreePosition at = home.tree.match(root, request.tokens, most).at;
    ColumnsUp columns(at, home.tree.page_size());
    for (std::int32_t c = at.depth - 1; c >= 0; --c) add(columns[c]);
    return shared;
}

}  // namespace

bool exceeds_ceiling(const CacheData& state, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, Owner owner, std::int64_t max_hit) {
    const Replica& home = state.home_of(sequence);
    const std::int64_t pages = state.least_pages(tokens);
    if (pages <= ceiling_of(home, owner)) return false;
    const Shared shared = shared_pages(home, sequence, request, max_hit);
    QuotaTrial alone(*home.owners, home.num_pages(), HeldCounts(state.config.quotas));
    for (const BlockId page : shared.pages) alone.hold(page);
    const auto known = static_cast<std::int64_t>(shared.pages.size()) + shared.in_windows;
    alone.take(owner, std::max<std::int64_t>(0, pages - known));
    for (const BlockId page : shared.pages) alone.share_out(page, owner);
    return !alone.is_lawful();
}

void require_ceiling(const CacheData& state, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, std::int64_t row, std::int64_t max_hit) {
    const Owner owner = state.tenants.of(request.sequence);
    if (!exceeds_ceiling(state, sequence, request, tokens, owner, max_hit)) return;
    throw InRow<CapacityError>(
        row, detail::concat(tokens, " tokens need ", state.least_pages(tokens),
                            " pages, more than the ", ceiling_of(state.home_of(sequence), owner),
                            " that quotas leave its tenant; raise its max_pages, or reserve less "
                            "for others"));
}

void heed(const Replica& home, const Sequence& sequence, Owner owner, std::int64_t ahead,
          Admission& admission) {
    const FoundHit& hit = admission.hit;
    const std::int64_t taken = admission.new_pages() + ahead;
    if (taken == 0 && !hit.shares()) return;
    QuotaTrial trial(home);
    std::vector<BlockId> idle;
    find_idle(home, hit, idle);
    for (const BlockId page : idle) trial.hold(page);
    for_each_returned_page(home, sequence.pages, admission,
                           [&](BlockId page) { trial.give_back(page); });
    trial.take(owner, taken);
    for (const BlockId page : idle) trial.share_out(page, owner);
    if (trial.is_lawful()) return;
    admission.is_over_quota = admission.fits;
    admission.fits = false;
    admission.available = std::min(admission.available, trial.room(owner, taken));
    admission.lacking = std::max(admission.lacking, taken - admission.available);
}

}  // namespace quotas

}  // namespace kvcore
