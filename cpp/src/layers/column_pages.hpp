// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/evictable_window_pages.hpp"
#include "layers/grouping.hpp"
#include "layers/window_listener.hpp"
#include "layers/window_policy.hpp"
#include "pages/late_reads.hpp"
#include "pages/page_owners.hpp"
#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// The columns of a prefix, read from its end to its start.
class ColumnsUp {
   public:
    ColumnsUp(TreePosition at, std::int32_t column_tokens) noexcept
        : node_(PrefixTree::position(at.node, at.depth).node), column_tokens_(column_tokens) {}
    /// The column with this index in the prefix. The index must not grow from call to call. O(1)
    /// amortised.
    [[nodiscard]] BlockId operator[](std::int32_t column) noexcept {
        while (column < node_->start) node_ = node_->parent;
        return node_->ids(column_tokens_)[column - node_->start];
    }

   private:
    const TreeNode* node_;
    std::int32_t column_tokens_;
};

/// Numbers of copied columns: for each window, and at kFull for all full lanes.
struct ColumnCounts {
    static constexpr std::size_t kFull = Grouping::kMaxWindows;
    std::array<std::int64_t, Grouping::kMaxWindows + 1> of{};

    ColumnCounts& operator+=(const ColumnCounts& more) noexcept {
        for (std::size_t i = 0; i < of.size(); ++i) of[i] += more.of[i];
        return *this;
    }
};

/// The pages of the columns of a replica, and their readers.
///
/// If not all layers keep every token, sequences and the tree own columns instead of pages: an id
/// of the replica's pool names a run of tokens. This class stores the pages that a column has of
/// each bundle. They change during its life:
///
///     full lanes     a page each, as long as the column lives; no pages in a column that only
///                    brings window pages to another column
///     window lanes   pages from the reservation of their chunk until the last reader leaves. After
///                    that they are free, or idle if the tree has the column: idle pages serve
///                    the next hit, or are evicted when pages are needed. A cached column without
///                    them has a hole; a request that computes the same tokens again fills it
///
/// Owns: the pool of real pages; the pages of each column; the number of readers per column and
/// window. A reader is a row whose window covers the column, or a hit or copy that holds it.
/// Invariant: a page is free or in one lane of one column. A cached column that has pages of a
/// window but no reader in it is idle, and is in a queue of EvictableWindowPages. Any other live
/// column without readers in a window has no pages of that window. Threads: no locks of its own;
/// CacheManager locks around it. Cost: O(lanes) per column and method; eviction O(1) per column or
/// page. After construction only `make_room_to_cache` allocates.
class ColumnPages final : public PoolListener, public ProtectionListener {
   public:
    /// The reason why a reader leaves. It decides how long the tree keeps the pages.
    enum class Departure {
        kUnused,   // the reader did not use the pages: they keep their place
        kUseless,  // no hit reads the pages
        kPassed,   // the request moved on, in the middle of a prompt
        kKept,     // a next turn may read the pages
    };

    static constexpr BlockId kNoPage = -1;
    static constexpr std::int64_t kSpareDepartures = 64;

    /// Throws std::invalid_argument if there are more columns and windows than can be numbered.
    ColumnPages(const Grouping& grouping, std::int64_t num_pages, BlockId first_page,
                BlockPool& columns, PrefixTree& tree, WindowPolicy& policy);

    /// Call this if layers also keep a state: every hit then ends at a checkpoint. The policy
    /// stores where the checkpoints are.
    void need_checkpoints() noexcept { needs_checkpoints_ = true; }
    [[nodiscard]] bool needs_checkpoints() const noexcept { return needs_checkpoints_; }
    /// With checkpoints: the end of the first hit on the path to `end` that reads a column's pages
    /// of a window; 0 if no hit reads them.
    [[nodiscard]] std::int32_t first_hit(TreePosition end, std::int32_t column,
                                         std::size_t window) const noexcept;
    /// Sets the PageOwners that is called from now on when pages become held or cease to be held;
    /// nullptr for no PageOwners. Not owned.
    void set_owners(PageOwners* owners) noexcept { owners_ = owners; }
    /// Sets the LateReads that is called from now on when pages get a new owner. Not owned.
    void set_late_reads(LateReads* reads) noexcept { late_reads_ = reads; }
    /// Sets the listener for windows that cached columns lose and get again from now on.
    void set_window_listener(WindowListener* listener) noexcept { listener_ = listener; }

    [[nodiscard]] const Grouping& grouping() const noexcept { return grouping_; }
    /// The tree that has the cached columns.
    [[nodiscard]] const PrefixTree& tree() const noexcept { return tree_; }
    [[nodiscard]] const BlockPool& pages() const noexcept { return pages_; }
    [[nodiscard]] BlockId page(BlockId column, std::int32_t lane) const noexcept {
        return ids_[slot(column, lane)] - 1;
    }
    /// True if the column has its pages of a window: either every lane of the window has a page, or
    /// no lane has a page.
    [[nodiscard]] bool has(BlockId column, std::size_t window) const noexcept {
        return page(column, grouping_.windows()[window].first_lane) != kNoPage;
    }
    [[nodiscard]] bool has_full_pages(BlockId column) const noexcept;
    [[nodiscard]] bool is_idle(BlockId column, std::size_t window) const noexcept {
        return readers_[entry(column, window)] == 0 && has(column, window) &&
               is_cached_[static_cast<std::size_t>(column)];
    }
    [[nodiscard]] std::uint32_t num_readers(BlockId column, std::size_t window) const noexcept {
        return readers_[entry(column, window)];
    }
    /// True if the pages are idle because a request moved past them in the middle of a prompt.
    [[nodiscard]] bool is_passed(BlockId column, std::size_t window) const noexcept {
        return is_idle(column, window) && idle_.is_passed(entry(column, window));
    }
    /// The number of ids that the policy lists but that are not runs of the tree: see WindowPolicy.
    [[nodiscard]] std::size_t num_departures() const noexcept { return policy_.num_departures(); }
    /// The table of pages, from this lane on: the page of a column is at [column * lanes], plus 1;
    /// 0: no page. The higher lanes of the column follow.
    [[nodiscard]] const BlockId* lane(std::int32_t lane) const noexcept {
        return &ids_[static_cast<std::size_t>(lane)];
    }
    /// Pages that the column has.
    [[nodiscard]] std::int64_t count_pages(BlockId column) const noexcept;
    /// Pages that eviction can free: full pages of evictable runs, and idle pages.
    [[nodiscard]] std::int64_t num_evictable() const noexcept {
        return tree_.num_evictable() * grouping_.num_full_lanes() + num_idle_;
    }
    /// Free pages, and pages that eviction can free.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return pages_.num_free() + num_evictable();
    }
    /// The longest prefix of `at` that every window can serve, in columns. O(columns after it +
    /// window).
    [[nodiscard]] std::int32_t longest_hit(TreePosition at) const noexcept;
    /// True if the columns before `at` have all pages that `n` tokens read of them.
    [[nodiscard]] bool has_windows(TreePosition at, std::int64_t n) const noexcept;
    /// True if a hit of `n` tokens that ends inside the column after `at` finds all pages that it
    /// reads. `source`: the column that is copied. A later hit of fewer tokens may copy from the
    /// copy, so `source` must have pages of every window, even if a chunk ends at `n`.
    [[nodiscard]] bool can_serve_part(TreePosition at, TreePosition source,
                                      std::int64_t n) const noexcept;

    /// Calls visit(column) for columns `first` .. at.depth - 1 on the path to `at`, from the end.
    template <class Visit>
    void for_each_column(TreePosition at, std::int32_t first, const Visit& visit) const {
        ColumnsUp columns(at, grouping_.column_tokens());
        for (std::int32_t c = at.depth - 1; c >= first; --c) visit(columns[c]);
    }

    /// Allocates the pages of a column's full lanes, or of a window. Throws IntegrityError if the
    /// pool has too few free pages.
    void fill_full(BlockId column);
    void fill(BlockId column, std::size_t window);
    /// Allocates the pages of all lanes of a new column and adds its first reader in all windows.
    /// Throws as `fill`.
    void begin(BlockId column) {
        take(0, grouping_.num_lanes(), column);
        for (std::size_t w = 0; w < num_windows_; ++w) ++readers_[entry(column, w)];
    }
    /// Adds or removes a reader of each of `columns` [n]. When the last reader leaves, the pages
    /// become idle or free. Columns that left together before are cheaper to move.
    void enter(const BlockId* columns, std::int64_t n, std::size_t window) noexcept;
    void leave(const BlockId* columns, std::int64_t n, std::size_t window, Departure how) noexcept;
    void enter(BlockId column, std::size_t window) noexcept { enter(&column, 1, window); }
    void leave(BlockId column, std::size_t window, Departure how) noexcept {
        leave(&column, 1, window, how);
    }
    /// Prefetches the memory that `enter` and `leave` read.
    void prefetch(BlockId column) const noexcept {
        kvcore::prefetch(&ids_[slot(column, 0)]);
        kvcore::prefetch(&readers_[entry(column, 0)]);
        kvcore::prefetch(&is_cached_[static_cast<std::size_t>(column)]);
        idle_.prefetch(entry(column, 0));
    }
    /// Begins a moment: pages that readers leave until the next call were left at the same time.
    void begin_leaving() noexcept { idle_.begin_leaving(); }
    /// Pages that readers leave from now on serve a hit of the prefix that ends at `end`. Spare
    /// pages are evicted before other kept pages.
    void leave_from(TreePosition end, bool is_spare = false) noexcept {
        idle_.leave_from(end, is_spare);
    }
    /// Adds or removes a reader of a copied column in all windows. `end`: the position of the
    /// column in the tree.
    void enter_all(BlockId column) noexcept;
    void leave_all(BlockId column, TreePosition end) noexcept;
    /// Evicts the idle windows of a column.
    void give_up_idle(BlockId column) noexcept {
        for (std::size_t w = 0; w < num_windows_; ++w) {
            if (is_idle(column, w)) evict_idle(entry(column, w));
        }
    }
    /// Keeps an idle page that a request passed, as if a reader had left it with kKept.
    void keep(BlockId column, std::size_t window) noexcept;
    /// Counts a use of an idle page by the request that is leaving.
    void renew(BlockId column, std::size_t window) noexcept {
        if (is_idle(column, window)) idle_.keep(entry(column, window));
    }
    /// Counts a use of the idle pages that a hit of this prefix reads, as if a reader had just left
    /// them.
    void touch(TreePosition at) noexcept;
    /// Pages of cached columns.
    [[nodiscard]] std::int64_t num_cached() const noexcept {
        return tree_.num_cached() * grouping_.num_full_lanes() + num_cached_;
    }
    /// Makes room for `n` more cached columns, and for the pages that `readers` requests leave
    /// until the next call: at the end of the committed columns of each request, one page earlier,
    /// and before branches. If they leave more, some pages count as passed. Throws std::bad_alloc.
    void make_room_to_cache(std::int64_t n, std::int64_t readers) {
        idle_.make_room(static_cast<std::size_t>(tree_.num_cached() + n) * num_windows_,
                        static_cast<std::size_t>(kSpareDepartures + 4 * readers));
    }
    /// The column belongs to the tree from now on, until its id is free or the tree gives it up.
    void cache(BlockId column) noexcept;
    void uncache(BlockId column) noexcept;
    /// As `uncache`, for a column that the tree forgot: pages without readers become free.
    void disown(BlockId column) noexcept;
    /// Fills holes of a cached column, the last column on the path to `end`, with the pages of
    /// `own`, a column of the same tokens that is about to be freed.
    void fill_holes(TreePosition end, BlockId cached, BlockId own, unsigned windows = ~0U) noexcept;

    /// Evicts until this number of pages and columns are free, or nothing more can be evicted.
    /// Returns the number of evicted pages.
    std::int64_t make_room(std::int64_t pages, std::int64_t columns, EvictionGuard guard) noexcept;

    /// Pages evicted to make room since the last `reset_counts`.
    [[nodiscard]] const EvictionCounts& evicted() const noexcept { return evicted_; }

    /// The end of the next victim: of a run, or of a prefix whose pages left together. No node if
    /// the victim serves no hit, or only a hit in the middle of a prompt, or if nothing can be
    /// evicted. Without `wants_pages` the caller needs a column.
    [[nodiscard]] TreePosition next_kept(bool wants_pages, EvictionGuard guard) noexcept;
    /// Evicts the next column, or one window of a column. False if nothing can be evicted.
    [[nodiscard]] bool evict_one(bool wants_pages, bool wants_column,
                                 EvictionGuard guard) noexcept {
        return evict_next(wants_pages ? 1 : 0, wants_column ? 1 : 0, guard);
    }

    /// Frees the pages of columns that became free.
    void freed(const BlockId* ids, std::int64_t n) noexcept override;
    /// Pages of groups that keep every token are held as long as their column is held.
    void protect(const BlockId* ids, std::int32_t n, bool is_protected) noexcept override;
    /// Calls visit(page) for each page that a column has: of full groups, of a window, or of all
    /// lanes.
    template <class Visit>
    void for_each_full_page(BlockId column, const Visit& visit) const {
        for (const Grouping::Bundle& bundle : grouping_.bundles()) {
            if (bundle.window < 0)
                visit_lanes(column, bundle.first_lane, bundle.pages_per_column, visit);
        }
    }
    template <class Visit>
    void for_each_window_page(BlockId column, std::size_t window, const Visit& visit) const {
        const Grouping::Window& rule = grouping_.windows()[window];
        visit_lanes(column, rule.first_lane, rule.num_lanes, visit);
    }
    template <class Visit>
    void for_each_page(BlockId column, const Visit& visit) const {
        visit_lanes(column, 0, grouping_.num_lanes(), visit);
    }
    /// Reports all held pages to the PageOwners again.
    void tell_held() const noexcept;

    /// Statistics of each group, in the order of the groups. O(columns).
    [[nodiscard]] std::vector<GroupStats> stats() const;
    /// Sets the counts of pages given back, filled, stored, loaded and evicted to 0.
    void reset_counts() noexcept {
        given_back_.fill(0);
        filled_.fill(0);
        stored_ = loaded_ = {};
        evicted_ = {};
    }
    /// Counts columns whose copies between the tiers are complete.
    void count_stored(const ColumnCounts& columns) noexcept { stored_ += columns; }
    void count_loaded(const ColumnCounts& columns) noexcept { loaded_ += columns; }
    /// Counts the pages of a column that a request is about to move past.
    void count_passed(BlockId column, std::size_t window) noexcept {
        if (has(column, window)) given_back_[window] += grouping_.windows()[window].num_lanes;
    }

    /// Adds `n` to the number of readers that are held hits, for check_integrity.
    void count_holds(std::int64_t n) noexcept { num_holds_ += n; }
    /// Throws IntegrityError unless the invariant holds. `readers` [columns * windows]: the readers
    /// that are rows or copies. O(columns).
    void check_integrity(const std::vector<std::uint32_t>& readers) const;

   private:
    using Entry = EvictableWindowPages::Entry;

    [[nodiscard]] std::size_t slot(BlockId column, std::int32_t lane) const noexcept {
        return static_cast<std::size_t>(column) * num_lanes_ + static_cast<std::size_t>(lane);
    }
    [[nodiscard]] Entry entry(BlockId column, std::size_t window) const noexcept {
        return static_cast<Entry>(static_cast<std::size_t>(column) * num_windows_ + window);
    }
    // Most models have one window. A division would cost as much as an eviction.
    [[nodiscard]] BlockId column_of(Entry entry) const noexcept {
        return static_cast<BlockId>(num_windows_ == 1 ? entry : entry / num_windows_);
    }
    template <class Visit>
    void visit_lanes(BlockId column, std::int32_t first_lane, std::int32_t n,
                     const Visit& visit) const {
        for (std::int32_t i = 0; i < n; ++i) {
            const BlockId id = page(column, first_lane + i);
            if (id != kNoPage) visit(id);
        }
    }
    void tell_window(BlockId column, std::size_t window, bool is_held) const noexcept;
    void take(std::int32_t first_lane, std::int32_t num_lanes, BlockId column);
    void give_back(std::int32_t first_lane, std::int32_t num_lanes, BlockId column) noexcept;
    [[nodiscard]] std::int32_t longest_hit(std::size_t window, TreePosition at) const noexcept;
    [[nodiscard]] bool has_all(std::size_t window, TreePosition at,
                               std::int32_t first) const noexcept;
    void lose(Entry entry) noexcept;
    void forget(Entry entry) noexcept;
    [[nodiscard]] std::int32_t legal_end(TreeNode* run) const noexcept;
    void condemn_if_useless(TreeNode* run) noexcept;
    [[nodiscard]] bool evict_next(std::int64_t pages, std::int64_t columns,
                                  EvictionGuard guard) noexcept;
    [[nodiscard]] std::int64_t* evict_first(std::int64_t pages, std::int64_t columns,
                                            EvictionGuard guard) noexcept;
    [[nodiscard]] bool evict_useless(std::int64_t n, std::int64_t pages,
                                     EvictionGuard guard) noexcept;
    [[nodiscard]] bool evict_runs(std::int64_t n, EvictionGuard guard) noexcept;
    [[nodiscard]] WindowPolicy::Departure next_departure() noexcept;
    void evict_idle(Entry entry) noexcept;
    [[nodiscard]] Entry part_of(TreePosition end, std::int64_t pages) const noexcept;
    [[nodiscard]] std::int64_t count_window_pages(BlockId column) const noexcept;
    [[nodiscard]] bool evict_columns(std::int64_t n, EvictionGuard guard) noexcept;

    const Grouping& grouping_;
    BlockPool& columns_;
    PrefixTree& tree_;
    WindowPolicy& policy_;
    PageOwners* owners_ = nullptr;
    LateReads* late_reads_ = nullptr;
    WindowListener* listener_ = nullptr;
    BlockPool pages_;
    std::size_t num_lanes_;
    std::size_t num_windows_;
    bool needs_checkpoints_ = false;
    ZeroedArray<BlockId> ids_;            // [columns, lanes]: page + 1; 0: no page
    ZeroedArray<std::uint32_t> readers_;  // [columns, windows]
    ZeroedArray<bool> is_cached_;         // [columns]
    EvictableWindowPages idle_;
    std::int64_t num_idle_ = 0;    // pages
    std::int64_t num_cached_ = 0;  // window pages of cached columns
    std::int64_t num_holds_ = 0;   // readers that are held hits
    std::int64_t num_filled_ = 0;  // holes, since construction
    std::array<std::int64_t, Grouping::kMaxWindows> given_back_{};  // pages, since `reset_counts`
    std::array<std::int64_t, Grouping::kMaxWindows> filled_{};
    ColumnCounts stored_;
    ColumnCounts loaded_;
    EvictionCounts evicted_;
};

}  // namespace kvcore
