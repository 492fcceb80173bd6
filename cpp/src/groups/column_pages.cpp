// SPDX-License-Identifier: Apache-2.0
#include "groups/column_pages.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

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
                         PrefixTree& tree, const TimedPolicy& policy)
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
      idle_(num_entries(grouping, columns.num_blocks())) {
    columns.set_listener(this);
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

// Upwards from the end: each hole is as far as the next prefix to try may go.
std::int32_t ColumnPages::longest_hit(std::size_t window, TreePosition at) const noexcept {
    const Grouping::Window& rule = grouping_.windows()[window];
    const std::int64_t tokens = grouping_.column_tokens();
    ColumnsUp columns(at, grouping_.column_tokens());
    std::int32_t end = at.depth;
    std::int32_t first = grouping_.first_column(rule, end * tokens);
    for (std::int32_t column = end - 1; column >= first; --column) {
        if (has(columns[column], window)) continue;
        end = column;
        first = grouping_.first_column(rule, end * tokens);
    }
    return end;
}

bool ColumnPages::has_all(std::size_t window, TreePosition at, std::int32_t first) const noexcept {
    ColumnsUp columns(at, grouping_.column_tokens());
    for (std::int32_t column = at.depth - 1; column >= first; --column) {
        if (!has(columns[column], window)) return false;
    }
    return true;
}

bool ColumnPages::can_serve_part(TreePosition at, TreePosition source,
                                 std::int64_t n) const noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) {
        const Grouping::Window& rule = grouping_.windows()[w];
        if (rule.rule.skipped_tokens(n) == n) continue;  // it reads nothing of what is written
        const std::int32_t first = grouping_.first_column(rule, n);
        if (!has_all(w, source, at.depth) || !has_all(w, at, first)) return false;
    }
    return true;
}

void ColumnPages::take(std::int32_t first_lane, std::int32_t num_lanes, BlockId column) noexcept {
    BlockId* ids = &ids_[slot(column, first_lane)];
    detail::require_law(pages_.allocate(num_lanes, ids), "reserve: admitted pages are there");
    for (std::int32_t i = 0; i < num_lanes; ++i) ++ids[i];
}

void ColumnPages::give_back(std::int32_t first_lane, std::int32_t num_lanes,
                            BlockId column) noexcept {
    BlockId* ids = &ids_[slot(column, first_lane)];
    for (std::int32_t i = 0; i < num_lanes; ++i) --ids[i];
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
    if (is_idle(column, window)) num_idle_ -= grouping_.windows()[window].num_lanes;
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
    if (how != Departure::kUnused || !idle_.contains(e)) {
        idle_.renew(e, how != Departure::kPassed, policy_.now());
    }
}

void ColumnPages::enter_all(BlockId column) noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) enter(column, w);
}

void ColumnPages::leave_all(BlockId column) noexcept {
    for (std::size_t w = 0; w < num_windows_; ++w) leave(column, w, Departure::kUnused);
}

void ColumnPages::keep(BlockId column, std::size_t window) noexcept {
    idle_.keep(entry(column, window), policy_.now());
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
        if (idle_.contains(entry(column, w))) idle_.remove(entry(column, w));
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
        filled_[w] += rule.num_lanes;
        if (!is_idle(cached, w)) continue;
        num_idle_ += rule.num_lanes;
        idle_.renew(entry(cached, w), true, policy_.now());
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
            if (idle_.contains(entry(column, w))) idle_.remove(entry(column, w));
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

std::uint64_t ColumnPages::next_run_time() noexcept {
    const NodeId victim = tree_.victim();
    return victim == kNoNode ? kNever : policy_.time_of(victim);
}

// One that has a reader again is left to that.
void ColumnPages::evict_idle(Entry entry) noexcept {
    if (readers_[entry] > 0) return idle_.remove(entry);
    const std::size_t w = entry % num_windows_;
    const Grouping::Window& rule = grouping_.windows()[w];
    idle_.take(entry);
    num_idle_ -= rule.num_lanes;
    num_cached_ -= rule.num_lanes;
    give_back(rule.first_lane, rule.num_lanes, static_cast<BlockId>(entry / num_windows_));
}

bool ColumnPages::evict_columns(std::int64_t n, EvictionGuard guard) noexcept {
    std::array<BlockId, 64> evicted;
    const auto most = static_cast<std::int64_t>(evicted.size());
    n = tree_.evict(std::clamp<std::int64_t>(n, 1, most), evicted.data(), guard);
    columns_.free(evicted.data(), n);
    return n > 0;
}

std::int64_t ColumnPages::make_room(std::int64_t pages, std::int64_t columns,
                                    EvictionGuard guard) noexcept {
    std::int64_t evicted = 0;
    while (pages_.num_free() < pages || columns_.num_free() < columns) {
        const std::int64_t free = pages_.num_free();
        const std::int64_t missing = pages - free;
        Entry next = IdlePages::kNone;
        if (missing > 0 && num_idle_ > 0) next = idle_.next(next_run_time());
        if (next != IdlePages::kNone) {
            evict_idle(next);
        } else {
            // As many as are needed whatever they have: none goes that could have stayed.
            const std::int64_t wanted =
                std::max(missing / grouping_.num_lanes(), columns - columns_.num_free());
            if (!evict_columns(wanted, guard)) {
                next = missing > 0 ? idle_.next(kNever) : IdlePages::kNone;
                if (next == IdlePages::kNone) break;
                evict_idle(next);
            }
        }
        evicted += pages_.num_free() - free;
    }
    return evicted;
}

std::vector<GroupStats> ColumnPages::stats() const {
    std::vector<GroupStats> stats;
    for (const Grouping::Group& group : grouping_.groups()) {
        GroupStats& each = stats.emplace_back();
        if (group.window >= 0) {
            each.given_back = given_back_[static_cast<std::size_t>(group.window)];
            each.filled = filled_[static_cast<std::size_t>(group.window)];
        }
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
        if (is_cached_[static_cast<std::size_t>(c)]) cached += count_window_pages(column);
        for (std::int32_t lane = 0; lane < grouping_.num_lanes(); ++lane) {
            const BlockId id = page(column, lane);
            if (id == kNoPage) continue;
            require_law(is_live, "columns: a free one has no pages");
            require_law(!seen[static_cast<std::size_t>(id)], "columns: a page is in one lane");
            seen[static_cast<std::size_t>(id)] = true;
            ++held;
        }
        for (const Grouping::Bundle& bundle : grouping_.bundles()) {
            require_law(bundle.window >= 0 || !is_live || page(column, bundle.first_lane) >= 0,
                        "columns: a live one has all its full pages");
        }
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
