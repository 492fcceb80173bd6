// SPDX-License-Identifier: Apache-2.0
#include "groups/column_pages.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kMostAtOnce = 64;  // columns

std::size_t num_entries(const Grouping& grouping, std::int64_t num_columns) {
    const auto n = static_cast<std::size_t>(num_columns) * grouping.windows().size();
    if (n >= IdlePages::kNone) {
        throw std::invalid_argument(
            detail::concat(num_columns, " columns with ", grouping.windows().size(),
                           " windows are too many to be numbered; give the pool fewer pages"));
    }
    return std::max<std::size_t>(n, 1);
}

}  // namespace

ColumnPages::ColumnPages(const Grouping& grouping, std::int64_t num_pages, BlockPool& columns,
                         PrefixTree& tree, WindowPolicy& policy)
    : grouping_(grouping),
      columns_(columns),
      tree_(tree),
      policy_(policy),
      pages_(num_pages),
      num_lanes_(static_cast<std::size_t>(grouping.num_lanes())),
      num_windows_(grouping.windows().size()),
      ids_(static_cast<std::size_t>(columns.num_blocks()) * num_lanes_),
      readers_(num_entries(grouping, columns.num_blocks())),
      is_cached_(static_cast<std::size_t>(columns.num_blocks())),
      idle_(num_entries(grouping, columns.num_blocks()), policy) {
    columns.set_listener(this);
}

bool ColumnPages::has_full_pages(BlockId column) const noexcept {
    return std::all_of(grouping_.bundles().begin(), grouping_.bundles().end(),
                       [&](const Grouping::Bundle& bundle) {
                           return bundle.window >= 0 || page(column, bundle.first_lane) != kNoPage;
                       });
}

std::int64_t ColumnPages::count_pages(BlockId column) const noexcept {
    return grouping_.num_full_lanes() + count_window_pages(column);
}

std::int64_t ColumnPages::count_window_pages(BlockId column) const noexcept {
    std::int64_t pages = 0;
    for (std::size_t w = 0; w < num_windows_; ++w) {
        pages += has(column, w) ? grouping_.windows()[w].num_lanes : 0;
    }
    return pages;
}

std::int32_t ColumnPages::longest_hit(TreePosition at) const noexcept {
    std::int32_t depth = at.depth;
    std::int32_t before = 0;
    do {
        before = depth;
        for (std::size_t w = 0; w < num_windows_; ++w) depth = longest_hit(w, {at.node, depth});
    } while (depth != before);
    return depth;
}

std::int32_t ColumnPages::longest_hit(std::size_t window, TreePosition at) const noexcept {
    ColumnsUp columns(at, grouping_.column_tokens());
    return grouping_.longest_hit(grouping_.windows()[window], at.depth,
                                 [&](std::int32_t column) { return has(columns[column], window); });
}

bool ColumnPages::has_all(std::size_t window, TreePosition at, std::int32_t first) const noexcept {
    ColumnsUp columns(at, grouping_.column_tokens());
    for (std::int32_t column = at.depth - 1; column >= first; --column) {
        if (!has(columns[column], window)) return false;
    }
    return true;
}

bool ColumnPages::has_windows(TreePosition at, std::int64_t n) const noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) {
        if (!has_all(w, at, grouping_.first_column(grouping_.windows()[w], n))) return false;
    }
    return true;
}

bool ColumnPages::can_serve_part(TreePosition at, TreePosition source,
                                 std::int64_t n) const noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) {
        const Grouping::Window& rule = grouping_.windows()[w];
        if (rule.rule.skipped_tokens(n) == n) continue;  // it reads nothing of what is written
        if (!has_all(w, source, at.depth)) return false;
    }
    return has_windows(at, n);
}

void ColumnPages::take(std::int32_t first_lane, std::int32_t num_lanes, BlockId column) noexcept {
    BlockId* ids = &ids_[slot(column, first_lane)];
    detail::require_law(pages_.allocate(num_lanes, ids), "reserve: admitted pages are there");
    if (owners_ != nullptr) owners_->take(ids, num_lanes);
    for (std::int32_t i = 0; i < num_lanes; ++i) ++ids[i];
}

void ColumnPages::give_back(std::int32_t first_lane, std::int32_t num_lanes,
                            BlockId column) noexcept {
    BlockId* ids = &ids_[slot(column, first_lane)];
    for (std::int32_t i = 0; i < num_lanes; ++i) --ids[i];
    if (owners_ != nullptr) owners_->let_go(ids, num_lanes);
    pages_.free(ids, num_lanes);
    std::fill_n(ids, num_lanes, 0);
}

void ColumnPages::fill_full(BlockId column) noexcept {
    for (const Grouping::Bundle& bundle : grouping_.bundles()) {
        if (bundle.window < 0) take(bundle.first_lane, bundle.pages_per_column, column);
    }
}

void ColumnPages::fill(BlockId column, std::size_t window) noexcept {
    const Grouping::Window& rule = grouping_.windows()[window];
    take(rule.first_lane, rule.num_lanes, column);
}

void ColumnPages::enter(BlockId column, std::size_t window) noexcept {
    if (is_idle(column, window)) {
        num_idle_ -= grouping_.windows()[window].num_lanes;
        tell_window(column, window, true);
    }
    ++readers_[entry(column, window)];
}

// A column that is free already has no pages; its last holder need not be its last reader.
void ColumnPages::leave(BlockId column, std::size_t window, Departure how) noexcept {
    const Entry e = entry(column, window);
    if (--readers_[e] > 0 || !has(column, window)) return;
    const Grouping::Window& rule = grouping_.windows()[window];
    if (!is_cached_[static_cast<std::size_t>(column)]) {
        return give_back(rule.first_lane, rule.num_lanes, column);
    }
    num_idle_ += rule.num_lanes;
    tell_window(column, window, false);
    if (how == Departure::kPassed) {
        idle_.pass(e);
    } else if (how == Departure::kKept || !idle_.contains(e)) {
        idle_.keep(e);
    }
}

void ColumnPages::enter_all(BlockId column) noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) enter(column, w);
}

void ColumnPages::leave_all(BlockId column, TreePosition end) noexcept {
    idle_.begin_leaving();
    idle_.leave_from(end);
    for (std::size_t w = 0; w < num_windows_; ++w) leave(column, w, Departure::kUnused);
}

void ColumnPages::keep(BlockId column, std::size_t window) noexcept {
    if (idle_.is_passed(entry(column, window))) idle_.keep(entry(column, window));
}

void ColumnPages::cache(BlockId column) noexcept {
    is_cached_[static_cast<std::size_t>(column)] = true;
    num_cached_ += count_window_pages(column);
}

// Somebody still has it, whose pages are idle no more when that one leaves.
void ColumnPages::uncache(BlockId column) noexcept {
    bool& is_cached = is_cached_[static_cast<std::size_t>(column)];
    if (!std::exchange(is_cached, false)) return;
    num_cached_ -= count_window_pages(column);
    for (std::size_t w = 0; w < num_windows_; ++w) {
        if (idle_.contains(entry(column, w))) forget(entry(column, w));
    }
}

void ColumnPages::fill_holes(BlockId cached, BlockId own) noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) {
        if (has(cached, w) || !has(own, w)) continue;
        const Grouping::Window& rule = grouping_.windows()[w];
        BlockId* from = &ids_[slot(own, rule.first_lane)];
        std::copy_n(from, rule.num_lanes, &ids_[slot(cached, rule.first_lane)]);
        std::fill_n(from, rule.num_lanes, 0);
        num_cached_ += rule.num_lanes;
        ++num_filled_;
        filled_[w] += rule.num_lanes;
        if (!is_idle(cached, w)) continue;
        num_idle_ += rule.num_lanes;
        tell_window(cached, w, false);
        idle_.keep(entry(cached, w));
    }
}

void ColumnPages::freed(const BlockId* ids, std::int64_t n) noexcept {
    for (std::int64_t i = 0; i < n; ++i) {
        const BlockId column = ids[i];
        if (is_cached_[static_cast<std::size_t>(column)]) {
            num_cached_ -= count_window_pages(column);
        }
        for (std::size_t w = 0; w < num_windows_; ++w) {
            const Grouping::Window& rule = grouping_.windows()[w];
            if (idle_.contains(entry(column, w))) forget(entry(column, w));
            if (is_idle(column, w)) num_idle_ -= rule.num_lanes;
            if (has(column, w)) give_back(rule.first_lane, rule.num_lanes, column);
        }
        is_cached_[static_cast<std::size_t>(column)] = false;
        for (const Grouping::Bundle& bundle : grouping_.bundles()) {
            const bool is_full = bundle.window < 0 && page(column, bundle.first_lane) != kNoPage;
            if (is_full) give_back(bundle.first_lane, bundle.pages_per_column, column);
        }
    }
}

// Where the end of a run lost its window, nothing of the run behind the hit that is left serves
// any.
void ColumnPages::lose(Entry entry) noexcept {
    const TreePosition end = idle_.lose(entry);
    if (end.node == nullptr || policy_.goes_by_time()) return;
    if (end.depth >= end.node->end()) condemn_if_useless(end.node);
}

// With its column: by time what left with it goes next as it is.
void ColumnPages::forget(Entry entry) noexcept {
    if (policy_.goes_by_time()) return idle_.remove(entry);
    lose(entry);
}

void ColumnPages::condemn_if_useless(TreeNode* run) noexcept {
    if (run->is_root() || run->num_children > 0 || run->pins > 0) return;
    const std::int32_t legal = longest_hit({run, run->end()});
    if (legal < run->end()) {
        policy_.condemn(run, legal, num_filled_);
    } else {
        policy_.pardon(run->id);
    }
}

// One that has a reader again is left to that.
void ColumnPages::evict_idle(Entry entry) noexcept {
    if (readers_[entry] > 0) return idle_.remove(entry);
    const std::size_t w = entry % num_windows_;
    const Grouping::Window& rule = grouping_.windows()[w];
    num_idle_ -= rule.num_lanes;
    num_cached_ -= rule.num_lanes;
    give_back(rule.first_lane, rule.num_lanes, static_cast<BlockId>(entry / num_windows_));
    lose(entry);
}

bool ColumnPages::evict_columns(std::int64_t n, EvictionGuard guard) noexcept {
    std::array<BlockId, kMostAtOnce> evicted;
    n = tree_.evict(n, evicted.data(), guard);
    columns_.free(evicted.data(), n);
    return n > 0;
}

// Up to `n` columns of a run that ends where no hit can; false where there is none.
bool ColumnPages::evict_useless(std::int64_t n, EvictionGuard guard) noexcept {
    for (;;) {
        const auto [run, legal, judged] = policy_.condemned();
        if (run == nullptr) return false;
        const std::int64_t useless = run->end() - std::max(legal, run->start);
        const bool can_go = run->num_children == 0 && run->pins == 0 && run != guard.node;
        if (!can_go || useless <= 0) {
            policy_.pardon(run->id);
            continue;
        }
        if (judged != num_filled_) {
            condemn_if_useless(run);
            continue;
        }
        TreeNode* parent = run->parent;
        const bool is_all = useless <= n;
        const bool is_gone = is_all && legal <= run->start;
        static_cast<void>(evict_columns(std::min(n, useless), guard));
        if (is_all) condemn_if_useless(is_gone ? parent : run);
        return true;
    }
}

std::int64_t ColumnPages::make_room(std::int64_t pages, std::int64_t columns,
                                    EvictionGuard guard) noexcept {
    std::int64_t evicted = 0;
    while (pages_.num_free() < pages || columns_.num_free() < columns) {
        const std::int64_t free = pages_.num_free();
        if (!evict_next(pages - free, columns - columns_.num_free(), guard)) break;
        evicted += pages_.num_free() - free;
    }
    return evicted;
}

// In the order of what is lost with them: what can serve no hit, what only one hit that ends in the
// middle of a prompt could use, and then as the policy says.
bool ColumnPages::evict_next(std::int64_t pages, std::int64_t columns,
                             EvictionGuard guard) noexcept {
    // As many as are needed whatever they have: none goes that could have stayed.
    const std::int64_t wanted =
        std::clamp<std::int64_t>(std::max(pages / grouping_.num_lanes(), columns), 1, kMostAtOnce);
    Entry next = IdlePages::kNone;
    if (pages > 0) next = idle_.first_broken();
    if (next == IdlePages::kNone && evict_useless(wanted, guard)) return true;
    if (pages > 0 && next == IdlePages::kNone) next = idle_.first_passed();
    if (pages > 0 && next == IdlePages::kNone) {
        const WindowPolicy::Departure departure = policy_.next(tree_);
        if (departure != 0) next = idle_.first_of(departure);
    }
    if (next == IdlePages::kNone) {
        if (evict_columns(wanted, guard)) return true;
        if (pages <= 0) return false;
        next = idle_.first_of(policy_.first_aside());
    }
    if (next == IdlePages::kNone) return false;
    evict_idle(next);
    return true;
}

std::vector<GroupStats> ColumnPages::stats() const {
    std::vector<GroupStats> stats;
    for (const Grouping::Group& group : grouping_.groups()) {
        GroupStats& each = stats.emplace_back();
        if (group.window >= 0) {
            each.given_back = given_back_[static_cast<std::size_t>(group.window)];
            each.filled = filled_[static_cast<std::size_t>(group.window)];
        }
        const std::size_t counted =
            group.window < 0 ? ColumnCounts::kFull : static_cast<std::size_t>(group.window);
        each.stored_pages = stored_.of[counted] * group.num_lanes;
        each.loaded_pages = loaded_.of[counted] * group.num_lanes;
        for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
            const auto column = static_cast<BlockId>(c);
            if (columns_.ref_count(column) == 0) continue;
            const bool has_pages = page(column, group.first_lane) != kNoPage;
            const bool is_read =
                group.window < 0 || !is_idle(column, static_cast<std::size_t>(group.window));
            if (has_pages && is_read) each.held_pages += group.num_lanes;
            if (!is_cached_[static_cast<std::size_t>(column)]) continue;
            (has_pages ? each.cached_pages : each.holes) += group.num_lanes;
        }
        // Of what keeps everything, the tree alone knows what nobody holds.
        if (group.window < 0) each.held_pages -= tree_.num_evictable() * group.num_lanes;
    }
    return stats;
}

void ColumnPages::check_integrity(const std::vector<std::uint32_t>& readers) const {
    using detail::require_law;
    pages_.check_integrity();
    std::int64_t held = 0;
    std::int64_t idle = 0;
    std::int64_t holds = 0;
    std::int64_t cached = 0;
    std::vector<bool> seen(static_cast<std::size_t>(pages_.num_blocks()));
    for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
        const auto column = static_cast<BlockId>(c);
        const bool is_live = columns_.ref_count(column) > 0;
        const bool is_cached = is_cached_[static_cast<std::size_t>(c)];
        if (is_cached) cached += count_window_pages(column);
        for (std::int32_t lane = 0; lane < grouping_.num_lanes(); ++lane) {
            const BlockId id = page(column, lane);
            if (id == kNoPage) continue;
            require_law(is_live, "columns: a free one has no pages");
            require_law(!seen[static_cast<std::size_t>(id)], "columns: a page is in one lane");
            seen[static_cast<std::size_t>(id)] = true;
            ++held;
        }
        require_law(!is_cached || has_full_pages(column),
                    "columns: one of the tree has all its full pages");
        for (std::size_t w = 0; w < num_windows_; ++w) {
            const Entry e = entry(column, w);
            require_law(readers_[e] >= readers[e], "columns: readers are counted");
            holds += readers_[e] - readers[e];
            require_law(readers_[e] > 0 || !has(column, w) || is_idle(column, w),
                        "columns: pages without readers are the tree's");
            require_law(idle_.contains(e) || !is_idle(column, w), "columns: idle pages can go");
            require_law(!idle_.contains(e) || has(column, w), "columns: what can go is there");
            if (is_idle(column, w)) idle += grouping_.windows()[w].num_lanes;
        }
    }
    require_law(holds == num_holds_, "columns: hits that are kept are counted");
    require_law(cached == num_cached_, "columns: pages of the tree are counted");
    require_law(idle == num_idle_, "columns: idle pages are counted");
    require_law(held + pages_.num_free() == pages_.num_blocks(),
                "columns: free + held pages == total");
}

}  // namespace kvcore
