// SPDX-License-Identifier: Apache-2.0
// Which pages of columns go next.
#include <algorithm>
#include <array>

#include "layers/column_pages.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kMostAtOnce = 64;  // columns

}  // namespace

// One that has a reader again is left to that.
void ColumnPages::evict_idle(Entry entry) noexcept {
    if (readers_[entry] > 0) return idle_.remove(entry);
    const BlockId column = column_of(entry);
    const std::size_t w = entry - this->entry(column, 0);
    const Grouping::Window& rule = grouping_.windows()[w];
    const Entry behind = idle_.behind(entry);
    if (behind != IdlePages::kNone) prefetch(column_of(behind));  // mostly the next one to go
    num_idle_ -= rule.num_lanes;
    num_cached_ -= rule.num_lanes;
    if (listener_ != nullptr) listener_->lost(column, w);
    give_back(rule.first_lane, rule.num_lanes, column);
    lose(entry);
}

bool ColumnPages::evict_columns(std::int64_t n, EvictionGuard guard) noexcept {
    std::array<BlockId, kMostAtOnce> evicted;
    n = tree_.evict(n, evicted.data(), guard);
    std::reverse(evicted.begin(), evicted.begin() + n);  // the first is taken first
    columns_.free(evicted.data(), n);
    return n > 0;
}

// Of the last column of a prefix, a window that nobody reads and that has the wanted pages, where
// the column has more pages; kNone where the column goes as a whole.
ColumnPages::Entry ColumnPages::part_of(TreePosition end, std::int64_t pages) const noexcept {
    Entry part = IdlePages::kNone;
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

// Up to `n` columns of a run that ends where no hit can, or the part of a column that has the last
// `pages`; false where there is none.
bool ColumnPages::evict_useless(std::int64_t n, std::int64_t pages, EvictionGuard guard) noexcept {
    const auto [run, useless] = policy_.useless().next(
        tree_, guard.node, num_filled_, [this](TreeNode* each) { return legal_end(each); });
    if (run == nullptr) return false;
    if (const Entry part = part_of({run, run->end()}, pages); part != IdlePages::kNone) {
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

// As the policy says. With checkpoints no more than one run, for with it the way to it may be
// useless.
bool ColumnPages::evict_runs(std::int64_t n, EvictionGuard guard) noexcept {
    if (needs_checkpoints_) {
        const NodeId victim = tree_.victim();
        if (victim == kNoNode) return false;
        n = std::min<std::int64_t>(n, tree_.run(victim)->num_pages);
    }
    return evict_columns(n, guard);
}

// Spare windows go before all that the policy orders.
WindowPolicy::Departure ColumnPages::next_departure() noexcept {
    const WindowPolicy::Departure spare = policy_.first_spare();
    return spare != 0 ? spare : policy_.next(tree_);
}

// As `evict_next` chooses.
TreePosition ColumnPages::next_kept(bool wants_pages, EvictionGuard guard) noexcept {
    if (wants_pages && idle_.first_useless() != IdlePages::kNone) return {};
    if (evict_useless(0, 0, guard)) return {};  // there is some, of which none goes
    if (wants_pages) {
        if (idle_.first_passed() != IdlePages::kNone) return {};
        const WindowPolicy::Departure departure = next_departure();
        if (departure != 0) {
            const TreePosition end = policy_.end_of(departure);
            if (end.node == nullptr) return {};
            return {end.node, std::min(end.depth, end.node->end())};  // its last columns are gone
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

// In the order of what is lost with them: what can serve no hit, what only one hit that ends in the
// middle of a prompt could use, what is spare, and then as the policy says. Returns what counts
// them; nullptr: nothing can go.
std::int64_t* ColumnPages::evict_first(std::int64_t pages, std::int64_t columns,
                                       EvictionGuard guard) noexcept {
    // As many as are needed whatever they have: none goes that could have stayed.
    const auto wanted = [&] {
        return std::clamp<std::int64_t>(std::max(pages / grouping_.num_lanes(), columns), 1,
                                        kMostAtOnce);
    };
    // Less than a column is left to find: a part of it may do.
    const std::int64_t rest = columns <= 0 && pages < grouping_.num_lanes() ? pages : 0;
    Entry next = IdlePages::kNone;
    if (pages > 0) next = idle_.first_useless();
    std::int64_t* const count = next == IdlePages::kNone ? &evicted_.window : &evicted_.unreachable;
    const bool may_be_useless = next == IdlePages::kNone && policy_.useless().has_condemned();
    if (may_be_useless && evict_useless(wanted(), rest, guard)) return &evicted_.unreachable;
    if (pages > 0 && next == IdlePages::kNone) next = idle_.first_passed();
    if (pages > 0 && next == IdlePages::kNone) {
        const WindowPolicy::Departure departure = next_departure();
        if (departure != 0) next = idle_.first_of(departure);
    }
    if (next == IdlePages::kNone) {
        if (rest > 0) next = part_of(tree_.next_victim(guard).end, rest);
        if (next != IdlePages::kNone) {
            evict_idle(next);
            return &evicted_.policy;
        }
        if (evict_runs(wanted(), guard)) return &evicted_.policy;
        if (pages <= 0) return nullptr;
        next = idle_.first_of(policy_.first_aside());
    }
    if (next == IdlePages::kNone) return nullptr;
    evict_idle(next);
    return count;
}

}  // namespace kvcore
