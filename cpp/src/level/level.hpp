// SPDX-License-Identifier: Apache-2.0
// A level of pages, the two levels of a replica, and the hits that both serve.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/types.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "layers/residency.hpp"
#include "pages/late_reads.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

// ---- a level ------------------------------------------------------------------------------------

/// The place of a reference in the RefList of its level. Empty references are in no list.
///
/// Threads: no locks of its own. Cost: O(1); allocates nothing and never throws.
class RefLink {
   public:
    RefLink(const RefLink&) = delete;
    RefLink& operator=(const RefLink&) = delete;

   protected:
    RefLink() noexcept = default;
    ~RefLink() { unlink(); }

    void link_before(RefLink& next) noexcept {
        next_ = &next;
        prev_ = next.prev_;
        prev_->next_ = this;
        next.prev_ = this;
    }
    void unlink() noexcept {
        if (next_ == nullptr) return;
        prev_->next_ = next_;
        next_->prev_ = prev_;
        prev_ = next_ = nullptr;
    }
    /// Takes the place of a link that leaves its list.
    void replace(RefLink& other) noexcept {
        if (other.next_ == nullptr) return;
        link_before(*other.next_);
        other.unlink();
    }

   private:
    template <class Ref>
    friend class RefList;

    RefLink* prev_ = nullptr;
    RefLink* next_ = nullptr;
};

/// The references of one kind to the pages of a level, in the order in which they began.
///
/// Owns: nothing; each reference enters and leaves the list itself, and the list outlives it.
/// Threads: no locks of its own. Cost: O(1), `for_each` O(references); allocates nothing.
template <class Ref>
class RefList : private RefLink {
   public:
    RefList() noexcept { prev_ = next_ = this; }
    ~RefList() { prev_ = next_ = nullptr; }

    [[nodiscard]] bool empty() const noexcept { return next_ == this; }
    void add(RefLink& ref) noexcept { ref.link_before(*this); }
    /// Calls visit(ref) for each reference. `visit` may end the reference.
    template <class Visit>
    void for_each(const Visit& visit) {
        for (RefLink* each = next_; each != this;) {
            Ref& ref = static_cast<Ref&>(*each);
            each = each->next_;
            visit(ref);
        }
    }
    template <class Visit>
    void for_each(const Visit& visit) const {
        for (const RefLink* each = next_; each != this; each = each->next_) {
            visit(static_cast<const Ref&>(*each));
        }
    }
};

/// The keys of the records in the host tier of a replica, as far as a caller asked for them.
///
/// Owns: a key for each record, by its id. Invariant: a known key is the key of the record's tokens
/// in the tier's tree, and the keys of all records on the path to it are also known; a newly taken
/// record has no key.
/// Threads: no locks of its own; CacheManager locks around it. Cost: O(1); 33 bytes per record.
class RecordKeys {
   public:
    explicit RecordKeys(std::int64_t num_records)
        : keys_(static_cast<std::size_t>(num_records)),
          is_known_(static_cast<std::size_t>(num_records)) {}

    /// Returns nullptr if the key is not known.
    [[nodiscard]] const PageKey* find(BlockId record) const noexcept {
        const auto i = static_cast<std::size_t>(record);
        return is_known_[i] != 0 ? &keys_[i] : nullptr;
    }
    void set(BlockId record, const PageKey& key) noexcept {
        const auto i = static_cast<std::size_t>(record);
        keys_[i] = key;
        is_known_[i] = 1;
    }
    void forget(const BlockId* records, std::int64_t n) noexcept {
        std::for_each(records, records + n,
                      [this](BlockId each) { is_known_[static_cast<std::size_t>(each)] = 0; });
    }

   private:
    std::vector<PageKey> keys_;
    std::vector<std::uint8_t> is_known_;
};

class PageRef;
class PrefixRef;

/// Pages that a call is about to take from a level, and columns where there are groups.
struct PageNeed {
    std::int64_t pages = 0;
    std::int64_t columns = 0;
};

/// The pages of a device, or of its host tier, for one replica: a pool, a tree of the cached pages,
/// the parts that their columns have now (Residency), and an eviction policy. Ids only: other
/// objects have the bytes. A level knows no requests.
///
/// If not all layers keep every token, `pool` and `tree` contain columns, which have pages of each
/// bundle; otherwise a column is a page.
///
/// A *place* is a node of the tree that its holder has pinned once: the pages on the path to it
/// stay until `release`. A PrefixRef owns a place.
///
/// Owns: the pool, the tree and the parts of the columns. Lists all PageRefs and PrefixRefs on its
/// pages.
/// Invariant: a page is free, taken, or in the tree. Searches find only pages in the tree.
/// Memory: a method that cannot get memory throws std::bad_alloc and changes nothing. The noexcept
/// methods need no memory, so the pages and places of a failed call can always be given up. Giving
/// up a page or place that the caller does not have ends the program.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: that of the methods of the pool and the tree.
class Level : public Residency, private ForgottenListener {
   public:
    struct Size {
        std::int64_t num_pages = 0;
        std::int64_t num_slots = 0;    // of states
        BlockId first_page = 0;        // the lowest id of a page
        std::int64_t num_columns = 0;  // with groups; otherwise a column is a page
    };

    BlockPool pool;
    PrefixTree tree;
    const bool keeps_by_priority = tree.policy().interest().retention;
    std::unique_ptr<PageOwners> owners;     // nullptr without quotas
    std::unique_ptr<LateReads> late_reads;  // nullptr before the first late read
    std::unique_ptr<RecordKeys> keys;       // nullptr without stores below this level
    RefList<PageRef> page_refs;
    RefList<PrefixRef> prefix_refs;

    /// Uses LRU unless a policy is given. Throws std::invalid_argument for sizes below 1.
    Level(const Grouping& grouping, const Size& size,
          std::unique_ptr<EvictionPolicy> policy = nullptr,
          const std::vector<TenantQuota>& quotas = {})
        : Residency(grouping),
          pool(grouping.is_plain() ? size.num_pages : size.num_columns,
               grouping.is_plain() ? size.first_page : 0),
          tree(grouping.column_tokens(), wrap(std::move(policy), size.num_slots)) {
        make_columns(size.num_pages, size.first_page, pool, tree);
        if (!quotas.empty()) watch_owners(quotas);
        make_states(size.num_slots, pool, owners.get());
        tree.set_forgotten_listener(this);
    }

    // ---- count

    /// The pool of page ids: `pool`, or the pool of the columns' pages.
    [[nodiscard]] const BlockPool& page_pool() const noexcept {
        return columns == nullptr ? pool : columns->pages();
    }
    [[nodiscard]] std::int64_t num_pages() const noexcept { return page_pool().num_blocks(); }
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return columns == nullptr ? pool.num_free() + num_set_aside() : columns->pages().num_free();
    }
    /// Pages in the tree.
    [[nodiscard]] std::int64_t num_cached() const noexcept {
        return columns == nullptr ? tree.num_cached() : columns->num_cached();
    }
    /// Pages that eviction would free.
    [[nodiscard]] std::int64_t num_evictable() const noexcept {
        return columns == nullptr ? tree.num_evictable() : columns->num_evictable();
    }
    /// Free pages, and pages that eviction would free.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return num_free() + num_evictable();
    }
    /// Columns that are free, or that eviction would free.
    [[nodiscard]] std::int64_t num_available_columns() const noexcept {
        return pool.num_free() + tree.num_evictable();
    }
    /// Pages that were evicted to make room since the last `reset_level_counts`, in all and by
    /// reason.
    [[nodiscard]] std::int64_t num_evicted() const noexcept { return num_evicted_; }
    [[nodiscard]] EvictionCounts evicted() const noexcept {
        EvictionCounts sum = evicted_;
        return sum += evicted_parts();
    }
    void reset_level_counts() noexcept {
        num_evicted_ = 0;
        evicted_ = {};
        reset_part_counts();
        if (owners != nullptr) owners->reset_tallies();
    }

    // ---- find

    /// The longest cached prefix in whole pages; no node and depth 0 for an unknown namespace.
    [[nodiscard]] TreePosition find(std::string_view name_space, const TokenId* tokens,
                                    std::int64_t n) const noexcept {
        TreeNode* root = tree.find_namespace(name_space);
        return root == nullptr ? TreePosition{} : tree.match(root, tokens, n).at;
    }
    /// Holds the checkpoint at the end of a prefix if it is ready; otherwise returns an empty hold.
    [[nodiscard]] StateHold hold_state(TreePosition at) noexcept {
        return hold_checkpoint(tree, at);
    }
    /// As above, for a row of `n` tokens with this committed prefix.
    [[nodiscard]] StateHold hold_state(TreePosition committed, std::int64_t n) noexcept {
        const std::int64_t whole = n / tree.page_size();
        if (n % tree.page_size() != 0 || whole > committed.depth) return {};
        return hold_state({committed.node, static_cast<std::int32_t>(whole)});
    }

    // ---- hold

    /// Returns a place at the start of a namespace, or at a position.
    [[nodiscard]] TreeNode* open(std::string_view name_space);
    [[nodiscard]] TreeNode* hold(TreePosition at);
    /// Gives up a place, which counts as a use of its pages.
    void release(TreeNode* place) noexcept;
    /// Moves a place forward over cached pages that continue it by `tokens` [n].
    [[nodiscard]] TreeNode* advance(TreeNode* place, const TokenId* tokens, std::int64_t n);

    // ---- refs: what transfers and callers keep beside the requests. O(refs) each

    /// Call this before the tree forgets its unused pages, because a ref does not count as a use.
    /// Afterwards a ref has a pin only on pages that another pin protects. The other pages leave
    /// the tree, and the refs that read them keep them by references. Places end.
    void detach_refs() noexcept;
    /// Ends the places that the tree has forgotten.
    void drop_forgotten_refs() noexcept;
    /// The tree now has a column, as the last column on the path to `at`: refs on the column become
    /// pins.
    void move_refs_to_tree(BlockId column, TreePosition at) noexcept;
    /// Pages moved from one column to another column: the refs on these pages follow them. See
    /// PageRef::follow.
    void move_refs(BlockId from, BlockId to, TreePosition at) noexcept;

    // ---- take and put

    /// Takes up to `n` pages, or columns: free pages first, and after them the least valuable pages
    /// without a holder. Writes their ids to `out` [n]. Returns the number of taken pages.
    [[nodiscard]] std::int64_t take(std::int64_t n, BlockId* out) noexcept;
    /// Puts taken pages [n] into the tree after a place, with this `retention`, and moves the place
    /// to their end. Pages whose tokens were cached meanwhile stay taken, and `duplicates` lists
    /// them. Throws InvalidHandleError for a page that is not taken.
    [[nodiscard]] TreeNode* put(TreeNode* place, const TokenId* tokens, const BlockId* ids,
                                std::int32_t n, std::vector<DuplicatePage>& duplicates,
                                const Retention& retention);
    /// Frees taken pages [n] that were not put into the tree.
    void give_back(const BlockId* ids, std::int64_t n) noexcept { pool.free(ids, n); }

    // ---- evict

    /// The two steps in which a call evicts the pages and columns that it needs in addition to free
    /// ones, before it changes anything else. `prepare_room` throws IntegrityError if they are not
    /// available, and std::bad_alloc; in both cases nothing has changed. `make_room` throws
    /// IntegrityError if the eviction policy does not name enough victims; in that case cached
    /// pages are evicted, but nothing else has changed.
    void prepare_room(const PageNeed& need) {
        if (has_room(need)) return;
        detail::require_law(can_have(need), kAdmitted);
        if (columns != nullptr) return;
        end_room();
        set_aside_.reserve(static_cast<std::size_t>(need.pages - pool.num_free()));
    }
    void make_room(const PageNeed& need, EvictionGuard guard = {}) {
        end_room();
        if (has_room(need)) return;
        if (columns == nullptr) return set_aside(need.pages - pool.num_free(), guard);
        num_evicted_ += columns->make_room(need.pages, need.columns, guard);
        detail::require_law(has_room(need), kAdmitted);
    }
    /// Frees pages that were evicted for the call but not taken.
    void end_room() noexcept {
        if (set_aside_.empty()) return;
        std::reverse(set_aside_.begin(), set_aside_.end());  // the first victim is reused first
        pool.free(set_aside_.data(), num_set_aside());
        set_aside_.clear();
        num_taken_ = 0;
    }
    /// Throws IntegrityError unless `take_pages` can take `n` pages.
    void require_pages(std::int64_t n) const {
        detail::require_law(n <= pool.num_free() + num_set_aside(), kAdmitted);
    }
    /// Takes free pages first, and after them pages that `make_room` evicted, without a detour
    /// through the pool. The caller must call `require_pages` before. With groups, this takes only
    /// the ids of columns.
    void take_pages(std::int64_t n, BlockId* out) noexcept {
        const std::int64_t free = std::min(n, pool.num_free());
        static_cast<void>(pool.allocate(free, out));
        if (free != n) {
            std::copy_n(set_aside_.begin() + static_cast<std::ptrdiff_t>(num_taken_), n - free,
                        out + free);
            num_taken_ += static_cast<std::size_t>(n - free);
        }
        note_taken(out, n);
    }
    /// Records that ids of the pool have a new owner.
    void note_taken(const BlockId* ids, std::int64_t n) noexcept {
        if (columns != nullptr) return;  // ColumnPages reports its pages
        if (owners != nullptr) owners->take(ids, n);
        if (late_reads != nullptr) late_reads->take(ids, n);
    }
    /// Sets the owner of the pages that are taken from now on.
    void set_taker(Owner taker) noexcept {
        if (owners != nullptr) owners->set_taker(taker);
    }
    /// Throws std::bad_alloc.
    void make_late_reads() {
        if (late_reads != nullptr) return;
        late_reads = std::make_unique<LateReads>(page_pool().end_id());
        if (columns != nullptr) columns->set_late_reads(late_reads.get());
    }
    /// Evicts the next `n` pages.
    void evict(std::int64_t n, EvictionGuard guard) noexcept;
    /// As above, for columns: evicts the next column, or one window of a column.
    [[nodiscard]] bool evict_one(bool wants_pages, bool wants_column,
                                 EvictionGuard guard) noexcept {
        const std::int64_t free = num_free();
        const bool went = columns->evict_one(wants_pages, wants_column, guard);
        num_evicted_ += num_free() - free;
        return went;
    }
    /// Prepares `take` and the allocation of pages: returns true if this number of columns can be
    /// taken and, with groups, this number of pages is free. Evicts columns and windows for it.
    [[nodiscard]] bool make_room_to_take(std::int64_t pages, std::int64_t num_columns) noexcept {
        if (columns == nullptr) return num_available_columns() >= num_columns;
        num_evicted_ += columns->make_room(pages, num_columns, {});
        return has_room({pages, num_columns});
    }
    /// Evicts every page and checkpoint without a holder. The counts do not change.
    void evict_all() noexcept;
    /// Reports all held pages to the owners again: copies now hold pages that the tree held.
    void tell_held() noexcept;

    /// Throws IntegrityError unless each page is free, cached, or one of `in_flight` taken pages,
    /// and only the tree refers to a cached page. O(pages).
    void check_integrity(std::int64_t in_flight) const;

   private:
    static constexpr const char* kAdmitted = "reserve: admitted pages are there";

    [[nodiscard]] std::int64_t num_set_aside() const noexcept {
        return static_cast<std::int64_t>(set_aside_.size() - num_taken_);
    }
    [[nodiscard]] bool has_room(const PageNeed& need) const noexcept {
        if (columns == nullptr) return pool.num_free() >= need.pages;
        return columns->pages().num_free() >= need.pages && pool.num_free() >= need.columns;
    }
    [[nodiscard]] bool can_have(const PageNeed& need) const noexcept {
        if (columns == nullptr) return num_available() >= need.pages;
        return columns->num_available() >= need.pages && num_available_columns() >= need.columns;
    }
    // `prepare_room` reserved the memory for the ids.
    void set_aside(std::int64_t n, EvictionGuard guard) {
        set_aside_.resize(static_cast<std::size_t>(n));
        const std::int64_t gone = evict_from(tree, n, set_aside_.data(), guard, evicted_);
        num_evicted_ += gone;
        if (gone == n) return;
        set_aside_.resize(static_cast<std::size_t>(gone));
        end_room();
        detail::require_law(false, kAdmitted);
    }
    void watch_owners(const std::vector<TenantQuota>& quotas) {
        owners = std::make_unique<PageOwners>(page_pool(), quotas);
        if (columns != nullptr) {
            columns->set_owners(owners.get());
            tree.set_protection_listener(columns.get());
        } else {
            pool.set_listener(owners.get());
            tree.set_protection_listener(owners.get());
        }
    }
    // ForgottenListener
    void left(const BlockId* ids, std::int32_t n) noexcept override {
        disown(ids, n);
        if (keys != nullptr) keys->forget(ids, n);
    }
    void let_go(const BlockId* ids, std::int32_t n) noexcept override { pool.free(ids, n); }

    std::vector<BlockId> set_aside_;  // evicted for the current call, in order of use
    std::size_t num_taken_ = 0;       // of set_aside_
    EvictionCounts evicted_;          // pages that the policy chose
    std::int64_t num_evicted_ = 0;
};

// ---- the two levels of a replica ----------------------------------------------------------------

/// The level of a replica's device, and the level of its host tier.
///
/// Owns: both levels, and the replica's counters.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: that of the methods of Level.
struct Replica : Level {
    /// Uses LRU unless a policy is given.
    Replica(const CacheConfig& config, const Grouping& grouping,
            std::unique_ptr<EvictionPolicy> policy = nullptr)
        : Level(grouping,
                {config.num_pages, config.num_state_slots, config.first_page,
                 count_columns(config, grouping, config.num_pages)},
                std::move(policy), config.quotas) {
        if (config.host_pages > 0) make_host(config, grouping);
    }

    std::unique_ptr<Level> host;     // nullptr without a host tier
    std::int64_t num_sequences = 0;  // claimed
    Metrics metrics;

    /// Calls visit(level) for the device's level, and for the host tier's level if it exists.
    template <class Visit>
    void for_each_level(const Visit& visit) {
        visit(static_cast<Level&>(*this));
        if (host != nullptr) visit(*host);
    }
    /// The longest prefix that the host tier has: see `find`. No node without a host tier.
    [[nodiscard]] TreePosition find_stored(std::string_view name_space, const TokenId* tokens,
                                           std::int64_t n) const noexcept {
        return host == nullptr ? TreePosition{} : host->find(name_space, tokens, n);
    }
    /// Holds the checkpoint at the end of a prefix in the host tier if it is ready; otherwise
    /// returns an empty hold.
    [[nodiscard]] StateHold hold_stored_state(TreePosition below) noexcept {
        return host == nullptr ? StateHold() : host->hold_state(below);
    }
    /// A sequence with a hit of `n` tokens is removed: records where the hit ended, unless the
    /// sequence was cut to fewer committed tokens.
    void note_hit(TreePosition committed, std::int64_t n) noexcept {
        const std::int64_t whole = n / tree.page_size();
        if (!stores_states() || whole == 0 || whole > committed.depth) return;
        unreachable().note_hit({committed.node, static_cast<std::int32_t>(whole)});
    }
    /// True if the host tier keeps checkpoints.
    [[nodiscard]] bool stores_states() const noexcept {
        return host != nullptr && host->states != nullptr;
    }
    /// True if pages of the host tier are written to lower stores.
    [[nodiscard]] bool has_stores() const noexcept {
        return host != nullptr && host->keys != nullptr;
    }
    /// Pages that the host tier holds.
    [[nodiscard]] std::int64_t num_stored() const noexcept {
        return host == nullptr ? 0 : host->num_cached();
    }
    /// The counters, including the counters of both levels.
    [[nodiscard]] Metrics counted() const noexcept {
        Metrics sum = metrics;
        sum.evicted_pages += num_evicted();
        sum.evicted += evicted();
        if (host != nullptr) sum.host_evicted += host->evicted();
        return sum;
    }
    void reset_counts() noexcept {
        metrics = {};
        reset_level_counts();
        if (host != nullptr) host->reset_level_counts();
        note_peak();
    }
    /// Updates the peak of used pages. Counts evictable pages only if the peak may change.
    void note_peak() noexcept {
        std::int64_t& peak = metrics.peak_used_pages;
        const std::int64_t not_free = num_pages() - num_free();
        if (not_free > peak) peak = std::max(peak, not_free - num_evictable());
    }
    /// All zeros without states.
    [[nodiscard]] StateStats state_stats() const noexcept {
        if (states == nullptr) return {};
        StateStats stats = states->stats();
        if (!stores_states()) return stats;
        const StateStats below = host->states->stats();
        stats.host_slots = below.total_slots;
        stats.host_checkpoints = below.checkpoints;
        stats.stored_checkpoints = below.checkpoints_made;
        stats.loaded_checkpoints = below.checkpoint_hits;
        return stats;
    }

   private:
    [[nodiscard]] static std::int64_t count_columns(const CacheConfig& config,
                                                    const Grouping& grouping,
                                                    std::int64_t num_pages) noexcept {
        return grouping.most_columns(num_pages, config.max_sequences, config.max_seq_len);
    }
    void make_host(const CacheConfig& config, const Grouping& grouping) {
        host =
            std::make_unique<Level>(grouping,
                                    Level::Size{config.host_pages, config.num_host_state_slots, 0,
                                                count_columns(config, grouping, config.host_pages)},
                                    make_policy(config.host_eviction, config.page_size));
        if (config.has_stores) host->keys = std::make_unique<RecordKeys>(host->pool.num_blocks());
        if (config.num_host_state_slots > 0) unreachable().assume_tier();
    }
};

// ---- hits that both levels serve together, with groups of layers or states ----------------------

/// The longest prefix that a claim can take from the cache: whole pages of the tree and, after
/// them, either a page whose start is copied or pages of the host tier. The host tier also has
/// window pages that columns of the tree miss, or the checkpoint at the end. No group reads pages
/// that are in neither tier.
struct FoundHit {
    PrefixMatch match;
    TreePosition below;       // in the host tier; no node: no page of the tier is needed
    std::int64_t tokens = 0;  // of the whole hit; 0: not longer than the claim's hit
    // With states: whole pages continued up to this token without a checkpoint; -1: not searched.
    std::int64_t branch = -1;
    std::int64_t wanted = 0;  // whole pages that were searched for
    // With windows or states: whole pages that the device or the host tier has, even if no hit can
    // end there.
    std::int32_t seen = 0;

    [[nodiscard]] bool is_taken() const noexcept { return tokens > 0; }
    /// True if the hit takes over pages of the tree.
    [[nodiscard]] bool shares() const noexcept { return is_taken() && match.at.node != nullptr; }
    [[nodiscard]] bool is_partial() const noexcept { return match.partial_tokens > 0; }
    /// True if only the host tier has the end of the hit.
    [[nodiscard]] bool ends_below() const noexcept { return below.depth > match.at.depth; }
    /// Takes no page; `branch`, `wanted` and `seen` stay.
    void drop() noexcept {
        match = {};
        below = {};
        tokens = 0;
    }
};

namespace tiered {

static_assert(Grouping::kMaxWindows < 8, "a window has a bit");

[[nodiscard]] inline bool has_window(std::uint8_t windows, std::size_t window) noexcept {
    return (windows >> window & 1) != 0;
}

}  // namespace tiered

/// A column of the device's tree that gets window pages from the host tier. Another column (the
/// bringer) has them until they arrive.
struct Patch {
    std::int32_t index = 0;    // of the column in the row
    std::uint8_t windows = 0;  // a bit for each
    BlockId bringer = -1;

    [[nodiscard]] bool has(std::size_t window) const noexcept {
        return tiered::has_window(windows, window);
    }
};

namespace tiered {

/// The longest prefix, in columns, that the device and the tier can serve together to every group:
/// full groups need each column, windows the columns that they read, and states a checkpoint at the
/// end. O(columns after it + windows).
[[nodiscard]] std::int32_t longest_hit(const Replica& home, TreePosition at,
                                       TreePosition below) noexcept;
/// Columns of a prompt that the device or the tier has. Also for replicas without groups.
[[nodiscard]] std::int64_t count_columns(const Replica& home, std::string_view name_space,
                                         const TokenId* tokens, std::int64_t n) noexcept;

/// Pages of a column in these windows, a bit each.
[[nodiscard]] inline std::int64_t count_pages(const Grouping& grouping,
                                              std::uint8_t windows) noexcept {
    std::int64_t pages = 0;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        if (has_window(windows, w)) pages += grouping.windows()[w].num_lanes;
    }
    return pages;
}

/// Calls visit(patch), from the end, for each column on the path to `at` that misses pages which a
/// hit of `tokens` tokens reads. O(columns that windows read).
template <class Visit>
void for_each_patch(const Replica& home, TreePosition at, std::int64_t tokens, const Visit& visit) {
    const Grouping& grouping = home.grouping();
    std::array<std::int32_t, Grouping::kMaxWindows> first{};
    std::int32_t lowest = at.depth;
    for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
        first[w] = grouping.first_column(grouping.windows()[w], tokens);
        lowest = std::min(lowest, first[w]);
    }
    if (lowest == at.depth) return;
    Patch patch{at.depth, 0, -1};
    home.columns->for_each_column(at, lowest, [&](BlockId column) {
        --patch.index;
        patch.windows = 0;
        for (std::size_t w = 0; w < grouping.windows().size(); ++w) {
            const bool is_missed = patch.index >= first[w] && !home.columns->has(column, w);
            if (is_missed) patch.windows |= static_cast<std::uint8_t>(1U << w);
        }
        if (patch.windows != 0) visit(patch);
    });
}

}  // namespace tiered
}  // namespace kvcore
