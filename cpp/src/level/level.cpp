// SPDX-License-Identifier: Apache-2.0
#include "level/level.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/refs.hpp"

namespace kvcore {
namespace {

[[noreturn]] void refuse_put(BlockId id) {
    throw InvalidHandleError(detail::concat(
        "page ", id, " cannot be published: it is free; take pages before they are filled"));
}

}  // namespace

TreeNode* Level::open(std::string_view name_space) {
    TreeNode* root = tree.open_namespace(name_space);
    tree.pin(root);
    return root;
}

TreeNode* Level::hold(TreePosition at) {
    TreeNode* place = tree.split(at);
    tree.pin(place);
    return place;
}

void Level::release(TreeNode* place) noexcept {
    tree.unpin(place, true);
    tree.shrink(place);
}

TreeNode* Level::advance(TreeNode* place, const TokenId* tokens, std::int64_t n) {
    const TreePosition at = tree.match(place, tokens, n).at;
    if (at.depth == PrefixTree::depth_of(place)) return place;
    TreeNode* further = hold(at);
    tree.unpin(place, false);
    return further;
}

// All refs are detached before the first ref is attached again: another ref does not count as a
// holder.
void Level::detach_refs() noexcept {
    prefix_refs.for_each([](PrefixRef& ref) { ref.detach(); });
    page_refs.for_each([](PageRef& ref) { ref.detach(); });
    page_refs.for_each([](PageRef& ref) { ref.reattach(); });
    prefix_refs.for_each([](PrefixRef& ref) { ref.reattach(); });
}

void Level::drop_forgotten_refs() noexcept {
    prefix_refs.for_each([](PrefixRef& ref) { ref.drop_forgotten(); });
}

void Level::move_refs_to_tree(BlockId column, TreePosition at) noexcept {
    page_refs.for_each([&](PageRef& ref) {
        if (ref.is_reference() && ref.column() == column) ref.move_to_tree(at);
    });
}

void Level::move_refs(BlockId from, BlockId to, TreePosition at) noexcept {
    page_refs.for_each([&](PageRef& ref) {
        if (ref.is_reference() && ref.column() == from) ref.follow(to, at);
    });
}

std::int64_t Level::take(std::int64_t n, BlockId* out) noexcept {
    std::int64_t taken = std::min(n, pool.num_free());
    static_cast<void>(pool.allocate(taken, out));
    if (taken < n) taken += evict_from(tree, n - taken, out + taken, {}, evicted_);
    note_taken(out, taken);
    if (keys != nullptr) keys->forget(out, taken);
    return taken;
}

TreeNode* Level::put(TreeNode* place, const TokenId* tokens, const BlockId* ids, std::int32_t n,
                     std::vector<DuplicatePage>& duplicates, const Retention& retention) {
    for (std::int32_t i = 0; i < n; ++i) {
        if (pool.ref_count(ids[i]) == 0) refuse_put(ids[i]);
    }
    duplicates.clear();
    TreeNode* end = tree.insert(place, tokens, ids, n, duplicates, retention);
    if (end == place) return place;
    tree.pin(end);
    tree.unpin(place, false);
    return end;
}

void Level::evict(std::int64_t n, EvictionGuard guard) noexcept {
    std::array<BlockId, 256> evicted;  // a fixed size needs no allocation
    while (n > 0) {
        const auto most = std::min(n, static_cast<std::int64_t>(evicted.size()));
        const std::int64_t gone = tree.evict(most, evicted.data(), guard);
        std::reverse(evicted.begin(), evicted.begin() + gone);  // the first victim is reused first
        pool.free(evicted.data(), gone);
        num_evicted_ += gone;
        evicted_.policy += gone;
        n = gone == most ? n - gone : 0;
    }
}

void Level::evict_all() noexcept {
    std::array<BlockId, 256> evicted;
    for (std::int64_t n = 1; n > 0;) {
        n = tree.evict(static_cast<std::int64_t>(evicted.size()), evicted.data());
        std::reverse(evicted.begin(), evicted.begin() + n);  // the first page is taken first
        pool.free(evicted.data(), n);
    }
    forget_checkpoints();
}

void Level::tell_held() noexcept {
    if (owners == nullptr) return;
    if (columns != nullptr) return columns->tell_held();
    for (std::int64_t i = pool.first_id(); i < pool.end_id(); ++i) {
        const auto page = static_cast<BlockId>(i);
        if (pool.ref_count(page) > 0) owners->hold(&page, 1);
    }
}

void Level::check_integrity(std::int64_t in_flight) const {
    pool.check_integrity();
    tree.check_integrity();
    tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            detail::require_law(pool.ref_count(ids[i]) == 1,
                                "level: a cached page has one reference, the tree's");
        }
    });
    detail::require_law(
        pool.num_free() + tree.num_cached() + tree.num_forgotten() + in_flight == pool.num_blocks(),
        "level: free + in flight + cached or held == total");
}

}  // namespace kvcore

namespace kvcore::tiered {
namespace {

// Returns `other` if `at` is empty: ColumnsUp needs a node, but no column of it is read.
TreePosition some(TreePosition at, TreePosition other) noexcept {
    return at.depth > 0 ? at : other;
}

/// The columns of a prefix on the device and in the host tier, from its end to its start.
struct BothUp {
    BothUp(TreePosition at, TreePosition below, std::int32_t tokens) noexcept
        : at(at), below(below), here(some(at, below), tokens), there(some(below, at), tokens) {}

    /// True if the device or the tier has the wanted data of a column: `is_here(column)`,
    /// `is_there(record)`.
    template <class Here, class There>
    [[nodiscard]] bool any(std::int32_t column, const Here& is_here, const There& is_there) {
        return (column < at.depth && is_here(here[column])) ||
               (column < below.depth && is_there(there[column]));
    }

    TreePosition at;
    TreePosition below;
    ColumnsUp here;
    ColumnsUp there;
};

std::int32_t longest_with_window(const Replica& home, TreePosition at, TreePosition below,
                                 std::size_t window, std::int32_t end) noexcept {
    const Grouping& grouping = home.grouping();
    BothUp both(at, below, grouping.column_tokens());
    return grouping.longest_hit(grouping.windows()[window], end, [&](std::int32_t column) {
        return both.any(
            column, [&](BlockId id) { return home.columns->has(id, window); },
            [&](BlockId id) { return home.host->columns->has(id, window); });
    });
}

std::int32_t longest_with_state(const Replica& home, TreePosition at, TreePosition below,
                                std::int32_t end) noexcept {
    BothUp both(at, below, home.tree.page_size());
    const auto is_here = [&](BlockId id) { return home.has_checkpoint(id); };
    const auto is_there = [&](BlockId id) { return home.host->has_checkpoint(id); };
    while (end > 0 && !both.any(end - 1, is_here, is_there)) --end;
    return end;
}

}  // namespace

std::int32_t longest_hit(const Replica& home, TreePosition at, TreePosition below) noexcept {
    const std::size_t windows = home.grouping().windows().size();
    std::int32_t depth = std::max(at.depth, below.depth);
    std::int32_t before = 0;
    do {
        before = depth;
        for (std::size_t w = 0; w < windows; ++w) {
            depth = longest_with_window(home, at, below, w, depth);
        }
        if (home.states != nullptr) depth = longest_with_state(home, at, below, depth);
    } while (depth != before);
    return depth;
}

std::int64_t count_columns(const Replica& home, std::string_view name_space, const TokenId* tokens,
                           std::int64_t n) noexcept {
    const TreePosition at = home.find(name_space, tokens, n);
    const TreePosition below = home.find_stored(name_space, tokens, n);
    if (!home.narrows_hits()) return std::max(at.depth, below.depth);
    if (below.depth > 0) return longest_hit(home, at, below);
    return at.depth == 0 ? 0 : home.longest_hit(at);
}

}  // namespace kvcore::tiered
