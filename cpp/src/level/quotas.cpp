// SPDX-License-Identifier: Apache-2.0
#include "level/quotas.hpp"

#include <algorithm>
#include <stdexcept>

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

bool is_held(const Replica& home, BlockId column) {
    bool held = true;
    home.for_each_full_page(column, [&](BlockId page) { held &= home.owners->is_held(page); });
    return held;
}

// Visits the pages on the path to `at` that no pin protects, which are in the last columns, and the
// idle pages of each window from column first_of(window) on.
template <class FirstOf, class Visit>
void for_each_idle(const Replica& home, TreePosition at, const FirstOf& first_of,
                   const Visit& visit) {
    if (at.depth == 0) return;
    const std::int32_t page_size = home.tree.page_size();
    ColumnsUp columns(at, page_size);
    for (std::int32_t c = at.depth - 1; c >= 0 && !is_held(home, columns[c]); --c) {
        home.for_each_full_page(columns[c], visit);
    }
    const Grouping& grouping = home.grouping();
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        home.columns->for_each_column(at, first_of(grouping.windows()[w]), [&](BlockId column) {
            if (home.columns->is_idle(column, w)) {
                home.columns->for_each_window_page(column, w, visit);
            }
        });
    }
}

// The first column of a window that a hit of `tokens` tokens reads.
auto read_by_hit(const Replica& home, std::int64_t tokens) {
    return [&home, tokens](const Grouping::Window& window) {
        return home.grouping().first_column(window, tokens);
    };
}

template <class FirstOf>
bool fits(const Replica& home, TreePosition at, const FirstOf& first_of) {
    QuotaTrial trial(home);
    for_each_idle(home, at, first_of, [&](BlockId page) { trial.hold(page); });
    return trial.is_lawful();
}

// The longest part for which does_fit(depth) is true. If a part does not fit, no longer part fits.
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
                                                   " tenants have quotas, must be at most ",
                                                   PageOwners::kMaxTenants));
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
                   "at most the rest of the pool after earlier quotas, ",
                   config.num_pages - reserved);
        }
        reserved += quota.reserved_pages;
    }
}

void list_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages) {
    pages.clear();
    if (!hit.shares()) return;
    static_cast<void>(home.num_evictable());  // reports recent pins to the owners
    const TreePosition at = hit.is_partial() ? hit.match.partial : hit.match.at;
    for_each_idle(home, at, read_by_hit(home, hit.tokens),
                  [&](BlockId page) { pages.push_back(page); });
}

void share_out(Replica& home, const std::vector<BlockId>& pages, Owner taker) noexcept {
    const std::int64_t available = home.num_available();
    for (const BlockId page : pages) home.owners->share_out(page, taker, available);
}

std::int32_t longest_held(const Replica& home, TreePosition at) {
    if (home.owners == nullptr) return at.depth;
    const std::int64_t column = home.tree.page_size();
    const std::int32_t fitting = longest_fitting(at.depth, [&](std::int32_t depth) {
        const TreePosition part = depth == at.depth ? at : cut(home, at, depth);
        return fits(home, part, read_by_hit(home, part.depth * column));
    });
    return fitting == at.depth ? fitting : cut(home, at, fitting).depth;
}

std::int32_t longest_held(const Replica& home, TreePosition at, std::int32_t first) {
    if (home.owners == nullptr) return at.depth;
    return longest_fitting(at.depth, [&](std::int32_t depth) {
        return may_hold(home, PrefixTree::position(at.node, depth), first);
    });
}

bool may_hold(const Replica& home, TreePosition at, std::int32_t first) {
    return home.owners == nullptr ||
           fits(home, at, [first](const Grouping::Window&) { return first; });
}

void shorten(Replica& home, FoundHit& hit, std::int64_t taken) {
    if (home.owners == nullptr || !hit.shares()) return;
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
    shorter.branch = hit.branch;  // where a checkpoint is due in any case
    shorter.wanted = hit.wanted;
    shorter.seen = hit.seen;
    hit = shorter;
}

}  // namespace quotas

}  // namespace kvcore
