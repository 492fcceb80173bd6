// SPDX-License-Identifier: Apache-2.0
#include "layers/column_pages.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

std::size_t num_entries(const Grouping& grouping, std::int64_t num_columns) {
    const auto n = static_cast<std::size_t>(num_columns) * grouping.windows().size();
    if (n >= EvictableWindowPages::kNone) {
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
        if (rule.rule.span == 1) continue;  // a span of 1 reads no earlier token
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

// Keeps the values for all columns in local variables: a hit enters or leaves hundreds of columns.
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

// A column may be freed before its last reader leaves. A free column has no pages.
void ColumnPages::leave(const BlockId* columns, std::int64_t n, std::size_t window,
                        Departure how) noexcept {
    const Grouping::Window& rule = grouping_.windows()[window];
    const BlockId* pages = lane(rule.first_lane);
    const bool* is_cached = &is_cached_[0];
    std::uint32_t* readers = &readers_[window];
    const PageOwners* owners = owners_;
    const std::size_t num_lanes = num_lanes_;
    const std::size_t num_windows = num_windows_;
    EvictableWindowPages::Keeper keeper(idle_);
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

// A request or copy still holds the column. When that holder leaves, the pages become free, not
// idle.
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
        // A forgotten column gets no page without a reader: that page would have no owner.
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

// If the end of a run lost its window, the pages after the longest hit that is left in the run
// serve no hit.
void ColumnPages::lose(Entry entry) noexcept {
    const TreePosition end = idle_.lose(entry);
    if (end.node == nullptr) return;
    if (end.depth >= end.node->end()) condemn_if_useless(end.node);
}

// The window leaves with its column. If the policy orders by time, the rest of its departure is the
// next victim in any case and need not be broken up.
void ColumnPages::forget(Entry entry) noexcept {
    if (policy_.goes_by_time()) return idle_.remove(entry);
    lose(entry);
}

// A hit at a later checkpoint starts to read at the same column or later.
std::int32_t ColumnPages::first_hit(TreePosition end, std::int32_t column,
                                    std::size_t window) const noexcept {
    const std::int32_t depth = policy_.unreachable().first_checkpoint(end, column);
    const std::int64_t n = std::int64_t{depth} * grouping_.column_tokens();
    const bool reads =
        depth > 0 && grouping_.first_column(grouping_.windows()[window], n) <= column;
    return reads ? depth : 0;
}

// The last depth in a run, or before it, at which a hit can end.
std::int32_t ColumnPages::legal_end(TreeNode* run) const noexcept {
    if (!needs_checkpoints_) return longest_hit({run, run->end()});
    return policy_.unreachable().last_checkpoint(run, [&](std::int32_t depth) {
        return has_windows({run, depth}, std::int64_t{depth} * grouping_.column_tokens());
    });
}

void ColumnPages::condemn_if_useless(TreeNode* run) noexcept {
    if (run->is_root() || run->num_children > 0 || run->pins > 0) return;
    const std::int32_t legal = legal_end(run);
    if (legal < run->end()) {
        policy_.unreachable().condemn(run->id, legal, num_filled_);
    } else {
        policy_.unreachable().pardon(run->id);
    }
}

// Statistics and checks.

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
        // Only the tree counts the evictable pages of full groups.
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
    std::vector<bool> seen(static_cast<std::size_t>(pages_.end_id()));
    for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
        const auto column = static_cast<BlockId>(c);
        const bool is_live = columns_.ref_count(column) > 0;
        const bool is_cached = is_cached_[static_cast<std::size_t>(c)];
        if (is_cached) cached += count_window_pages(column);
        for (std::int32_t lane = 0; lane < grouping_.num_lanes(); ++lane) {
            const BlockId id = page(column, lane);
            if (id == kNoPage) continue;
            require_law(is_live, "columns: a free column has no pages");
            require_law(!seen[static_cast<std::size_t>(id)], "columns: a page is in one lane");
            seen[static_cast<std::size_t>(id)] = true;
            ++held;
        }
        require_law(!is_cached || has_full_pages(column),
                    "columns: a cached column has all its full pages");
        for (std::size_t w = 0; w < num_windows_; ++w) {
            const Entry e = entry(column, w);
            require_law(readers_[e] >= readers[e], "columns: readers are counted");
            holds += readers_[e] - readers[e];
            require_law(readers_[e] > 0 || !has(column, w) || is_idle(column, w),
                        "columns: window pages without readers are idle");
            require_law(idle_.contains(e) || !is_idle(column, w),
                        "columns: idle pages are in a queue");
            require_law(!idle_.contains(e) || has(column, w), "columns: a queued entry has pages");
            if (is_idle(column, w)) idle += grouping_.windows()[w].num_lanes;
        }
    }
    require_law(holds == num_holds_, "columns: held hits are counted");
    require_law(cached == num_cached_, "columns: cached window pages are counted");
    require_law(idle == num_idle_, "columns: idle pages are counted");
    require_law(held + pages_.num_free() == pages_.num_blocks(),
                "columns: free + held pages == total");
}

// Eviction of pages and columns.

namespace {

constexpr std::int64_t kMostAtOnce = 64;  // columns

}  // namespace

// Only removes an entry from its queue if the entry has a reader again.
void ColumnPages::evict_idle(Entry entry) noexcept {
    if (readers_[entry] > 0) return idle_.remove(entry);
    const BlockId column = column_of(entry);
    const std::size_t w = entry - this->entry(column, 0);
    const Grouping::Window& rule = grouping_.windows()[w];
    const Entry behind = idle_.behind(entry);
    if (behind != EvictableWindowPages::kNone)
        prefetch(column_of(behind));  // usually the next victim
    num_idle_ -= rule.num_lanes;
    num_cached_ -= rule.num_lanes;
    if (listener_ != nullptr) listener_->lost(column, w);
    give_back(rule.first_lane, rule.num_lanes, column);
    lose(entry);
}

bool ColumnPages::evict_columns(std::int64_t n, EvictionGuard guard) noexcept {
    std::array<BlockId, kMostAtOnce> evicted;
    n = tree_.evict(n, evicted.data(), guard);
    std::reverse(evicted.begin(), evicted.begin() + n);  // the first victim is reused first
    columns_.free(evicted.data(), n);
    return n > 0;
}

// The smallest idle window in the last column of a prefix that has at least `pages` pages, if the
// column has more pages than that. kNone if the whole column is to be evicted.
ColumnPages::Entry ColumnPages::part_of(TreePosition end, std::int64_t pages) const noexcept {
    Entry part = EvictableWindowPages::kNone;
    if (end.node == nullptr || pages <= 0) return part;
    BlockId column = 0;
    tree_.copy_pages(end, end.depth - 1, &column);
    if (count_pages(column) <= pages) return part;
    std::int64_t fewest = grouping_.num_lanes() + 1;
    for (std::size_t w = 0; w < num_windows_; ++w) {
        const std::int64_t lanes = grouping_.windows()[w].num_lanes;
        if (!is_idle(column, w) || lanes < pages || lanes >= fewest) continue;
        part = entry(column, w);
        fewest = lanes;
    }
    return part;
}

// Evicts up to `n` columns of a run that ends where no hit can end, or only a window of its last
// column if that window has the last `pages` pages. False if no run is useless.
bool ColumnPages::evict_useless(std::int64_t n, std::int64_t pages, EvictionGuard guard) noexcept {
    const auto [run, useless] = policy_.unreachable().next(
        tree_, guard.node, num_filled_, [this](TreeNode* each) { return legal_end(each); });
    if (run == nullptr) return false;
    if (const Entry part = part_of({run, run->end()}, pages); part != EvictableWindowPages::kNone) {
        evict_idle(part);
        return true;
    }
    TreeNode* parent = run->parent;
    const bool is_gone = useless <= n && useless == run->num_pages;
    policy_.aim(run->id);
    static_cast<void>(evict_columns(std::min(n, useless), guard));
    policy_.aim(kNoNode);
    if (useless <= n) condemn_if_useless(is_gone ? parent : run);
    return true;
}

// Evicts in the order of the policy. With checkpoints it evicts at most one run: after that the
// path to the run may be useless.
bool ColumnPages::evict_runs(std::int64_t n, EvictionGuard guard) noexcept {
    if (needs_checkpoints_) {
        const NodeId victim = tree_.victim();
        if (victim == kNoNode) return false;
        n = std::min<std::int64_t>(n, tree_.run(victim)->num_pages);
    }
    return evict_columns(n, guard);
}

// Spare windows are evicted before all windows that the policy orders.
WindowPolicy::Departure ColumnPages::next_departure() noexcept {
    const WindowPolicy::Departure spare = policy_.first_spare();
    return spare != 0 ? spare : policy_.next(tree_);
}

// Chooses as `evict_next`.
TreePosition ColumnPages::next_kept(bool wants_pages, EvictionGuard guard) noexcept {
    if (wants_pages && idle_.first_useless() != EvictableWindowPages::kNone) return {};
    if (evict_useless(0, 0, guard)) return {};  // a useless run exists; nothing is evicted
    if (wants_pages) {
        if (idle_.first_passed() != EvictableWindowPages::kNone) return {};
        const WindowPolicy::Departure departure = next_departure();
        if (departure != 0) {
            const TreePosition end = policy_.end_of(departure);
            if (end.node == nullptr) return {};
            return {end.node, std::min(end.depth, end.node->end())};  // its end was evicted
        }
    }
    return tree_.next_victim(guard).end;
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

bool ColumnPages::evict_next(std::int64_t pages, std::int64_t columns,
                             EvictionGuard guard) noexcept {
    const std::int64_t free = pages_.num_free();
    std::int64_t* const count = evict_first(pages, columns, guard);
    if (count == nullptr) return false;
    *count += pages_.num_free() - free;
    return true;
}

// Evicts in this order: pages that serve no hit, pages that only a hit in the middle of a prompt
// reads, spare pages, and the rest in the order of the policy. Returns the counter for the evicted
// pages; nullptr if nothing can be evicted.
std::int64_t* ColumnPages::evict_first(std::int64_t pages, std::int64_t columns,
                                       EvictionGuard guard) noexcept {
    // The number of columns that is needed even if each column has all its pages: never too many.
    const auto wanted = [&] {
        return std::clamp<std::int64_t>(std::max(pages / grouping_.num_lanes(), columns), 1,
                                        kMostAtOnce);
    };
    // Fewer pages are missing than a column has: one window of a column may be enough.
    const std::int64_t rest = columns <= 0 && pages < grouping_.num_lanes() ? pages : 0;
    Entry next = EvictableWindowPages::kNone;
    if (pages > 0) next = idle_.first_useless();
    std::int64_t* const count =
        next == EvictableWindowPages::kNone ? &evicted_.window : &evicted_.unreachable;
    const bool may_be_useless =
        next == EvictableWindowPages::kNone && policy_.unreachable().has_condemned();
    if (may_be_useless && evict_useless(wanted(), rest, guard)) return &evicted_.unreachable;
    if (pages > 0 && next == EvictableWindowPages::kNone) next = idle_.first_passed();
    if (pages > 0 && next == EvictableWindowPages::kNone) {
        const WindowPolicy::Departure departure = next_departure();
        if (departure != 0) next = idle_.first_of(departure);
    }
    if (next == EvictableWindowPages::kNone) {
        if (rest > 0) next = part_of(tree_.next_victim(guard).end, rest);
        if (next != EvictableWindowPages::kNone) {
            evict_idle(next);
            return &evicted_.policy;
        }
        if (evict_runs(wanted(), guard)) return &evicted_.policy;
        if (pages <= 0) return nullptr;
        next = idle_.first_of(policy_.first_aside());
    }
    if (next == EvictableWindowPages::kNone) return nullptr;
    evict_idle(next);
    return count;
}

// Quotas: the held pages of columns.

// A column with another reference stays held: see PageOwners.
void ColumnPages::protect(const BlockId* ids, std::int32_t n, bool is_protected) noexcept {
    for (std::int32_t i = 0; i < n; ++i) {
        if (!is_protected && columns_.ref_count(ids[i]) > 1) continue;
        for_each_full_page(ids[i], [&](BlockId page) {
            is_protected ? owners_->hold(&page, 1) : owners_->let_go(&page, 1);
        });
    }
}

void ColumnPages::tell_window(BlockId column, std::size_t window, bool is_held) const noexcept {
    for_each_window_page(column, window, [&](BlockId page) {
        is_held ? owners_->hold(&page, 1) : owners_->let_go(&page, 1);
    });
}

// Only idle window pages are still evictable when this is called.
void ColumnPages::tell_held() const noexcept {
    for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
        const auto column = static_cast<BlockId>(c);
        if (columns_.ref_count(column) == 0) continue;
        for_each_full_page(column, [&](BlockId page) { owners_->hold(&page, 1); });
        for (std::size_t w = 0; w < num_windows_; ++w) {
            if (!is_idle(column, w)) tell_window(column, w, true);
        }
    }
}

}  // namespace kvcore
