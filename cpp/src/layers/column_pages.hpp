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
#include "layers/grouping.hpp"
#include "layers/idle_pages.hpp"
#include "layers/window_listener.hpp"
#include "layers/window_policy.hpp"
#include "pages/late_reads.hpp"
#include "pages/page_owners.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// The columns of a prefix from its end upwards.
class ColumnsUp {
   public:
    ColumnsUp(TreePosition at, std::int32_t column_tokens) noexcept
        : node_(PrefixTree::position(at.node, at.depth).node), column_tokens_(column_tokens) {}
    /// Ever smaller ones, each in front of the end. O(1) amortised.
    [[nodiscard]] BlockId operator[](std::int32_t column) noexcept {
        while (column < node_->start) node_ = node_->parent;
        return node_->ids(column_tokens_)[column - node_->start];
    }

   private:
    const TreeNode* node_;
    std::int32_t column_tokens_;
};

/// Columns of which pages were copied: those of each window, and those of all full lanes.
struct ColumnCounts {
    static constexpr std::size_t kFull = Grouping::kMaxWindows;
    std::array<std::int64_t, Grouping::kMaxWindows + 1> of{};

    ColumnCounts& operator+=(const ColumnCounts& more) noexcept {
        for (std::size_t i = 0; i < of.size(); ++i) of[i] += more.of[i];
        return *this;
    }
};

/// Which pages the columns of a replica have, and who reads them.
///
/// Where layers do not all keep everything, sequences and the tree own columns instead of pages: an
/// id of the replica's pool names a run of tokens. What it has of each bundle is said here, and
/// changes during its life:
///
///     full lanes     a page each, as long as the column lives; none in a column that only brings
///                    pages of windows for another one
///     window lanes   pages from the reservation of their chunk until nobody reads them; then they
///                    are free, or idle where the tree has the column: they serve the next hit, or
///                    go when pages are needed. A column of the tree without them has a hole, which
///                    whoever computes those tokens again fills
///
/// Owns: the pool of real pages; per column its pages, per column and window how many readers it
/// has: rows whose window covers it, hits and copies that hold it.
/// Invariant: a page is free or in one lane of one column. A column of the tree with pages of a
/// window, and without readers there, is idle, and stands in a queue of IdlePages; any other live
/// column without readers in a window has no pages there.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(lanes) per column and verb; eviction O(1) per column or page. No memory after
/// construction, but for `make_room_to_cache`.
class ColumnPages final : public PoolListener, public ProtectionListener {
   public:
    /// Why a reader leaves, which says how long the tree keeps the pages.
    enum class Departure {
        kUnused,   // it had them for a moment, which was no use: they keep their place
        kUseless,  // no hit reads them
        kPassed,   // it went on, in the middle of a prompt
        kKept,     // a next turn may come back to them
    };

    static constexpr BlockId kNoPage = -1;
    static constexpr std::int64_t kSpareDepartures = 64;

    /// Throws std::invalid_argument for more pages than can be numbered.
    ColumnPages(const Grouping& grouping, std::int64_t num_pages, BlockId first_page,
                BlockPool& columns, PrefixTree& tree, WindowPolicy& policy);

    /// Layers keep a state, too: a hit ends at a checkpoint, of which the policy knows.
    void need_checkpoints() noexcept { needs_checkpoints_ = true; }
    [[nodiscard]] bool needs_checkpoints() const noexcept { return needs_checkpoints_; }
    /// With them: where the first hit ends that reads a window of a column on the way to `end`; 0:
    /// there is none.
    [[nodiscard]] std::int32_t first_hit(TreePosition end, std::int32_t column,
                                         std::size_t window) const noexcept;
    /// Who is told from now on which pages are held; nullptr for nobody. Not owned.
    void set_owners(PageOwners* owners) noexcept { owners_ = owners; }
    /// Who is told from now on which pages are handed out. Not owned.
    void set_late_reads(LateReads* reads) noexcept { late_reads_ = reads; }
    /// Who is told from now on which windows cached columns lose and get again.
    void set_window_listener(WindowListener* listener) noexcept { listener_ = listener; }

    [[nodiscard]] const Grouping& grouping() const noexcept { return grouping_; }
    [[nodiscard]] const BlockPool& pages() const noexcept { return pages_; }
    [[nodiscard]] BlockId page(BlockId column, std::int32_t lane) const noexcept {
        return ids_[slot(column, lane)] - 1;
    }
    /// It has the pages of a window; either all lanes of it have one, or none.
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
    /// It is idle since a request passed it in the middle of a prompt.
    [[nodiscard]] bool is_passed(BlockId column, std::size_t window) const noexcept {
        return is_idle(column, window) && idle_.is_passed(entry(column, window));
    }
    /// What leaves pages and is no run of the tree: see WindowPolicy.
    [[nodiscard]] std::size_t num_departures() const noexcept { return policy_.num_departures(); }
    /// Pages of a lane and those behind, + 1, 0 for none: of a column from [column * lanes] on.
    [[nodiscard]] const BlockId* lane(std::int32_t lane) const noexcept {
        return &ids_[static_cast<std::size_t>(lane)];
    }
    /// Pages of a column now.
    [[nodiscard]] std::int64_t count_pages(BlockId column) const noexcept;
    /// Pages that could be had: those of runs nobody holds, and idle ones.
    [[nodiscard]] std::int64_t num_evictable() const noexcept {
        return tree_.num_evictable() * grouping_.num_full_lanes() + num_idle_;
    }
    /// Pages that can be had: free ones and those that eviction would free.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return pages_.num_free() + num_evictable();
    }
    /// The longest prefix of that one which every window can serve, in columns. O(columns between
    /// them + window).
    [[nodiscard]] std::int32_t longest_hit(TreePosition at) const noexcept;
    /// What `n` tokens read of the columns in front of `at`, they have.
    [[nodiscard]] bool has_windows(TreePosition at, std::int64_t n) const noexcept;
    /// A hit of `n` tokens that ends inside the column behind `at` has all that it reads. The copy
    /// is a column like others, out of which a hit of fewer tokens may be copied: so what it is
    /// copied from has pages of every window, also where a chunk ends at `n`.
    [[nodiscard]] bool can_serve_part(TreePosition at, TreePosition source,
                                      std::int64_t n) const noexcept;

    /// Calls visit(column) for columns `first` .. at.depth - 1 on the way to `at`, from the end.
    template <class Visit>
    void for_each_column(TreePosition at, std::int32_t first, const Visit& visit) const {
        ColumnsUp columns(at, grouping_.column_tokens());
        for (std::int32_t c = at.depth - 1; c >= first; --c) visit(columns[c]);
    }

    /// Gives a column the pages of its full lanes, or of a window. Throws IntegrityError where they
    /// are not there.
    void fill_full(BlockId column);
    void fill(BlockId column, std::size_t window);
    /// Gives a new column pages of all lanes and its first reader in all windows. Throws likewise.
    void begin(BlockId column) {
        take(0, grouping_.num_lanes(), column);
        for (std::size_t w = 0; w < num_windows_; ++w) ++readers_[entry(column, w)];
    }
    /// One reader more, or less, of each of `columns` [n]. Where the last one leaves, pages are
    /// idle or free; what was left together before costs less.
    void enter(const BlockId* columns, std::int64_t n, std::size_t window) noexcept;
    void leave(const BlockId* columns, std::int64_t n, std::size_t window, Departure how) noexcept;
    void enter(BlockId column, std::size_t window) noexcept { enter(&column, 1, window); }
    void leave(BlockId column, std::size_t window, Departure how) noexcept {
        leave(&column, 1, window, how);
    }
    /// Asks for what is read when a reader enters or leaves a column.
    void prefetch(BlockId column) const noexcept {
        kvcore::prefetch(&ids_[slot(column, 0)]);
        kvcore::prefetch(&readers_[entry(column, 0)]);
        kvcore::prefetch(&is_cached_[static_cast<std::size_t>(column)]);
        idle_.prefetch(entry(column, 0));
    }
    /// What leaves from now on does so at the same time.
    void begin_leaving() noexcept { idle_.begin_leaving(); }
    /// It serves a hit together, of a prefix that ends there. What is spare goes before what is
    /// not.
    void leave_from(TreePosition end, bool is_spare = false) noexcept {
        idle_.leave_from(end, is_spare);
    }
    /// One reader more, or less, of what is copied, in all windows; `end` is where the tree has it.
    void enter_all(BlockId column) noexcept;
    void leave_all(BlockId column, TreePosition end) noexcept;
    /// Evicts the windows of a column that nobody reads.
    void give_up_idle(BlockId column) noexcept {
        for (std::size_t w = 0; w < num_windows_; ++w) {
            if (is_idle(column, w)) evict_idle(entry(column, w));
        }
    }
    /// An idle page that a request passed is worth keeping after all.
    void keep(BlockId column, std::size_t window) noexcept;
    /// An idle page is used just now, by who leaves.
    void renew(BlockId column, std::size_t window) noexcept {
        if (is_idle(column, window)) idle_.keep(entry(column, window));
    }
    /// What a hit of these columns reads is used now: as if somebody had it for a moment.
    void touch(TreePosition at) noexcept;
    /// Pages that columns of the tree have.
    [[nodiscard]] std::int64_t num_cached() const noexcept {
        return tree_.num_cached() * grouping_.num_full_lanes() + num_cached_;
    }
    /// So that `n` columns more can be the tree's, and so many readers leave some until it is asked
    /// again: at the end of what each committed, one page in front of that, and where others branch
    /// off. Should they leave more than that, some pages go as if they were passed. Throws
    /// std::bad_alloc.
    void make_room_to_cache(std::int64_t n, std::int64_t readers) {
        idle_.make_room(static_cast<std::size_t>(tree_.num_cached() + n) * num_windows_,
                        static_cast<std::size_t>(kSpareDepartures + 4 * readers));
    }
    /// The column is the tree's from now on, until its id is free or the tree gives it up.
    void cache(BlockId column) noexcept;
    void uncache(BlockId column) noexcept;
    /// The same of one that was forgotten: what of it nobody reads is free.
    void disown(BlockId column) noexcept;
    /// Fills holes of a cached column, the last one on the way to `end`, with the pages of another
    /// one of the same tokens, which is about to go.
    void fill_holes(TreePosition end, BlockId cached, BlockId own, unsigned windows = ~0U) noexcept;

    /// Evicts until so many pages and columns are free, as far as that is possible. Returns how
    /// many pages went.
    std::int64_t make_room(std::int64_t pages, std::int64_t columns, EvictionGuard guard) noexcept;

    /// Pages that went since the last `reset_counts` to make room.
    [[nodiscard]] const EvictionCounts& evicted() const noexcept { return evicted_; }

    /// Where what goes next ends: a run, or what left a prefix together; no node for what serves no
    /// hit, or only one in the middle of a prompt, and where nothing can go. Without `wants_pages`
    /// a column is to go.
    [[nodiscard]] TreePosition next_kept(bool wants_pages, EvictionGuard guard) noexcept;
    /// Evicts the next column, or column of a window. False where nothing can go.
    [[nodiscard]] bool evict_one(bool wants_pages, bool wants_column,
                                 EvictionGuard guard) noexcept {
        return evict_next(wants_pages ? 1 : 0, wants_column ? 1 : 0, guard);
    }

    /// Columns that are free again have no pages.
    void freed(const BlockId* ids, std::int64_t n) noexcept override;
    /// Pages of groups that keep everything are held as long as their column is.
    void protect(const BlockId* ids, std::int32_t n, bool is_protected) noexcept override;
    /// Calls visit(page) for the pages that a column has: those of full groups, or of a window.
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
    /// Tells again what is held.
    void tell_held() const noexcept;

    /// In the order of the groups. O(columns).
    [[nodiscard]] std::vector<GroupStats> stats() const;
    /// Counts from 0 what is given back, filled, stored and loaded.
    void reset_counts() noexcept {
        given_back_.fill(0);
        filled_.fill(0);
        stored_ = loaded_ = {};
        evicted_ = {};
    }
    /// Copies between the tiers are done.
    void count_stored(const ColumnCounts& columns) noexcept { stored_ += columns; }
    void count_loaded(const ColumnCounts& columns) noexcept { loaded_ += columns; }
    /// A request is about to leave a column behind.
    void count_passed(BlockId column, std::size_t window) noexcept {
        if (has(column, window)) given_back_[window] += grouping_.windows()[window].num_lanes;
    }

    /// Hits that somebody keeps are readers too, in all so many times: for check_integrity.
    void count_holds(std::int64_t n) noexcept { num_holds_ += n; }
    /// Throws IntegrityError unless the invariant holds; `readers` [columns * windows] are those
    /// that rows and copies have. O(columns).
    void check_integrity(const std::vector<std::uint32_t>& readers) const;

   private:
    using Entry = IdlePages::Entry;

    [[nodiscard]] std::size_t slot(BlockId column, std::int32_t lane) const noexcept {
        return static_cast<std::size_t>(column) * num_lanes_ + static_cast<std::size_t>(lane);
    }
    [[nodiscard]] Entry entry(BlockId column, std::size_t window) const noexcept {
        return static_cast<Entry>(static_cast<std::size_t>(column) * num_windows_ + window);
    }
    // Of most models there is one window: to divide by it costs as much as an eviction.
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
    ZeroedArray<BlockId> ids_;            // [columns, lanes]: page + 1; 0: none
    ZeroedArray<std::uint32_t> readers_;  // [columns, windows]
    ZeroedArray<bool> is_cached_;         // [columns]
    IdlePages idle_;
    std::int64_t num_idle_ = 0;    // pages
    std::int64_t num_cached_ = 0;  // pages of windows that columns of the tree have
    std::int64_t num_holds_ = 0;   // of readers_
    std::int64_t num_filled_ = 0;  // holes, ever
    std::array<std::int64_t, Grouping::kMaxWindows> given_back_{};  // pages, since they were reset
    std::array<std::int64_t, Grouping::kMaxWindows> filled_{};
    ColumnCounts stored_;
    ColumnCounts loaded_;
    EvictionCounts evicted_;
};

}  // namespace kvcore
