// SPDX-License-Identifier: Apache-2.0
#include "cache/reserve.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"
#include "layers/hit_search.hpp"
#include "level/quotas.hpp"
#include "support/memory.hpp"

namespace kvcore {

// ---- plan: changes nothing ----------------------------------------------------------------------

namespace {

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
bool has_columns(const Replica& home, const Plan& plan) {
    const std::int64_t wanted = plan.new_columns();
    if (!unlikely(home.columns != nullptr) || home.pool.num_free() >= wanted) return true;
    std::int64_t evictable = home.tree.num_evictable();
    const FoundHit& hit = plan.hit;
    if (hit.shares()) evictable -= home.tree.num_unprotected(hit.match.at);
    if (hit.is_partial() && !home.tree.is_protected(hit.match.partial)) --evictable;
    return home.pool.num_free() + evictable >= wanted;
}

// Prompts branch where whole pages continue without a checkpoint. A checkpoint is made at the
// branch, even if `limit` makes the hit shorter.
[[gnu::noinline]] void narrow_to_state(const CacheData& cache, FoundHit& hit, TreePosition& whole,
                                       const Replica& home, std::int64_t limit) {
    const std::int64_t page = cache.config.page_size;
    whole = hit.match.at;
    hit.seen = whole.depth;
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
[[gnu::noinline]] void find_below(const CacheData& cache, FoundHit& hit, const Level& host,
                                  const RequestView& request, std::int64_t limit) {
    const std::int64_t page = cache.config.page_size;
    if (hit.match.at.depth >= limit / page) return;
    const TreePosition below = host.find(request.name_space, request.tokens, limit);
    if (below.depth * page <= hit.tokens) return;
    hit.below = below;
    hit.tokens = below.depth * page;
    hit.match.partial = {};
    hit.match.partial_tokens = 0;
}

// The same for columns with pages of each bundle, or with checkpoints. Pages that the tier has
// before the end of the device's hit also count, because the tree may lack them.
[[gnu::noinline]] void find_columns_below(const CacheData& cache, FoundHit& hit, TreePosition whole,
                                          const Replica& home, const RequestView& request,
                                          std::int64_t limit) {
    const std::int64_t page = cache.config.page_size;
    if (hit.match.at.depth >= limit / page) return;
    TreePosition below =
        home.host->find(request.name_space, request.tokens, searched(home, request, limit));
    if (below.depth == 0) return;
    hit.seen = std::max(hit.seen, below.depth);
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

}  // namespace

void find_hit(const CacheData& cache, FoundHit& hit, const Sequence& sequence,
              const RequestView& request, std::int64_t max_hit, bool allow_partial) {
    if (!cache.config.prefix_caching || !may_hit(sequence, request)) return;
    const std::int64_t limit = cache.hit_limit(request, max_hit);
    if (limit == 0) return;
    const Replica& home = cache.home_of(sequence);
    TreeNode* root = home.tree.find_namespace(request.name_space);
    const std::int32_t fewest = cache.config.partial_page_reuse;
    hit.wanted = limit / cache.config.page_size;
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
        if (unlikely(home.states != nullptr)) {
            narrow_to_state(cache, hit, whole, home, limit);
        } else if (unlikely(home.columns != nullptr)) {
            whole = match.at;
            hit.seen = whole.depth;
            const HitSearch search(*home.columns, home.tree, request.tokens, limit);
            const bool has_declined = sequence.reuse == Reuse::kDeclined;
            match = search.longest(match, wants_part && !has_declined ? fewest : 0);
        }
    }
    hit.tokens = std::int64_t{match.at.depth} * cache.config.page_size + match.partial_tokens;
    if (unlikely(home.host != nullptr)) {
        if (home.narrows_hits()) {
            find_columns_below(cache, hit, whole, home, request, limit);
        } else {
            find_below(cache, hit, *home.host, request, limit);
        }
    }
    if (hit.tokens <= sequence.hit_tokens) hit.drop();
}

std::int64_t count_adopted(const CacheData& cache, const Replica& home, const FoundHit& hit) {
    if (!hit.shares()) return 0;
    return home.tree.num_unprotected(hit.match.at) * cache.grouping.num_full_lanes() +
           count_idle(home, hit.match.at, hit.tokens);
}

namespace {

// Finds the state that the request continues from, and the end of the next run: the token where a
// checkpoint is due, or the end of the tokens that run again after rejected drafts.
[[gnu::noinline]] void place_state(const CacheData& cache, Plan& plan, const Sequence& sequence,
                                   const RequestView& request, const ReserveArgs& args) {
    const RecurrentStates& states = cache.states;
    RecurrentState row;
    if (is_claimed(request)) row = states.of(request.sequence);
    // A request that stands where its last run began may be running, so its slot stays unchanged.
    const bool is_over = row.kept_at < plan.start || args.runs;
    plan.resumes = !plan.hit.is_taken() && is_over && states.resumes(row, plan.start);
    std::int64_t due = RecurrentStates::kNever;
    if (plan.resumes) {
        if (states.reruns_alone(row, plan.start)) due = plan.start;
        plan.start = row.kept_at;
    }
    if (!sequence.is_sealed()) row.prompt_end = states.prompt_end(request.end);
    if (plan.hit.branch >= 0) row.branch = plan.hit.branch;
    due = std::min(due, states.next_due(row, plan.start));
    plan.is_cut = due < plan.active;
    if (plan.is_cut) plan.active = due;
    const std::int64_t end = plan.active + args.num_steps - 1;
    plan.keeps = states.is_to_keep(row, plan.start, end);
    plan.slots = (row.slot == RecurrentSlots::kNone ? 1 : 0) +
                 (plan.keeps && row.kept == RecurrentSlots::kNone ? 1 : 0);
    plan.lacks_slot = plan.slots > cache.home_of(sequence).states->num_available();
}

// Counts the columns that the row needs, and the columns that it replaces.
void count_columns(const CacheData& cache, Plan& plan, const Sequence& sequence,
                   std::int64_t needed) {
    const PageRow& row = sequence.pages;
    plan.needed = static_cast<std::int32_t>(needed);
    plan.appended = std::max<std::int64_t>(0, needed - std::max(row.size(), plan.hit_pages));
    if (row.read_only_end() <= plan.start / cache.config.page_size) return;
    const Departures::Writer writer = cache.writer(sequence, plan.start);
    // A hit replaces no columns, because it ends after the read-only columns.
    const std::int64_t end = std::min<std::int64_t>(row.read_only_end(), needed);
    plan.replaced =
        static_cast<std::int32_t>(std::max<std::int64_t>(0, end - writer.first_column()) -
                                  cache.departures.count_sole(writer, end));
}

// Counts own pages that the pool gets back, except pages that forks, copies or holds keep.
void count_returned(const CacheData& cache, Plan& plan, const Sequence& sequence) {
    const Replica& home = cache.home_of(sequence);
    for_each_returned(home, sequence.pages, plan, [&](BlockId column) {
        ++plan.returned_columns;
        plan.returned += home.count_pages(column);
    });
}

// The first column that the request reads through a window after the reservation.
std::int32_t first_read(const CacheData& cache, std::size_t window, const Plan& plan,
                        const RequestView& request) {
    if (plan.hit.is_taken()) {
        return cache.grouping.first_column(cache.grouping.windows()[window], plan.start);
    }
    return is_claimed(request) ? cache.windows.of(request.sequence).first[window] : 0;
}

// Counts the new pages. With groups they differ from the columns, because a column has pages of
// each bundle.
void count_pages(const CacheData& cache, Plan& plan, const Sequence& sequence,
                 const RequestView& request, std::int64_t num_steps) {
    plan.pages = plan.appended + plan.replaced;
    const Replica& home = cache.home_of(sequence);
    if (!unlikely(home.columns != nullptr)) return;
    const Grouping& grouping = cache.grouping;
    const PageRow& row = sequence.pages;
    const std::int64_t tokens = plan.active + num_steps - 1;
    plan.windowed = static_cast<std::int32_t>(ceil_div(tokens, grouping.column_tokens()));
    plan.pages = plan.appended * grouping.num_full_lanes() +
                 std::int64_t{plan.replaced} * grouping.num_lanes();
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        const Grouping::Window& window = grouping.windows()[w];
        std::int32_t c = std::max(plan.hit_pages, first_read(cache, w, plan, request));
        for (; c < std::min(row.size(), plan.windowed); ++c) {
            if (!home.columns->has(row[c], w)) plan.pages += window.num_lanes;
        }
        plan.pages += std::max<std::int64_t>(0, plan.windowed - c) * window.num_lanes;
    }
    if (plan.hit.below.node != nullptr) {
        tiered::for_each_patch(home, plan.hit.match.at, plan.start, [&](const Patch& patch) {
            ++plan.patched;
            plan.pages += tiered::count_pages(grouping, patch.windows);
        });
    }
}

std::int64_t count_shared(const CacheData& cache, std::size_t window, const Plan& plan,
                          const Sequence& sequence, const RequestView& request,
                          const Owner* owner) {
    const Replica& home = cache.home_of(sequence);
    const std::int32_t first = first_read(cache, window, plan, request);
    const std::int32_t lane = cache.grouping.windows()[window].first_lane;
    const auto is_shared = [&](BlockId column, std::uint32_t own) {
        if (home.columns->num_readers(column, window) > own) return true;
        const BlockId page = home.columns->page(column, lane);
        return owner != nullptr && page != ColumnPages::kNoPage &&
               home.owners->owner(page) != *owner;
    };
    std::int64_t shared = 0;
    if (plan.hit.is_taken()) {
        const TreePosition at = plan.hit.match.at;
        if (at.depth <= first) return 0;  // a hit that ends in its first page has no node
        home.columns->for_each_column(
            at, first, [&](BlockId column) { shared += is_shared(column, 0) ? 1 : 0; });
        return shared;
    }
    const PageRow& row = sequence.pages;
    for (std::int32_t c = first; c < std::min(row.size(), plan.needed); ++c) {
        shared += is_shared(row[c], 1) ? 1 : 0;
    }
    return shared;
}

// Counts the pages that must be available in addition to the pages of this reservation: the most
// pages that the request holds at a time until it has `must_fit` tokens, if no chunk is longer than
// this one. For a window, these are the columns that a chunk and the earlier tokens that it reads
// can cover, wherever they begin. A present column with other readers makes no room for later
// columns, because it stays after the request has passed it. A page of another tenant makes no room
// in the quota of `owner`.
[[gnu::noinline]] std::int64_t count_ahead(const CacheData& cache, const Plan& plan,
                                           const Sequence& sequence, const RequestView& request,
                                           const ReserveArgs& args, const Owner* owner) {
    const PageRow& row = sequence.pages;
    const Grouping& grouping = cache.grouping;
    const std::int64_t column = cache.config.page_size;
    const std::int64_t wanted = ceil_div(args.options.must_fit, column);
    const bool is_cut = row.read_only_end() > plan.needed;
    const std::int64_t held =
        is_cut ? plan.needed : std::max({row.size(), plan.hit_pages, plan.needed});
    const std::int64_t lanes = grouping.num_full_lanes();
    std::int64_t pages = std::max<std::int64_t>(0, wanted - held) * lanes;
    const std::int64_t chunk = plan.active - plan.start + args.num_steps - 1;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        const Grouping::Window& window = grouping.windows()[w];
        const std::int64_t first = first_read(cache, w, plan, request);
        std::int64_t end = plan.windowed;
        const bool has_more = is_claimed(request) && !plan.hit.is_taken() && !is_cut;
        if (has_more)
            end = std::max<std::int64_t>(end, cache.windows.of(request.sequence).reserved);
        const std::int64_t read = window.rule.span - 1 + cache.windows.kept_tokens() + chunk;
        const std::int64_t shared = count_shared(cache, w, plan, sequence, request, owner);
        const std::int64_t most =
            std::min(wanted - first - shared, (read + 2 * (column - 1)) / column);
        const std::int64_t own = std::max<std::int64_t>(0, end - first) - shared;
        pages += std::max<std::int64_t>(0, most - own) * window.num_lanes;
    }
    return pages;
}

// Counts the evictable pages that a partial hit holds until its source page is copied.
std::int64_t count_source(const CacheData& cache, const Replica& home, const FoundHit& hit) {
    if (!hit.is_partial()) return 0;
    const std::int64_t is_evictable = home.tree.is_protected(hit.match.partial) ? 0 : 1;
    if (home.columns == nullptr) return is_evictable;
    const TreePosition source{hit.match.partial.node, hit.match.at.depth + 1};
    return is_evictable * cache.grouping.num_full_lanes() + count_idle(home, source, hit.tokens) -
           count_idle(home, hit.match.at, hit.tokens);
}

// Counts the available pages, and the pages to evict.
void count_available(const CacheData& cache, Plan& plan, const Sequence& sequence) {
    const Replica& home = cache.home_of(sequence);
    const std::int64_t free = home.num_free() + plan.returned;
    plan.available = free;
    plan.evicted = std::max<std::int64_t>(0, plan.pages - free);
    const bool has_room = !plan.lacks_slot && has_columns(home, plan);
    plan.fits = has_room && plan.evicted == 0;
    if (plan.fits && plan.kept == 0) return;
    // Pages of the hit cannot be evicted; until the copy, its source page cannot be evicted either.
    const std::int64_t source = count_source(cache, home, plan.hit);
    const std::int64_t evictable =
        home.num_evictable() - count_adopted(cache, home, plan.hit) - source;
    plan.available += evictable;
    const std::int64_t left = plan.available - plan.pages;
    plan.lacking = std::max(-left, plan.kept - (left + source));
    plan.fits = has_room && plan.lacking <= 0;
}

/// Calls visit(page) for each page of a row that a plan frees.
template <class Visit>
void for_each_returned_page(const Replica& home, const PageRow& row, const Plan& plan,
                            const Visit& visit) {
    for_each_returned(home, row, plan, [&](BlockId column) { home.for_each_page(column, visit); });
}

// Applies quotas to a plan: it fits only if quotas allow it with `ahead` more pages.
[[gnu::noinline]] void apply_quotas(const Replica& home, const Sequence& sequence, Owner owner,
                                    std::int64_t ahead, Plan& plan) {
    const FoundHit& hit = plan.hit;
    const std::int64_t taken = plan.pages + ahead;
    if (taken == 0 && !hit.shares()) return;
    QuotaTrial trial(home);
    std::vector<BlockId> idle;
    quotas::find_idle(home, hit, idle);
    for (const BlockId page : idle) trial.hold(page);
    for_each_returned_page(home, sequence.pages, plan,
                           [&](BlockId page) { trial.give_back(page); });
    trial.take(owner, taken);
    for (const BlockId page : idle) trial.share_out(page, owner);
    if (trial.is_lawful()) return;
    plan.is_over_quota = plan.fits;
    plan.fits = false;
    plan.available = std::min(plan.available, trial.room(owner, taken));
    plan.lacking = std::max(plan.lacking, taken - plan.available);
}

void count_needs(const CacheData& cache, Plan& plan, const Sequence& sequence,
                 const RequestView& request, const ReserveArgs& args) {
    const FoundHit& hit = plan.hit;
    const std::int64_t begin = begin_of(sequence, request);
    plan.hit_pages = hit.is_taken() ? hit.match.at.depth : sequence.pages.committed();
    plan.start = hit.is_taken() ? hit.tokens : begin;
    plan.active = request.active;
    if (hit.tokens >= request.active) {
        plan.active = std::min(request.end, hit.tokens + (request.active - begin));
    }
    if (unlikely(cache.has_states)) place_state(cache, plan, sequence, request, args);
    const std::int64_t tokens = cache.tokens_to_hold(request, plan.active, args.num_steps);
    count_columns(cache, plan, sequence, ceil_div(tokens, cache.config.page_size));
    count_returned(cache, plan, sequence);
    count_pages(cache, plan, sequence, request, args.num_steps);
    std::int64_t ahead = 0;
    if (unlikely(args.options.has_margin())) {
        ahead = count_ahead(cache, plan, sequence, request, args, nullptr);
        plan.kept = args.options.keep_free + ahead;
    }
    count_available(cache, plan, sequence);
    if (unlikely(cache.home_of(sequence).owners != nullptr)) {
        const Owner owner =
            is_claimed(request) ? cache.tenants.of(request.sequence) : args.stranger;
        if (ahead > 0 || args.options.must_fit > 0) {
            ahead = count_ahead(cache, plan, sequence, request, args, &owner);
        }
        apply_quotas(cache.home_of(sequence), sequence, owner, ahead, plan);
    }
}

void complete_plan(const CacheData& cache, Plan& plan, const Sequence& sequence,
                   const RequestView& request, const ReserveArgs& args) {
    count_needs(cache, plan, sequence, request, args);
    FoundHit& hit = plan.hit;
    if (plan.fits || !hit.is_partial()) return;
    // The reservation does not fit unless the source page is evicted, so the partial hit is
    // dropped.
    FoundHit whole;
    const TreePosition all = whole.match.at = hit.match.at;
    const Replica& home = cache.home_of(sequence);
    whole.match.at = PrefixTree::position(whole.match.at.node, home.longest_hit(whole.match.at));
    whole.tokens = std::int64_t{whole.match.at.depth} * cache.config.page_size;
    if (home.host != nullptr && home.columns != nullptr) {
        const std::int64_t limit = cache.hit_limit(request, args.options.max_hit);
        find_columns_below(cache, whole, all, home, request, limit);
    }
    const std::int64_t wanted = hit.wanted;
    const std::int32_t seen = hit.seen;
    plan = {};
    if (whole.tokens > sequence.hit_tokens) hit = whole;
    hit.wanted = wanted;
    hit.seen = seen;
    count_needs(cache, plan, sequence, request, args);
    plan.declines_partial = true;
}

}  // namespace

Plan plan_reservation(const CacheData& cache, const FoundHit& hit, const Sequence& sequence,
                      const RequestView& request, const ReserveArgs& args) {
    Plan plan;
    plan.hit = hit;
    complete_plan(cache, plan, sequence, request, args);
    return plan;
}

Plan plan_reservation(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                      const ReserveArgs& args, bool allow_partial) {
    Plan plan;
    find_hit(cache, plan.hit, sequence, request, args.options.max_hit, allow_partial);
    complete_plan(cache, plan, sequence, request, args);
    return plan;
}

// ---- prepare: may fail, and changes nothing visible ---------------------------------------------

namespace {

// Guards the page that a hit copies from, the first page after the hit, from eviction.
EvictionGuard guard_of(const Reservation& reservation) noexcept {
    const FoundHit& hit = reservation.plan.hit;
    if (!hit.is_partial()) return {};
    const TreePosition& source = reservation.partial;
    return {PrefixTree::position(source.node, source.depth).node,
            source.depth - hit.match.at.depth};
}

void make_room_for_copies(CacheData& cache, std::size_t n, Transfers* transfers) {
    if (transfers == nullptr) {
        cache.ledger.copy_list.make_room(n);
    } else {
        cache.ledger.copies.make_room(*transfers, n);
    }
    // A state is copied to the request's slot, and to the slot in which it is kept before drafts.
    if (cache.has_states) cache.ledger.state_copies.make_room(2 * n, transfers);
}

}  // namespace

Reservation prepare(CacheData& cache, const Plan& plan, Sequence& sequence,
                    const RequestView& request, Transfers* transfers) {
    Replica& home = cache.home_of(sequence);
    PrefixTree& tree = home.tree;
    PageRow& row = sequence.pages;
    const FoundHit& hit = plan.hit;
    const std::int32_t length = std::max(plan.hit_pages, plan.needed);
    if (length > row.size()) row.make_room(static_cast<std::size_t>(length - row.size()));
    Reservation reservation(plan);
    reservation.partial = hit.match.partial;
    if (hit.shares()) {
        quotas::find_idle(home, hit, reservation.idle);
        reservation.place = TreePin(tree, tree.split(hit.match.at));
        // A hold on the source page holds its whole run, so the run is cut.
        if (unlikely(home.owners != nullptr) && hit.is_partial()) {
            reservation.partial.node = tree.split(hit.match.partial);
        }
        if (!hit.ends_below()) reservation.checkpoint = home.hold_state(hit.match.at);
        reservation.windows = WindowHold(home, hit.match.at, hit.tokens);
        if (hit.is_partial()) {
            const std::int32_t source = hit.match.at.depth;
            reservation.source = WindowHold(home, hit.match.partial, hit.tokens, source);
        }
    } else if (row.node() == nullptr) {
        reservation.place = TreePin(tree, tree.open_namespace(request.name_space));
    }
    const auto first = static_cast<std::int32_t>(plan.start / cache.config.page_size);
    const bool writes_read_only = row.read_only_end() > first;
    if (unlikely(writes_read_only) && !reservation.place) {
        reservation.cut.emplace(cache, request.sequence, sequence, first);
    }
    // At most one page is copied: the last page of a hit, or a page that is written again.
    if (hit.is_partial() || writes_read_only || reservation.checkpoint || plan.keeps ||
        plan.resumes) {
        make_room_for_copies(cache, 1, transfers);
    }
    if (unlikely(transfers != nullptr)) make_room(transfers->moved, 1);
    if (hit.shares()) cache.ledger.flights.expect_hit(request.sequence);
    if (unlikely(hit.below.node != nullptr)) {
        reservation.load = cache.ledger.flights.prepare_load(
            request.sequence, sequence.replica, hit, !reservation.checkpoint, *transfers);
    }
    return reservation;
}

bool store_before_eviction(CacheData& cache, const Reservation& reservation,
                           const Sequence& sequence, Transfers& transfers) {
    return cache.ledger.flights.spill(sequence.replica, reservation.plan.need(),
                                      guard_of(reservation), transfers);
}

void evict_for(CacheData& cache, const Reservation& reservation, const Sequence& sequence,
               SequenceHandle handle) {
    Replica& home = cache.home_of(sequence);
    if (unlikely(home.states != nullptr)) {
        const bool has_slot = cache.states.of(handle).slot != RecurrentSlots::kNone ||
                              home.states->num_available() > 0 || reservation.checkpoint.is_sole();
        detail::require_law(has_slot, "reserve: an admitted state slot is available");
    }
    const bool needs_none =
        home.columns == nullptr && home.pool.num_free() >= reservation.plan.pages;
    if (needs_none) return;
    const PageNeed need = need_now(home, sequence.pages, reservation.plan);
    home.prepare_room(need);
    home.make_room(need, guard_of(reservation));
}

// ---- apply: cannot fail -------------------------------------------------------------------------

namespace {

// With `transfers`, the caller copies at once, and both pages are held until the copy ends.
// Without, take_copies hands out the copy before the next kernels run.
void owe_cached_copy(CacheData& cache, const PageMove& copy, TreePosition source,
                     Transfers* transfers) noexcept {
    if (transfers == nullptr) return cache.ledger.copy_list.add(copy);
    Replica& home = *cache.replicas[static_cast<std::size_t>(copy.replica)];
    cache.ledger.copies.add(copy, PageRef::pin(home, source, copy.source),
                            PageRef::share(home, copy.destination), *transfers);
}

// The same for a page that forks hold: the reference that the row gives up holds the page.
void owe_shared_copy(CacheData& cache, const PageMove& copy, Transfers* transfers) noexcept {
    Replica& home = *cache.replicas[static_cast<std::size_t>(copy.replica)];
    if (transfers == nullptr) {
        cache.ledger.copy_list.add(copy);
        return home.pool.free(&copy.source, 1);
    }
    cache.ledger.copies.add(copy, PageRef::adopt(home, copy.source),
                            PageRef::share(home, copy.destination), *transfers);
}

// Fills a new column of a row, which reads it from now on, with pages of all bundles.
void fill_column(CacheData& cache, Replica& home, SequenceHandle handle, const PageRow& row,
                 std::int32_t column) {
    home.fill_full(row[column]);
    for (std::size_t w = 0; w < cache.grouping.windows().size(); ++w) {
        home.columns->fill(row[column], w);
    }
    cache.windows.enter(home, handle, row, column, column + 1);
}

// The next tokens go into pages that the tree or forks may read. The sequence gets pages of its own
// for these columns; the first page begins with a copy of the tokens that the sequence keeps. The
// sequence drops its shared pages after the columns that it needs.
[[gnu::noinline]] void copy_on_write(CacheData& cache, Reservation& reservation,
                                     SequenceHandle handle, Sequence& sequence,
                                     Transfers* transfers) {
    Replica& home = cache.home_of(sequence);
    PageRow& row = sequence.pages;
    const Departures::Writer writer = cache.writer(sequence, reservation.plan.start);
    const std::int32_t first = writer.first_column();
    const std::int32_t kept_tokens = writer.kept_tokens();
    const auto is_sole = [&](std::int32_t column) {
        return cache.departures.is_sole_holder(writer, column);
    };
    const auto give_up = [&](std::int32_t column, BlockId source) {
        fill_column(cache, home, handle, row, column);
        const bool is_copied = column == first && kept_tokens > 0;
        const PageMove copy{sequence.replica, source, row[column], kept_tokens, handle};
        if (is_copied && transfers != nullptr) ++sequence.num_pending;
        if (row.is_own(column)) {
            if (is_copied) {
                owe_shared_copy(cache, copy, transfers);
            } else {
                home.pool.free(&source, 1);
            }
        } else if (is_copied) {
            owe_cached_copy(cache, copy, {row.node(), column + 1}, transfers);
        }
        cache.windows.leave_one(home, handle, row, column, source);
    };
    const std::int32_t needed = reservation.plan.needed;
    if (row.read_only_end() > needed) cache.windows.cut(home, handle, row, needed);
    row.copy_on_write(home, first, needed, is_sole, give_up);
    if (reservation.cut) reservation.cut->apply(cache, handle, sequence);
}

// Appends the row's new columns, and pages of windows for the tokens that run next.
[[gnu::noinline]] void append_columns(CacheData& cache, const Plan& plan, SequenceHandle handle,
                                      Sequence& sequence) {
    Replica& home = cache.home_of(sequence);
    PageRow& row = sequence.pages;
    const std::int32_t size = row.size();
    if (plan.appended > 0) row.take(home, plan.appended);
    for (std::int32_t c = size; c < row.size(); ++c) home.columns->fill_full(row[c]);
    cache.windows.enter(home, handle, row, size, row.size());
    const std::int32_t end = std::min(row.size(), plan.windowed);
    cache.windows.fill(home, handle, row, plan.hit_pages, end);
}

[[gnu::noinline]] void copy_partial_page(CacheData& cache, const Reservation& reservation,
                                         SequenceHandle handle, Sequence& sequence,
                                         Transfers* transfers) noexcept {
    const FoundHit& hit = reservation.plan.hit;
    Replica& home = cache.home_of(sequence);
    const TreePosition& source = reservation.partial;
    BlockId page = 0;
    home.tree.copy_pages(source, source.depth - 1, &page);
    if (transfers != nullptr) ++sequence.num_pending;
    const PageMove copy{sequence.replica, page, sequence.pages[hit.match.at.depth],
                        hit.match.partial_tokens, handle};
    owe_cached_copy(cache, copy, source, transfers);
}

// With drafts: copies the state to a slot of its own before the drafts change it. If the state is
// neither in the request's slot nor in a checkpoint yet, the copy is made later.
void keep_state(CacheData& cache, const Reservation& reservation, const Sequence& sequence,
                SequenceHandle handle, Transfers* transfers) noexcept {
    RecurrentState& row = cache.states.of(handle);
    if (row.kept == RecurrentSlots::kNone) row.kept = cache.home_of(sequence).states->take();
    if (reservation.plan.hit.is_taken() && !reservation.checkpoint) return;
    const bool is_copied = reservation.checkpoint && reservation.checkpoint.slot() != row.slot;
    const RecurrentSlots::Slot source = is_copied ? reservation.checkpoint.slot() : row.slot;
    cache.ledger.state_copies.add({sequence.replica, source, row.kept}, {}, handle, transfers,
                                  !is_copied);
    row.kept_at = reservation.plan.start;
}

// Takes the slot that the request computes in from now on, with the state at the end of its hit. If
// only the checkpoint of the hit is available, the request takes over its slot.
[[gnu::noinline]] void take_state(CacheData& cache, Reservation& reservation,
                                  const Sequence& sequence, const RequestView& request,
                                  Transfers* transfers) {
    RecurrentSlots& states = *cache.home_of(sequence).states;
    const Plan& plan = reservation.plan;
    RecurrentState& row = cache.states.of(request.sequence);
    const RecurrentSlots::Slot checkpoint = reservation.checkpoint.slot();
    const bool takes_over =
        row.slot == RecurrentSlots::kNone && states.num_available() < plan.slots;
    if (takes_over) {
        states.take_over(checkpoint);
        row.slot = checkpoint;
    } else if (row.slot == RecurrentSlots::kNone) {
        row.slot = states.take();
    }
    if (reservation.checkpoint || (reservation.load != nullptr && reservation.load->stored_state))
        states.count_hit();
    if (reservation.checkpoint) {
        if (!takes_over) {
            states.renew(checkpoint);
            cache.ledger.state_copies.add({sequence.replica, checkpoint, row.slot}, {},
                                          request.sequence, transfers);
        }
    }
    if (!sequence.is_sealed()) row.prompt_end = cache.states.prompt_end(request.end);
    if (plan.hit.branch >= 0) row.branch = plan.hit.branch;
    if (plan.resumes) {
        if (row.kept_at > 0 && !row.is_restored) {
            cache.ledger.state_copies.add({sequence.replica, row.kept, row.slot}, {},
                                          request.sequence, transfers);
        }
        cache.states.restore(request.sequence);
    } else if (row.at != plan.start && (plan.hit.is_taken() || plan.start == 0)) {
        cache.states.set_back(request.sequence, plan.start);
    }
    if (plan.keeps) keep_state(cache, reservation, sequence, request.sequence, transfers);
    reservation.checkpoint.leave();
}

void count_tokens(CacheData& cache, const Plan& plan, const RequestView& request,
                  Sequence& sequence) noexcept {
    const SequenceHandle handle = request.sequence;
    const TokenSums sums = cache.tokens_of(sequence, handle);
    const FoundHit& hit = plan.hit;
    cache.counts.see(handle, request);
    cache.counts.settle(handle, sequence);
    cache.counts.want(handle, hit.wanted);
    cache.count_generated(handle, sequence);
    sequence.written = hit.is_taken() ? plan.start : std::min(sequence.written, plan.start);
    if (hit.is_taken()) {
        cache.counts.count_hit(sums, handle, sequence, hit.tokens, hit.match.partial_tokens);
    }
    if (!sequence.is_sealed()) {
        if (unlikely(cache.misses != nullptr)) {
            cache.misses->note_hit(cache.home_of(sequence), handle, sequence, request, hit,
                                   plan.declines_partial);
        }
        if (unlikely(cache.advice != nullptr)) {
            cache.advice->note_hit(cache.home_of(sequence), sequence, request,
                                   cache.counts.fresh_prompt(handle));
        }
        if (hit.is_taken()) sequence.reuse = Reuse::kOpen;
        if (plan.declines_partial) sequence.reuse = Reuse::kDeclined;
    }
    cache.counts.count_input(sums, handle, sequence, plan.start, plan.active);
}

}  // namespace

bool apply(CacheData& cache, Reservation& reservation, Sequence& sequence, RequestView& request,
           std::int64_t row, Transfers* transfers) {
    const Plan& plan = reservation.plan;
    Replica& home = cache.home_of(sequence);
    PageRow& pages = sequence.pages;
    const SequenceHandle handle = request.sequence;
    home.set_taker(cache.tenants.of(handle));
    if (plan.hit.shares()) {
        // The run in which the hit was found may be gone: the end of the hit is pinned.
        const TreePosition hit{reservation.place.node(), plan.hit.match.at.depth};
        const std::int32_t columns = plan.hit_pages;
        home.tree.use(hit, pages.committed());
        if (unlikely(home.keeps_by_priority)) {
            cache.priorities.retain(home.tree, handle, hit, pages.committed());
        }
        cache.windows.leave(home, handle, pages, 0, std::min(columns, pages.size()));
        const std::int32_t first = pages.committed();
        pages.take_hit(home, std::move(reservation.place), columns);
        cache.ledger.flights.note_hit(handle, sequence, first);
        // Own duplicates differ from the hit's columns.
        const bool takes_over = pages.own_duplicates().empty();
        cache.windows.take_hit(home, handle, pages, columns, plan.start, takes_over);
        if (takes_over) reservation.windows.hand_over();
        reservation.windows.leave();
    } else {
        if (pages.node() == nullptr) pages.place_at(std::move(reservation.place));
        const bool is_all_below = plan.hit.is_taken();
        if (unlikely(is_all_below))
            cache.windows.take_hit(home, handle, pages, 0, plan.start, false);
    }
    if (unlikely(home.columns != nullptr)) {
        append_columns(cache, plan, handle, sequence);
        if (!sequence.is_sealed()) {
            cache.windows.set_prompt(handle, request.end);
        }
    } else if (plan.appended > 0) {
        pages.take(home, plan.appended);
    }
    if (unlikely(pages.read_only_end() > plan.start / cache.config.page_size)) {
        copy_on_write(cache, reservation, handle, sequence, transfers);
    }
    home.note_peak();  // before a copy holds its source for a moment
    if (unlikely(plan.hit.is_partial())) {
        copy_partial_page(cache, reservation, handle, sequence, transfers);
    }
    if (unlikely(!reservation.idle.empty()))
        quotas::share_out(home, reservation.idle, cache.tenants.of(handle));
    if (unlikely(home.states != nullptr))
        take_state(cache, reservation, sequence, request, transfers);
    if (unlikely(reservation.load != nullptr)) {
        cache.ledger.flights.owe_load(*reservation.load, sequence, cache.states.slot_of(handle),
                                      *transfers);
    }
    count_tokens(cache, plan, request, sequence);
    const bool has_moved = request.start != plan.start || request.active != plan.active;
    if (unlikely(has_moved && transfers != nullptr)) {
        transfers->moved.push_back({row, request.start, request.active});
    }
    request.start = plan.start;
    request.active = plan.active;
    return has_moved;
}

// ---- one request after the other ----------------------------------------------------------------

namespace {

// A chunk that is cut because a checkpoint is due must run with one step.
void require_one_step(const RequestView& request, const Plan& plan, std::int64_t num_steps,
                      std::int64_t row) {
    if (!plan.is_cut || num_steps == 1) return;
    throw InRow<std::invalid_argument>(
        row, detail::concat("num_steps is ", num_steps, ", must be 1: the state of token ",
                            plan.active, " is needed, before active_idx ", request.active,
                            "; run that chunk with one step"));
}

// Carries out a plan that fits. Returns false, and has changed nothing, if pages that it evicts
// must be stored first.
bool carry_out_fitting(CacheData& cache, const Plan& plan, Sequence& sequence, RequestView& request,
                       std::int64_t row, Transfers* transfers, bool& has_moved) {
    if (unlikely(cache.misses != nullptr)) cache.misses->prefetch(sequence, request, plan.hit);
    Reservation reservation = prepare(cache, plan, sequence, request, transfers);
    if (unlikely(transfers != nullptr) &&
        store_before_eviction(cache, reservation, sequence, *transfers)) {
        return false;
    }
    evict_for(cache, reservation, sequence, request.sequence);
    has_moved = apply(cache, reservation, sequence, request, row, transfers);
    cache.home_of(sequence).end_room();
    return true;
}

void count_refusal(CacheData& cache, const Sequence& sequence, SequenceHandle handle) noexcept {
    cache.home_of(sequence).owners->tally(cache.tenants.of(handle)).refused += 1;
}

}  // namespace

ReserveStatus carry_out(CacheData& cache, const Plan& plan, Sequence& sequence,
                        RequestView& request, std::int64_t row, Transfers* transfers) {
    // Pages and checkpoints that earlier rows copy from are held, but this row may have to take
    // them.
    const bool is_short = plan.evicted > 0 || plan.is_over_quota || plan.lacks_slot;
    if (unlikely(transfers != nullptr) && is_short && !transfers->empty())
        return ReserveStatus::kPending;
    if (plan.fits) {
        bool has_moved = false;
        const bool is_done =
            carry_out_fitting(cache, plan, sequence, request, row, transfers, has_moved);
        return is_done ? ReserveStatus::kOk : ReserveStatus::kPending;
    }
    const std::int64_t lacking = plan.is_over_quota ? 0 : plan.lacking;
    const bool is_held_back =
        !plan.lacks_slot && cache.ledger.flights.holds_back(sequence.replica, lacking);
    if (is_held_back && transfers != nullptr) return ReserveStatus::kPending;
    if (plan.is_over_quota) count_refusal(cache, sequence, request.sequence);
    return ReserveStatus::kNoSpace;
}

namespace {

ReserveStatus reserve_row(CacheData& cache, RequestView& request, const ReserveArgs& args,
                          std::int64_t row, Transfers* transfers) {
    const std::int64_t num_steps = args.num_steps;
    Sequence& sequence = cache.rows[row];
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    if (unlikely(!cache.ledger.copies.empty())) cache.protect_read_pages(sequence, request.start);
    const std::int32_t page_size = cache.config.page_size;
    if (sequence.is_sealed() && !args.options.has_margin() &&
        is_reserved(sequence.pages, request, num_steps, page_size, cache.config.reserve_chunks) &&
        (cache.is_plain ||
         cache.windows.has_reserved(request.sequence, request.active + num_steps - 1)) &&
        (!cache.has_states || cache.states.is_ready(request, num_steps))) {
        sequence.written = std::min(sequence.written, request.start);
        cache.counts.count_input(cache.tokens_of(sequence, request.sequence), request.sequence,
                                 sequence, request.start, request.active);
        return ReserveStatus::kOk;
    }
    const Plan plan = plan_reservation(cache, sequence, request, args);
    if (plan.is_cut && num_steps > 1 && row > 0) return ReserveStatus::kPending;
    require_one_step(request, plan, num_steps, row);
    return carry_out(cache, plan, sequence, request, row, transfers);
}

// Throws the errors of every row before any row is reserved. An earlier row may evict the hit of a
// later row; the call stops before that later row.
void require_one_step_each(const CacheData& cache, const RequestBatch& batch,
                           std::int64_t num_steps) {
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        const ReserveArgs args{num_steps};
        require_one_step(request, plan_reservation(cache, cache.rows[i], request, args), num_steps,
                         i);
    }
}

bool can_ever_fit(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                  const ReserveArgs& args) {
    if (request.end > cache.most_tokens(args.num_steps)) return false;
    const std::int64_t tokens = std::max(request.end, args.options.must_fit);
    if (tokens > request.end && tokens > cache.most_tokens(1)) return false;
    if (cache.config.quotas.empty()) return true;
    const Owner owner = is_claimed(request) ? cache.tenants.of(request.sequence) : args.stranger;
    const std::int64_t shared =
        args.options.must_fit > 0 ? args.options.max_hit : ReserveOptions::kUnlimited;
    return !quotas::exceeds_ceiling(cache, sequence, request, tokens, owner, shared);
}

ReservePlan make_plan(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                      const ReserveArgs& args) {
    if (!can_ever_fit(cache, sequence, request, args)) return {};
    const Plan plan = plan_reservation(cache, sequence, request, args);
    require_one_step(request, plan, args.num_steps, 0);
    return {plan.hit.is_taken() ? plan.hit.tokens - sequence.hit_tokens : 0,
            plan.pages,
            plan.evicted,
            plan.hit.match.partial_tokens,
            plan.fits,
            plan.active,
            count_adopted(cache, cache.home_of(sequence), plan.hit)};
}

// Restores the read-only columns that a query changed, also if it throws.
struct Thaw {
    PageRow& row;
    const std::int32_t read_only_end;

    ~Thaw() { row.make_writable(read_only_end); }
};

}  // namespace

namespace verbs {

BatchReserve reserve(CacheData& cache, const RequestBatch& batch, std::int64_t num_steps,
                     Transfers* transfers, const ReserveOptions& options) {
    if (unlikely(transfers != nullptr || cache.config.host_pages > 0)) {
        rules::require_transfers(cache, transfers);
    }
    check_batch(cache, batch, num_steps);
    if (unlikely(options.must_fit > 0)) {
        for (std::int64_t i = 0; i < batch.size(); ++i) {
            rules::require_fit(cache, cache.rows[i], batch[i], options, i);
        }
    }
    if (unlikely(num_steps > 1 && cache.has_states)) require_one_step_each(cache, batch, num_steps);
    const OwedCopies::Call scope(cache.ledger.copies);
    const ReserveArgs args{num_steps, options};
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        try {
            const ReserveStatus status = reserve_row(cache, batch[i], args, i, transfers);
            if (status != ReserveStatus::kOk) return {i, status};
        } catch (const std::bad_alloc&) {
            if (i == 0) throw;
            return {i, ReserveStatus::kPending};  // a call that begins with this row throws
        }
    }
    return {batch.size(), ReserveStatus::kOk};
}

// Reserves as after a hit without cached pages. Only pages that must be evicted are copied.
ReserveStatus begin_at(CacheData& cache, RequestView& request, std::int64_t n,
                       Transfers* transfers) {
    check_batch(cache, {&request, 1}, 1);
    Sequence& sequence = cache.rows[0];
    if (!sequence.pages.empty() || sequence.is_sealed()) {
        throw std::invalid_argument(detail::concat("the sequence has ", sequence.pages.size(),
                                                   " pages or was fetched, must be newly "
                                                   "claimed; release it and claim again"));
    }
    if (n < 1 || n >= request.end) {
        throw std::invalid_argument(detail::concat("the sequence cannot begin at token ", n,
                                                   ", must be 1 .. ", request.end - 1, ": of ",
                                                   request.end, " tokens at least one must run"));
    }
    const OwedCopies::Call scope(cache.ledger.copies);
    FoundHit brought;
    brought.tokens = n;
    const Plan plan = plan_reservation(cache, brought, sequence, request, {1});
    const ReserveStatus status = carry_out(cache, plan, sequence, request, 0, transfers);
    if (status == ReserveStatus::kOk) sequence.reuse = Reuse::kSealed;
    return status;
}

ReservePlan plan(CacheData& cache, const RequestView& request, const ReserveArgs& args) {
    rules::require_steps(args.num_steps);
    Sequence& sequence = cache.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(cache.config, sequence, request, 0);
    rules::require_windows(cache, sequence, request, 0);
    const Thaw thaw{sequence.pages, sequence.pages.read_only_end()};
    cache.protect_read_pages(sequence, request.start);
    return make_plan(cache, sequence, request, args);
}

ReservePlan plan(const CacheData& cache, std::int32_t replica, const RequestView& request,
                 const ReserveArgs& args) {
    rules::require_steps(args.num_steps);
    static_cast<void>(cache.replica_at(replica));
    RequestView unclaimed = request;
    unclaimed.sequence = {};
    if (!rules::has_legal_indices(unclaimed)) rules::refuse_indices(unclaimed, 0);
    Sequence fresh;
    fresh.replica = static_cast<std::int16_t>(replica);
    return make_plan(cache, fresh, unclaimed, args);
}

}  // namespace verbs

// ---- all requests of a batch, or none -----------------------------------------------------------

namespace {

using Growth = ReserveMemory::Growth;
using Supply = ReserveMemory::Supply;

// The arguments that the steps of a call share.
struct Call {
    CacheData& cache;
    ReserveMemory& memory;
    const BatchSequences& rows;
    const RequestBatch& batch;
    const std::vector<std::int64_t>& missing;
    std::int64_t num_steps;
    Transfers* transfers;
};

FetchResult no_space(std::int64_t row, std::int64_t needed, std::int64_t available) {
    FetchResult result;
    result.status = FetchStatus::kNoSpace;
    result.row = row;
    result.needed = needed;
    result.available = available;
    return result;
}

std::int64_t pages_of(const Call& call, Growth growth) {
    return growth.columns * call.cache.grouping.num_lanes();
}

std::int64_t missing_columns(const Call& call, std::int64_t row) {
    const RequestView& request = call.batch[row];
    const std::int64_t tokens = call.cache.tokens_to_hold(request, request.active, call.num_steps);
    return ceil_div(tokens, call.cache.config.page_size) - call.rows[row].pages.size();
}

// With groups: returns true if all new columns also get pages of all windows. For other rows the
// plan decides which columns get them.
bool grows_evenly(const Call& call, Growth growth) {
    const RequestView& request = call.batch[growth.row];
    const std::int64_t tokens = request.active + call.num_steps - 1;
    const PageRow& pages = call.rows[growth.row].pages;
    const std::int64_t in_front = pages.size() + growth.columns - 1;
    return call.cache.config.quotas.empty() && tokens > in_front * call.cache.config.page_size &&
           call.cache.windows.grows_evenly(request.sequence, pages);
}

// Separates the growing rows. A growing row takes no hit, does not begin again and replaces no
// page: it needs only more pages, of all bundles, as most rows of a decode step do. This stays true
// while other rows are reserved.
void sort_rows(const Call& call) {
    call.memory.growing.clear();
    call.memory.joining.clear();
    const std::int64_t page_size = call.cache.config.page_size;
    for (const std::int64_t row : call.missing) {
        const Sequence& sequence = call.rows[row];
        const bool only_grows = !call.cache.has_states && sequence.is_sealed() &&
                                !sequence.pages.empty() &&
                                call.batch[row].start >= sequence.pages.read_only_end() * page_size;
        const Growth growth{row, only_grows ? missing_columns(call, row) : 0};
        if (only_grows && (call.cache.is_plain || grows_evenly(call, growth))) {
            call.memory.growing.push_back(growth);
        } else {
            call.memory.joining.push_back(row);
        }
    }
}

// Pages and columns that a replica needs before the first row is applied. A row makes pages free
// only for later rows, so the need is the largest sum over the first rows. Called after
// `prepare_growth`.
PageNeed need_of(const Call& call, std::int32_t replica,
                 const std::vector<Reservation>& reservations) noexcept {
    PageNeed need;
    PageNeed taken;
    const auto add = [&](const PageNeed& more) {
        taken.pages += more.pages;
        taken.columns += more.columns;
        need.pages = std::max(need.pages, taken.pages);
        need.columns = std::max(need.columns, taken.columns);
    };
    for (std::size_t k = 0; k < reservations.size(); ++k) {
        if (call.rows[call.memory.joining[k]].replica == replica) add(reservations[k].plan.need());
    }
    const std::int64_t wanted = call.memory.supply[static_cast<std::size_t>(replica)].wanted;
    add({wanted * call.cache.grouping.num_lanes(), wanted});
    return need;
}

// Called after `store_before_evictions`, before any other change: checks that all rows can get
// their pages, and gets memory for them. Each row evicts its pages when its turn comes.
void prepare_pages(const Call& call, const std::vector<Reservation>& reservations) {
    for (std::int32_t r = 0; r < call.cache.config.num_replicas; ++r) {
        call.cache.replicas[static_cast<std::size_t>(r)]->prepare_room(
            need_of(call, r, reservations));
    }
}

void evict_for_growth(const Call& call) {
    for (std::size_t r = 0; r < call.cache.replicas.size(); ++r) {
        const std::int64_t wanted = call.memory.supply[r].wanted;
        call.cache.replicas[r]->make_room({wanted * call.cache.grouping.num_lanes(), wanted});
    }
}

// Stores pages that rows will evict, if they must be stored first: see store_before_eviction.
bool store_before_evictions(const Call& call, const std::vector<Reservation>& reservations,
                            FetchResult& result) {
    if (call.transfers == nullptr || !call.cache.ledger.flights.rules().writes_back()) return false;
    for (std::int32_t r = 0; r < call.cache.config.num_replicas; ++r) {
        const PageNeed need = need_of(call, r, reservations);
        if (!call.cache.ledger.flights.spill(r, need, {}, *call.transfers)) continue;
        result.status = FetchStatus::kPending;
        result.row = call.missing[0];
    }
    return result.status == FetchStatus::kPending;
}

// Returns true if each replica has enough free or evictable pages for its growing rows. Else stores
// the first row without enough pages in `result`.
bool find_supply(const Call& call, FetchResult& result) {
    call.memory.supply.clear();
    for (const auto& replica : call.cache.replicas)
        call.memory.supply.push_back({replica->num_free()});
    for (const Growth& growth : call.memory.growing) {
        const Sequence& sequence = call.rows[growth.row];
        Supply& supply = call.memory.supply[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t pages = pages_of(call, growth);
        if (pages > supply.left && !supply.has_evictable) {
            supply.has_evictable = true;
            supply.left += call.cache.home_of(sequence).num_evictable();
        }
        if (pages > supply.left) {
            result = no_space(growth.row, pages, supply.left);
            return false;
        }
        supply.left -= pages;
    }
    return true;
}

// Counts the needs of the growing rows and gets memory for them, so that `grow` cannot run out of
// memory.
void prepare_growth(const Call& call) {
    call.memory.supply.assign(call.cache.replicas.size(), {});
    for (const auto& [row, columns] : call.memory.growing) {
        Sequence& sequence = call.rows[row];
        sequence.pages.make_room(static_cast<std::size_t>(columns));
        call.memory.supply[static_cast<std::size_t>(sequence.replica)].wanted += columns;
    }
}

void grow(const Call& call) {
    for (const auto& [row, columns] : call.memory.growing) {
        Sequence& sequence = call.rows[row];
        Replica& home = call.cache.home_of(sequence);
        PageRow& pages = sequence.pages;
        const SequenceHandle handle = call.batch[row].sequence;
        const std::int32_t size = pages.size();
        home.set_taker(call.cache.tenants.of(handle));
        pages.take(home, columns);
        if (home.columns != nullptr) call.cache.windows.grow(home, handle, pages, size);
    }
    for (const auto& replica : call.cache.replicas) replica->note_peak();
}

// With groups: columns may be missing although pages are available. Called when all hits are held.
bool have_columns(const Call& call, const std::vector<Plan>& plans, FetchResult& result) {
    if (call.cache.is_plain) return true;
    std::vector<std::int64_t>& left = call.memory.columns;
    left.clear();
    for (const auto& replica : call.cache.replicas) {
        left.push_back(replica->pool.num_free() + replica->tree.num_evictable());
    }
    for (std::size_t k = 0; k < call.memory.joining.size(); ++k) {
        std::int64_t& available =
            left[static_cast<std::size_t>(call.rows[call.memory.joining[k]].replica)];
        available -= plans[k].new_columns();
        if (available >= 0) continue;
        const std::int64_t pages = plans[k].pages;
        result = no_space(call.memory.joining[k], pages, plans[k].available);
        return false;
    }
    for (const Growth& growth : call.memory.growing) {
        const Sequence& sequence = call.rows[growth.row];
        std::int64_t& available = left[static_cast<std::size_t>(sequence.replica)];
        available -= growth.columns;
        if (available >= 0) continue;
        const std::int64_t could_have = call.cache.home_of(sequence).num_available();
        result = no_space(growth.row, pages_of(call, growth), could_have);
        return false;
    }
    return true;
}

// With states: checks that all rows that need slots get them, in their order. A row may take over
// the checkpoint of its hit if no other request holds the hit. Called when all hits are held.
bool have_slots(const Call& call, const std::vector<Reservation>& reservations,
                FetchResult& result) {
    if (!call.cache.has_states) return true;
    std::vector<std::int64_t> left;
    for (const auto& replica : call.cache.replicas)
        left.push_back(replica->states->num_available());
    for (std::size_t k = 0; k < call.memory.joining.size(); ++k) {
        const std::int64_t row = call.memory.joining[k];
        const Plan& plan = reservations[k].plan;
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        const bool takes_over =
            call.cache.states.of(call.batch[row].sequence).slot == RecurrentSlots::kNone &&
            available < plan.slots && reservations[k].checkpoint.is_sole();
        available -= plan.slots - (takes_over ? 1 : 0);
        if (available >= 0) continue;
        result = no_space(row, plan.pages, plan.available);
        result.lacks_slot = true;
        return false;
    }
    return true;
}

// With groups: returns true if columns must be evicted although there are pages.
bool lacks_columns(const Call& call, const std::vector<Plan>& plans) noexcept {
    if (call.cache.is_plain) return false;
    for (std::size_t r = 0; r < call.cache.replicas.size(); ++r) {
        std::int64_t left = call.cache.replicas[r]->pool.num_free();
        for (std::size_t k = 0; k < plans.size(); ++k) {
            const bool is_here =
                call.rows[call.memory.joining[k]].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= plans[k].need().columns;
        }
        for (const Growth& growth : call.memory.growing) {
            const bool is_here = call.rows[growth.row].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= growth.columns;
        }
        if (left < 0) return true;
    }
    return false;
}

// Returns true if quotas allow the pages of the batch, in the order in which they are applied. All
// hits are held already; source pages of copies are not held yet. Else stores the first row that
// quotas refuse in `result`.
bool heeds_quotas(const Call& call, std::vector<Reservation>& reservations, FetchResult& result) {
    std::vector<QuotaTrial> trials;
    for (const auto& replica : call.cache.replicas) trials.emplace_back(*replica);
    for (std::size_t k = 0; k < reservations.size(); ++k) {
        const auto home = static_cast<std::size_t>(call.rows[call.memory.joining[k]].replica);
        trials[home].hold_once(reservations[k].idle);
    }
    FetchResult refusal;  // unless a later row makes room for it
    const auto take = [&](std::int64_t row, std::int64_t pages, const Reservation* reservation) {
        const Sequence& sequence = call.rows[row];
        const Owner owner = call.cache.tenants.of(call.batch[row].sequence);
        QuotaTrial& trial = trials[static_cast<std::size_t>(sequence.replica)];
        if (reservation != nullptr) {
            for_each_returned_page(call.cache.home_of(sequence), sequence.pages, reservation->plan,
                                   [&](BlockId page) { trial.give_back(page); });
        }
        trial.take(owner, pages);
        if (reservation != nullptr) {
            for (const BlockId page : reservation->idle) trial.share_out(page, owner);
        }
        if (trial.is_lawful() || refusal.is_over_quota) return;
        refusal = no_space(row, pages, trial.room(owner, pages));
        refusal.is_over_quota = true;
    };
    for (std::size_t k = 0; k < reservations.size(); ++k) {
        take(call.memory.joining[k], reservations[k].plan.pages, &reservations[k]);
    }
    for (const Growth& growth : call.memory.growing)
        take(growth.row, pages_of(call, growth), nullptr);
    const bool is_lawful = std::all_of(trials.begin(), trials.end(),
                                       [](const QuotaTrial& trial) { return trial.is_lawful(); });
    if (is_lawful) return true;
    count_refusal(call.cache, call.rows[refusal.row], call.batch[refusal.row].sequence);
    result = refusal;
    return false;
}

// Checks whether the pages left in each replica are enough for all missing rows, in the order of
// the batch. Else returns the first row that gets no pages.
FetchResult share_out(const Call& call, std::vector<std::int64_t> left,
                      const std::vector<Plan>& plans) {
    auto joining = call.memory.joining.begin();
    auto growing = call.memory.growing.begin();
    auto plan = plans.begin();
    for (const std::int64_t row : call.missing) {
        std::int64_t needed = 0;
        if (joining != call.memory.joining.end() && *joining == row) {
            needed = plan->pages - plan->returned;
            ++joining;
            ++plan;
        } else {
            needed = pages_of(call, *growing++);
        }
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        if (needed > available) {
            return no_space(row, needed, available);
        }
        available -= needed;
    }
    return {};
}

// The plan of each joining row by itself, except that forks of one page consider each other.
std::vector<Plan> plan_rows(const Call& call, bool allow_partial) {
    const Departures::Call scope(call.cache.departures);
    std::vector<Plan> plans;
    plans.reserve(call.memory.joining.size());
    for (const std::int64_t row : call.memory.joining) {
        const Sequence& sequence = call.rows[row];
        ReserveArgs args{call.num_steps};
        args.runs = true;
        plans.push_back(
            plan_reservation(call.cache, sequence, call.batch[row], args, allow_partial));
        require_one_step(call.batch[row], plans.back(), call.num_steps, row);
        if (!allow_partial) plans.back().declines_partial = true;
        call.cache.departures.note(call.cache.writer(sequence, plans.back().start),
                                   call.transfers != nullptr);
    }
    return plans;
}

std::vector<Reservation> prepare_rows(const Call& call, const std::vector<Plan>& plans) {
    const std::size_t n = call.memory.joining.size();
    std::vector<Reservation> reservations;
    reservations.reserve(n);
    make_room_for_copies(call.cache, n, call.transfers);
    if (call.transfers != nullptr) make_room(call.transfers->moved, n);
    std::size_t loads = 0;
    std::size_t pages = 0;
    for (std::size_t k = 0; k < n; ++k) {
        const std::int64_t row = call.memory.joining[k];
        reservations.push_back(
            prepare(call.cache, plans[k], call.rows[row], call.batch[row], call.transfers));
        if (reservations.back().load == nullptr) continue;
        ++loads;
        pages += static_cast<std::size_t>(reservations.back().load->num_pages);
    }
    if (loads > 0) call.cache.ledger.flights.make_room_for_loads(loads, pages, *call.transfers);
    return reservations;
}

// Reserves the only missing row, as `verbs::reserve` does.
bool reserve_one(const Call& call, FetchResult& result) {
    const std::int64_t row = call.missing[0];
    Sequence& sequence = call.rows[row];
    RequestView& request = call.batch[row];
    ReserveArgs args{call.num_steps};
    args.runs = true;
    const Plan plan = plan_reservation(call.cache, sequence, request, args);
    require_one_step(request, plan, call.num_steps, row);
    if (!plan.fits) {
        if (plan.is_over_quota) count_refusal(call.cache, sequence, request.sequence);
        result = no_space(row, plan.pages, plan.available);
        result.is_over_quota = plan.is_over_quota;
        result.lacks_slot = plan.lacks_slot;
        return false;
    }
    if (carry_out_fitting(call.cache, plan, sequence, request, row, call.transfers,
                          result.has_moved)) {
        return true;
    }
    result.status = FetchStatus::kPending;
    result.row = row;
    return false;
}

// Reserves several rows against one state, so that the batch gets all of its pages or no page. All
// hits are pinned first, so the evictable pages are exactly the pages that the batch may evict.
// Partial hits are dropped if pages must be evicted, because one row could evict the source of
// another. Rows that only grow come last, after other rows have given pages back.
bool reserve_together(const Call& call, FetchResult& result) {
    std::vector<std::int64_t> left;
    for (const auto& replica : call.cache.replicas) left.push_back(replica->num_free());
    std::vector<Plan> plans = plan_rows(call, true);
    const bool evicts =
        share_out(call, left, plans).status != FetchStatus::kOk || lacks_columns(call, plans);
    if (evicts) plans = plan_rows(call, false);
    std::vector<Reservation> reservations = prepare_rows(call, plans);
    prepare_growth(call);
    if (evicts) {
        for (std::size_t r = 0; r < left.size(); ++r)
            left[r] = call.cache.replicas[r]->num_available();
        const FetchResult shared = share_out(call, std::move(left), plans);
        if (shared.status != FetchStatus::kOk) {
            result = shared;
            return false;
        }
    }
    if (!have_columns(call, plans, result) || !have_slots(call, reservations, result)) return false;
    if (!call.cache.config.quotas.empty() && !heeds_quotas(call, reservations, result))
        return false;
    if (evicts && store_before_evictions(call, reservations, result)) return false;
    prepare_pages(call, reservations);
    for (std::size_t k = 0; k < call.memory.joining.size(); ++k) {
        const std::int64_t row = call.memory.joining[k];
        Sequence& sequence = call.rows[row];
        evict_for(call.cache, reservations[k], sequence, call.batch[row].sequence);
        result.has_moved |=
            apply(call.cache, reservations[k], sequence, call.batch[row], row, call.transfers);
        call.cache.home_of(sequence).end_room();
    }
    evict_for_growth(call);
    grow(call);
    return true;
}

bool reserve_missing(const Call& call, FetchResult& result) {
    if (call.memory.joining.empty()) {
        if (!find_supply(call, result) || !have_columns(call, {}, result)) return false;
        std::vector<Reservation> none;
        if (!call.cache.config.quotas.empty() && !heeds_quotas(call, none, result)) return false;
        prepare_growth(call);
        if (store_before_evictions(call, none, result)) return false;
        prepare_pages(call, none);
        evict_for_growth(call);
        grow(call);
        return true;
    }
    return call.missing.size() > 1 ? reserve_together(call, result) : reserve_one(call, result);
}

}  // namespace

bool reserve_rows(CacheData& cache, const RequestBatch& batch,
                  const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                  Transfers* transfers, FetchResult& result) {
    const Call call{cache, cache.reserve_memory, cache.rows, batch, missing, num_steps, transfers};
    sort_rows(call);
    if (reserve_missing(call, result)) return true;
    if (result.status != FetchStatus::kNoSpace || result.lacks_slot) return false;
    const std::int64_t lacking = result.is_over_quota ? 0 : result.needed - result.available;
    if (cache.ledger.flights.holds_back(cache.rows[result.row].replica, lacking)) {
        result.status = FetchStatus::kPending;
    }
    return false;
}

}  // namespace kvcore
