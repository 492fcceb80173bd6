// SPDX-License-Identifier: Apache-2.0
#include "layers/column_pages.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

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

ColumnPages::ColumnPages(const Grouping& grouping, std::int64_t num_pages, BlockId first_page,
                         BlockPool& columns, PrefixTree& tree, WindowPolicy& policy)
    : grouping_(grouping),
      columns_(columns),
      tree_(tree),
      policy_(policy),
      pages_(num_pages, first_page),
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
    const BlockId* pages = lane(grouping_.windows()[window].first_lane);
    const std::size_t num_lanes = num_lanes_;
    const TreeNode* node = PrefixTree::position(at.node, at.depth).node;
    for (std::int32_t end = at.depth; end > first; end = node->start, node = node->parent) {
        const BlockId* columns = node->ids(grouping_.column_tokens());
        const std::int32_t top = std::max(first - node->start, 0);
        for (std::int32_t i = end - node->start; i-- > top;) {
            if (pages[static_cast<std::size_t>(columns[i]) * num_lanes] == 0) return false;
        }
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
        if (rule.rule.span == 1) continue;  // it never reads what was written before
        if (!has_all(w, source, at.depth)) return false;
    }
    return has_windows(at, n);
}

void ColumnPages::take(std::int32_t first_lane, std::int32_t num_lanes, BlockId column) {
    BlockId* ids = &ids_[slot(column, first_lane)];
    detail::require_law(pages_.allocate(num_lanes, ids), "reserve: admitted pages are there");
    if (owners_ != nullptr) owners_->take(ids, num_lanes);
    if (late_reads_ != nullptr) late_reads_->take(ids, num_lanes);
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

void ColumnPages::fill_full(BlockId column) {
    for (const Grouping::Bundle& bundle : grouping_.bundles()) {
        if (bundle.window < 0) take(bundle.first_lane, bundle.pages_per_column, column);
    }
}

void ColumnPages::fill(BlockId column, std::size_t window) {
    const Grouping::Window& rule = grouping_.windows()[window];
    take(rule.first_lane, rule.num_lanes, column);
}

// What is looked up for each column stands in locals: hits enter and leave hundreds.
void ColumnPages::enter(const BlockId* columns, std::int64_t n, std::size_t window) noexcept {
    const Grouping::Window& rule = grouping_.windows()[window];
    const BlockId* pages = lane(rule.first_lane);
    const bool* is_cached = &is_cached_[0];
    std::uint32_t* readers = &readers_[window];
    const PageOwners* owners = owners_;
    const std::size_t num_lanes = num_lanes_;
    const std::size_t num_windows = num_windows_;
    std::int64_t entered = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const auto column = static_cast<std::size_t>(columns[i]);
        const bool was_idle = readers[column * num_windows]++ == 0 && is_cached[column] &&
                              pages[column * num_lanes] != 0;
        if (!was_idle) continue;
        ++entered;
        if (owners != nullptr) tell_window(columns[i], window, true);
    }
    num_idle_ -= entered * rule.num_lanes;
}

// A column that is free already has no pages; its last holder need not be its last reader.
void ColumnPages::leave(const BlockId* columns, std::int64_t n, std::size_t window,
                        Departure how) noexcept {
    const Grouping::Window& rule = grouping_.windows()[window];
    const BlockId* pages = lane(rule.first_lane);
    const bool* is_cached = &is_cached_[0];
    std::uint32_t* readers = &readers_[window];
    const PageOwners* owners = owners_;
    const std::size_t num_lanes = num_lanes_;
    const std::size_t num_windows = num_windows_;
    IdlePages::Keeper keeper(idle_);
    std::int64_t left = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const auto column = static_cast<std::size_t>(columns[i]);
        if (--readers[column * num_windows] > 0 || pages[column * num_lanes] == 0) continue;
        if (!is_cached[column]) {
            give_back(rule.first_lane, rule.num_lanes, columns[i]);
            continue;
        }
        ++left;
        if (owners != nullptr) tell_window(columns[i], window, false);
        const auto e = static_cast<Entry>(column * num_windows + window);
        if (how == Departure::kPassed) {
            idle_.pass(e);
        } else if (how == Departure::kUseless) {
            idle_.give_up(e);
        } else if (how == Departure::kKept || !idle_.contains(e)) {
            keeper.keep(e);
        }
    }
    num_idle_ += left * rule.num_lanes;
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

void ColumnPages::touch(TreePosition at) noexcept {
    if (at.depth == 0) return;
    idle_.begin_leaving();
    idle_.leave_from(at);
    const std::int64_t n = std::int64_t{at.depth} * grouping_.column_tokens();
    for (std::size_t w = 0; w < num_windows_; ++w) {
        const std::int32_t first = grouping_.first_column(grouping_.windows()[w], n);
        for_each_column(at, first, [&](BlockId column) {
            if (is_idle(column, w)) idle_.keep(entry(column, w));
        });
    }
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

void ColumnPages::disown(BlockId column) noexcept {
    unsigned idle = 0;
    for (std::size_t w = 0; w < num_windows_; ++w) {
        if (!is_idle(column, w)) continue;
        idle |= 1U << w;
        num_idle_ -= grouping_.windows()[w].num_lanes;
    }
    uncache(column);
    for (std::size_t w = 0; idle >> w != 0; ++w) {
        const Grouping::Window& rule = grouping_.windows()[w];
        if ((idle >> w & 1U) != 0) give_back(rule.first_lane, rule.num_lanes, column);
    }
}

void ColumnPages::fill_holes(TreePosition end, BlockId cached, BlockId own,
                             unsigned windows) noexcept {
    unsigned filled = 0;
    const bool is_cached = is_cached_[static_cast<std::size_t>(cached)];
    for (std::size_t w = 0; w < num_windows_; ++w) {
        if ((windows >> w & 1U) == 0 || has(cached, w) || !has(own, w)) continue;
        // Of a column that was forgotten, what nobody reads is nobody's.
        if (!is_cached && readers_[entry(cached, w)] == 0) continue;
        const Grouping::Window& rule = grouping_.windows()[w];
        BlockId* from = &ids_[slot(own, rule.first_lane)];
        std::copy_n(from, rule.num_lanes, &ids_[slot(cached, rule.first_lane)]);
        std::fill_n(from, rule.num_lanes, 0);
        if (is_cached) num_cached_ += rule.num_lanes;
        ++num_filled_;
        filled_[w] += rule.num_lanes;
        filled |= 1U << w;
        if (!is_idle(cached, w)) continue;
        num_idle_ += rule.num_lanes;
        if (owners_ != nullptr) tell_window(cached, w, false);
        idle_.keep(entry(cached, w));
    }
    if (listener_ != nullptr && filled != 0 && is_cached) {
        listener_->filled(end, static_cast<std::uint8_t>(filled));
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
    if (end.node == nullptr) return;
    if (end.depth >= end.node->end()) condemn_if_useless(end.node);
}

// With its column: by time what left with it goes next as it is.
void ColumnPages::forget(Entry entry) noexcept {
    if (policy_.goes_by_time()) return idle_.remove(entry);
    lose(entry);
}

// Those further on read no more of what is in front of them.
std::int32_t ColumnPages::first_hit(TreePosition end, std::int32_t column,
                                    std::size_t window) const noexcept {
    const std::int32_t depth = policy_.useless().first_checkpoint(end, column);
    const std::int64_t n = std::int64_t{depth} * grouping_.column_tokens();
    const bool reads =
        depth > 0 && grouping_.first_column(grouping_.windows()[window], n) <= column;
    return reads ? depth : 0;
}

// The last place of a run, or somewhere in front of it, where a hit can end.
std::int32_t ColumnPages::legal_end(TreeNode* run) const noexcept {
    if (!needs_checkpoints_) return longest_hit({run, run->end()});
    return policy_.useless().last_checkpoint(run, [&](std::int32_t depth) {
        return has_windows({run, depth}, std::int64_t{depth} * grouping_.column_tokens());
    });
}

void ColumnPages::condemn_if_useless(TreeNode* run) noexcept {
    if (run->is_root() || run->num_children > 0 || run->pins > 0) return;
    const std::int32_t legal = legal_end(run);
    if (legal < run->end()) {
        policy_.useless().condemn(run->id, legal, num_filled_);
    } else {
        policy_.useless().pardon(run->id);
    }
}

}  // namespace kvcore
