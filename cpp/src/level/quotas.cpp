// SPDX-License-Identifier: Apache-2.0
#include "level/quotas.hpp"

#include <algorithm>
#include <stdexcept>

#include "cache/state.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

std::int64_t QuotaTrial::room(Owner taker, std::int64_t n) const noexcept {
    const std::int64_t below = counts_.quota(taker).max_pages - counts_.held(taker);
    const std::int64_t beyond = available_ - counts_.unfilled();
    return std::max<std::int64_t>(0, n + std::min(below, beyond));
}

void QuotaTrial::hold_once(std::vector<BlockId>& pages) {
    const auto is_known = [this](BlockId page) { return !seen_.insert(page).second; };
    pages.erase(std::remove_if(pages.begin(), pages.end(), is_known), pages.end());
    for (const BlockId page : pages) {
        if (!owners_.is_held(page)) hold(page);
    }
}

namespace quotas {
namespace {

[[noreturn]] void refuse(std::size_t tenant, const char* what, std::int64_t value, const char* rule,
                         std::int64_t bound) {
    throw std::invalid_argument(
        detail::concat("quota ", tenant, " has ", what, " ", value, ", must be ", rule, bound));
}

// What an owner can hold at most: of the pool, what is not reserved for others.
std::int64_t ceiling_of(const Replica& home, Owner owner) {
    const HeldCounts& counts = home.owners->counts();
    const TenantQuota& quota = counts.quota(owner);
    const std::int64_t of_others = counts.num_reserved() - quota.reserved_pages;
    return std::min(home.num_pages() - of_others, quota.max_pages);
}

// Of the pages that a request needs those that its row has, or else those of its prompt that are
// cached: what it would share. With groups those of windows are counted alone, for they change.
struct Shared {
    std::vector<BlockId> pages;
    std::int64_t in_windows = 0;
};

Shared shared_pages(const Replica& home, const Sequence& sequence, const RequestView& request,
                    std::int64_t max_hit) {
    Shared shared;
    const auto add = [&](BlockId column) {
        if (home.columns == nullptr) return shared.pages.push_back(column);
        const auto before = static_cast<std::int64_t>(shared.pages.size());
        home.columns->for_each_full_page(column,
                                         [&](BlockId page) { shared.pages.push_back(page); });
        const std::int64_t in_full = static_cast<std::int64_t>(shared.pages.size()) - before;
        shared.in_windows += home.columns->count_pages(column) - in_full;
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

bool is_held(const Replica& home, BlockId column) {
    if (home.columns == nullptr) return home.owners->is_held(column);
    bool held = true;
    home.columns->for_each_full_page(column,
                                     [&](BlockId page) { held &= home.owners->is_held(page); });
    return held;
}

// Of the columns on the way to `at`, those that no pin protects: the last ones. And those of each
// window from first_of(window) on.
template <class FirstOf, class Visit>
void for_each_idle(const Replica& home, TreePosition at, const FirstOf& first_of,
                   const Visit& visit) {
    if (at.depth == 0) return;
    const std::int32_t page_size = home.tree.page_size();
    ColumnsUp columns(at, page_size);
    for (std::int32_t c = at.depth - 1; c >= 0 && !is_held(home, columns[c]); --c) {
        if (home.columns == nullptr) {
            visit(columns[c]);
        } else {
            home.columns->for_each_full_page(columns[c], visit);
        }
    }
    if (home.columns == nullptr) return;
    const Grouping& grouping = home.columns->grouping();
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        home.columns->for_each_column(at, first_of(grouping.windows()[w]), [&](BlockId column) {
            if (home.columns->is_idle(column, w)) {
                home.columns->for_each_window_page(column, w, visit);
            }
        });
    }
}

// Those that a hit of `tokens` reads.
auto read_by_hit(const Replica& home, std::int64_t tokens) {
    return [&home, tokens](const Grouping::Window& window) {
        return home.columns->grouping().first_column(window, tokens);
    };
}

template <class FirstOf>
bool fits(const Replica& home, TreePosition at, const FirstOf& first_of) {
    QuotaTrial trial(home);
    for_each_idle(home, at, first_of, [&](BlockId page) { trial.hold(page); });
    return trial.is_lawful();
}

// The longest part for which does_fit(depth): no longer one does where a shorter one does not.
template <class DoesFit>
std::int32_t longest_fitting(std::int32_t depth, const DoesFit& does_fit) {
    if (does_fit(depth)) return depth;
    std::int32_t fitting = 0;
    std::int32_t too_long = depth;
    while (too_long - fitting > 1) {
        const std::int32_t middle = fitting + (too_long - fitting) / 2;
        (does_fit(middle) ? fitting : too_long) = middle;
    }
    return fitting;
}

TreePosition cut(const Replica& home, TreePosition at, std::int32_t depth) {
    TreePosition part = PrefixTree::position(at.node, depth);
    if (!home.narrows_hits() || depth == 0) return part;
    return PrefixTree::position(part.node, home.longest_hit(part));
}

}  // namespace

void check(const CacheConfig& config) {
    if (config.quotas.size() > PageOwners::kMaxTenants) {
        throw std::invalid_argument(detail::concat(config.quotas.size(),
                                                   " tenants have quotas, at most ",
                                                   PageOwners::kMaxTenants, " can"));
    }
    std::int64_t reserved = 0;
    for (std::size_t i = 0; i < config.quotas.size(); ++i) {
        const TenantQuota& quota = config.quotas[i];
        if (quota.reserved_pages < 0) {
            refuse(i, "reserved_pages", quota.reserved_pages, "at least ", 0);
        }
        if (quota.max_pages < 1) refuse(i, "max_pages", quota.max_pages, "at least ", 1);
        if (quota.reserved_pages > quota.max_pages) {
            refuse(i, "reserved_pages", quota.reserved_pages, "at most its max_pages, ",
                   quota.max_pages);
        }
        if (quota.reserved_pages > config.num_pages - reserved) {
            refuse(i, "reserved_pages", quota.reserved_pages,
                   "at most what those before it leave of the pool, ", config.num_pages - reserved);
        }
        reserved += quota.reserved_pages;
    }
}

Owner owner_of(const CacheConfig& config, std::int32_t tenant) {
    const auto n = static_cast<std::int64_t>(config.quotas.size());
    if (tenant < RequestTerms::kNoTenant || tenant >= n) {
        throw std::invalid_argument(detail::concat("tenant is ", tenant, ", must be one of ", n,
                                                   " quotas, counted from 0, or kNoTenant"));
    }
    return static_cast<Owner>(tenant + 1);
}

bool exceeds_ceiling(const ManagerState& state, const Sequence& sequence,
                     const RequestView& request, std::int64_t tokens, Owner owner,
                     std::int64_t max_hit) {
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

void require_ceiling(const ManagerState& state, const Sequence& sequence,
                     const RequestView& request, std::int64_t tokens, std::int64_t row,
                     std::int64_t max_hit) {
    const Owner owner = state.tenants.of(request.sequence);
    if (!exceeds_ceiling(state, sequence, request, tokens, owner, max_hit)) return;
    throw InRow<CapacityError>(
        row, detail::concat(tokens, " tokens need ", state.least_pages(tokens),
                            " pages, more than the ", ceiling_of(state.home_of(sequence), owner),
                            " that quotas leave its tenant; raise its max_pages, or reserve less "
                            "for others"));
}

void find_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages) {
    pages.clear();
    if (!hit.shares()) return;
    static_cast<void>(home.num_evictable());  // tells of pins since
    const TreePosition at = hit.is_partial() ? hit.match.partial : hit.match.at;
    for_each_idle(home, at, read_by_hit(home, hit.tokens),
                  [&](BlockId page) { pages.push_back(page); });
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

void share_out(Replica& home, const std::vector<BlockId>& pages, Owner taker) noexcept {
    const std::int64_t available = home.num_available();
    for (const BlockId page : pages) home.owners->share_out(page, taker, available);
}

std::int32_t longest_held(const Replica& home, TreePosition at) {
    const std::int64_t column = home.tree.page_size();
    const std::int32_t fitting = longest_fitting(at.depth, [&](std::int32_t depth) {
        const TreePosition part = depth == at.depth ? at : cut(home, at, depth);
        return fits(home, part, read_by_hit(home, part.depth * column));
    });
    return fitting == at.depth ? fitting : cut(home, at, fitting).depth;
}

std::int32_t longest_held(const Replica& home, TreePosition at, std::int32_t first) {
    return longest_fitting(at.depth, [&](std::int32_t depth) {
        return may_hold(home, PrefixTree::position(at.node, depth), first);
    });
}

bool may_hold(const Replica& home, TreePosition at, std::int32_t first) {
    return fits(home, at, [first](const Grouping::Window&) { return first; });
}

void shorten(Replica& home, FoundHit& hit, std::int64_t taken) {
    if (!hit.shares()) return;
    hit.match.at.node = home.tree.split(hit.match.at);
    if (hit.is_partial()) hit.match.partial.node = home.tree.split(hit.match.partial);
    std::vector<BlockId> idle;
    find_idle(home, hit, idle);
    QuotaTrial trial(home);
    for (const BlockId page : idle) trial.hold(page);
    if (trial.is_lawful()) return;
    const std::int32_t depth = longest_held(home, hit.match.at);
    FoundHit shorter;
    shorter.match.at = {home.tree.split({hit.match.at.node, depth}), depth};
    shorter.tokens = std::int64_t{depth} * home.tree.page_size();
    if (shorter.tokens <= taken) shorter = {};
    shorter.branch = hit.branch;  // where a checkpoint is due, whatever is taken
    hit = shorter;
}

}  // namespace quotas

bool OwnedCommit::begin(const ManagerState& state, const Sequence& sequence, SequenceHandle handle,
                        TreePosition known, std::int32_t first) {
    home_ = &state.home_of(sequence);
    pages_.clear();
    takers_.clear();
    if (known.depth <= first) return true;
    static_cast<void>(home_->num_evictable());  // tells of pins since
    const PageRow& row = sequence.pages;
    bool is_swapped = state.config.dedup;
    ColumnsUp columns(known, state.config.page_size);
    for (std::int32_t c = known.depth - 1; c >= first; --c) {
        is_swapped &= home_->pool.ref_count(row[c]) == 1;
        add(columns[c], row[c]);
    }
    if (is_swapped) return true;
    const Owner owner = state.tenants.of(handle);
    takers_.assign(pages_.size(), owner);
    QuotaTrial trial(*home_);
    for (const BlockId page : pages_) trial.hold(page);
    for (const BlockId page : pages_) trial.share_out(page, owner);
    return trial.is_lawful();
}

// What is evictable of a cached column that a row will read, each page with whose it would be else:
// that of the row's own, which is free then.
void OwnedCommit::add(BlockId cached, BlockId own) {
    const PageOwners& owners = *home_->owners;
    if (home_->columns == nullptr) {
        if (owners.is_held(cached)) return;
        pages_.push_back(cached);
        takers_.push_back(owners.owner(own));
        return;
    }
    const ColumnPages& columns = *home_->columns;
    for (std::int32_t lane = 0; lane < columns.grouping().num_lanes(); ++lane) {
        const BlockId page = columns.page(cached, lane);
        const BlockId other = columns.page(own, lane);
        const bool both = page != ColumnPages::kNoPage && other != ColumnPages::kNoPage;
        if (!both || owners.is_held(page)) continue;
        pages_.push_back(page);
        takers_.push_back(owners.owner(other));
    }
}

void OwnedCommit::end() noexcept {
    const std::int64_t available = home_->num_available();
    for (std::size_t i = 0; i < pages_.size(); ++i) {
        home_->owners->share_out(pages_[i], takers_[i], available);
    }
}

}  // namespace kvcore
