// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "layers/recurrent_slots.hpp"
#include "level/forgotten_pages.hpp"
#include "level/record_keys.hpp"
#include "level/tier_index.hpp"
#include "pages/late_reads.hpp"
#include "pages/page_owners.hpp"
#include "tree/policies/lru.hpp"

namespace kvcore {

/// Pages that a call is about to take from a replica, and columns where there are groups.
struct PageNeed {
    std::int64_t pages = 0;
    std::int64_t columns = 0;
};

/// The pages of one replica, free or cached, on the device and in the host tier.
///
/// If not all layers keep every token, `pool` and `tree` contain columns, which have pages of each
/// bundle (ColumnPages); otherwise a column is a page.
///
/// Owns: the pool, the tree, the columns' pages, the tier's index if there is a host tier, and the
/// replica's counters.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: that of the methods of the pool and the tree.
struct Replica {
    /// Uses LRU unless a policy is given.
    Replica(const CacheConfig& config, const Grouping& grouping,
            std::unique_ptr<EvictionPolicy> policy = nullptr)
        : pool(grouping.is_plain() ? config.num_pages
                                   : grouping.most_columns(config.num_pages, config.max_sequences,
                                                           config.max_seq_len),
               grouping.is_plain() ? config.first_page : 0),
          tree(config.page_size, with_groups(config, grouping, std::move(policy))) {
        if (!grouping.is_plain()) {
            columns = std::make_unique<ColumnPages>(grouping, config.num_pages, config.first_page,
                                                    pool, tree, *policy_);
        }
        if (!config.quotas.empty()) watch_owners(config);
        if (!config.states.empty()) watch_states(config);
        narrows_hits_ = columns != nullptr || states != nullptr;
        if (config.host_pages > 0) make_host(config, grouping);
        forgotten_.watch(tree, pool, columns.get(), states.get(), nullptr);
        if (host == nullptr) return;
        host_forgotten_.watch(host->tree(), host->pool(), host_columns.get(), host_states.get(),
                              record_keys.get());
    }

   private:
    ForgottenPages forgotten_;  // outlive the trees
    ForgottenPages host_forgotten_;
    WindowPolicy* policy_ = nullptr;       // of the tree, with columns or states
    WindowPolicy* host_policy_ = nullptr;  // of the host tier's tree
    bool narrows_hits_ = false;
    std::vector<BlockId> set_aside_;  // evicted for the current call, in order of use
    std::size_t num_taken_ = 0;       // of set_aside_

   public:
    BlockPool pool;
    PrefixTree tree;
    const bool keeps_by_priority = tree.policy().interest().retention;
    std::unique_ptr<ColumnPages> columns;    // nullptr if a column is a page
    std::unique_ptr<PageOwners> owners;      // nullptr without quotas
    std::unique_ptr<LateReads> late_reads;   // nullptr before the first late read
    std::unique_ptr<RecurrentSlots> states;  // nullptr without layers that keep a state
    std::int64_t num_sequences = 0;          // claimed
    Metrics metrics;
    std::unique_ptr<TierIndex> host;  // nullptr without a host tier
    // The stored columns: a record for each run of tokens, with pages of the tier. nullptr if a
    // column is a page.
    std::unique_ptr<ColumnPages> host_columns;
    std::unique_ptr<RecurrentSlots> host_states;  // checkpoints of the records, or nullptr
    std::unique_ptr<RecordKeys> record_keys;      // nullptr without lower stores

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
    /// True if a hit may be shorter than the prefix that the tree has.
    [[nodiscard]] bool narrows_hits() const noexcept { return narrows_hits_; }
    /// The longest prefix of `at` that all groups can serve, in columns: windows and states shorten
    /// it in turn until the length stays the same.
    [[nodiscard]] std::int32_t longest_hit(TreePosition at) const noexcept {
        std::int32_t before = 0;
        do {
            before = at.depth;
            if (columns != nullptr) at.depth = columns->longest_hit(at);
            if (states != nullptr) at.depth = states->longest_hit(at, tree.page_size());
        } while (columns != nullptr && states != nullptr && at.depth != before);
        return at.depth;
    }
    /// Holds the checkpoint at the end of a prefix if it is ready; otherwise returns an empty hold.
    [[nodiscard]] StateHold hold_state(TreePosition at) noexcept {
        return hold_state(states.get(), tree, at);
    }
    /// As above, for a row of `n` tokens with this committed prefix.
    [[nodiscard]] StateHold hold_state(TreePosition committed, std::int64_t n) noexcept {
        const std::int64_t columns = n / tree.page_size();
        if (n % tree.page_size() != 0 || columns > committed.depth) return {};
        return hold_state({committed.node, static_cast<std::int32_t>(columns)});
    }
    /// As above, for the host tier.
    [[nodiscard]] StateHold hold_stored_state(TreePosition below) noexcept {
        return host_states == nullptr ? StateHold()
                                      : hold_state(host_states.get(), host->tree(), below);
    }
    /// A sequence with a hit of `n` tokens is removed: records where the hit ended, unless the
    /// sequence was cut to fewer committed tokens.
    void note_hit(TreePosition committed, std::int64_t n) noexcept {
        const std::int64_t columns = n / tree.page_size();
        if (host_states == nullptr || columns == 0 || columns > committed.depth) return;
        policy_->unreachable().note_hit({committed.node, static_cast<std::int32_t>(columns)});
    }
    [[nodiscard]] static BlockId last_column(const PrefixTree& tree, TreePosition at) noexcept {
        BlockId column = 0;
        tree.copy_pages(at, at.depth - 1, &column);
        return column;
    }
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
        metrics.evicted_pages += columns->make_room(need.pages, need.columns, guard);
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
        if (columns == nullptr) note_taken(out, n);
    }
    /// Records that pages of the pool have a new owner. Only if a column is a page.
    void note_taken(const BlockId* pages, std::int64_t n) noexcept {
        if (owners != nullptr) owners->take(pages, n);
        if (late_reads != nullptr) late_reads->take(pages, n);
    }
    /// Throws std::bad_alloc.
    void make_late_reads() {
        if (late_reads != nullptr) return;
        late_reads = std::make_unique<LateReads>(page_pool().end_id());
        if (columns != nullptr) columns->set_late_reads(late_reads.get());
    }
    /// Evicts the next `n` pages.
    void evict(std::int64_t n, EvictionGuard guard) noexcept {
        std::array<BlockId, 256> evicted;
        while (n > 0) {
            const auto most = std::min(n, static_cast<std::int64_t>(evicted.size()));
            const std::int64_t taken = tree.evict(most, evicted.data(), guard);
            std::reverse(evicted.begin(), evicted.begin() + taken);  // first victim is reused first
            pool.free(evicted.data(), taken);
            metrics.evicted_pages += taken;
            metrics.evicted.policy += taken;
            n = taken == most ? n - taken : 0;
        }
    }
    /// As above, for columns: evicts the next column, or one window of a column.
    [[nodiscard]] bool evict_one(bool wants_pages, bool wants_column,
                                 EvictionGuard guard) noexcept {
        const std::int64_t free = num_free();
        const bool went = columns->evict_one(wants_pages, wants_column, guard);
        metrics.evicted_pages += num_free() - free;
        return went;
    }
    /// The counters, including the counters of the parts.
    [[nodiscard]] Metrics counted() const noexcept {
        Metrics sum = metrics;
        if (columns != nullptr) sum.evicted += columns->evicted();
        if (states != nullptr) sum.evicted += states->evicted();
        if (host_columns != nullptr) sum.host_evicted += host_columns->evicted();
        if (host_states != nullptr) sum.host_evicted += host_states->evicted();
        return sum;
    }
    /// Updates the peak of used pages. Counts evictable pages only if the peak may change.
    void note_peak() noexcept {
        std::int64_t& peak = metrics.peak_used_pages;
        const std::int64_t not_free = num_pages() - num_free();
        if (not_free > peak) peak = std::max(peak, not_free - num_evictable());
    }

    /// Takes pages of the host tier, or records: see TierIndex::take.
    [[nodiscard]] std::int64_t take_stored(std::int64_t n, BlockId* out) noexcept {
        const std::int64_t free = std::min(n, host->pool().num_free());
        std::int64_t taken = host->take(host_states == nullptr ? n : free, out);
        if (host_columns == nullptr) metrics.host_evicted.policy += taken - free;
        if (host_states != nullptr) {
            taken += host_states->evict(n - taken, out + taken, host->tree(), *host_policy_);
        }
        if (record_keys != nullptr) record_keys->forget(out, taken);
        return taken;
    }
    /// Pages that the host tier holds.
    [[nodiscard]] std::int64_t num_stored() const noexcept {
        if (host == nullptr) return 0;
        return host_columns == nullptr ? host->num_stored() : host_columns->num_cached();
    }
    /// All zeros without states.
    [[nodiscard]] StateStats state_stats() const noexcept {
        if (states == nullptr) return {};
        StateStats stats = states->stats();
        if (host_states == nullptr) return stats;
        const StateStats below = host_states->stats();
        stats.host_slots = below.total_slots;
        stats.host_checkpoints = below.checkpoints;
        stats.stored_checkpoints = below.checkpoints_made;
        stats.loaded_checkpoints = below.checkpoint_hits;
        return stats;
    }

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
        return columns->num_available() >= need.pages &&
               pool.num_free() + tree.num_evictable() >= need.columns;
    }
    // `prepare_room` reserved the memory for the ids.
    void set_aside(std::int64_t n, EvictionGuard guard) {
        set_aside_.resize(static_cast<std::size_t>(n));
        const std::int64_t evicted = states == nullptr
                                         ? tree.evict(n, set_aside_.data(), guard)
                                         : states->evict(n, set_aside_.data(), tree, *policy_);
        metrics.evicted_pages += evicted;
        if (states == nullptr) metrics.evicted.policy += evicted;
        if (evicted == n) return;
        set_aside_.resize(static_cast<std::size_t>(evicted));
        end_room();
        detail::require_law(false, kAdmitted);
    }
    [[nodiscard]] static StateHold hold_state(RecurrentSlots* states, const PrefixTree& tree,
                                              TreePosition at) noexcept {
        if (states == nullptr || at.depth == 0) return {};
        const BlockId column = last_column(tree, at);
        return states->has(column) ? StateHold(*states, states->find(column)) : StateHold();
    }
    void watch_owners(const CacheConfig& config) {
        owners = std::make_unique<PageOwners>(page_pool(), config.quotas);
        if (columns != nullptr) {
            columns->set_owners(owners.get());
            tree.set_protection_listener(columns.get());
        } else {
            pool.set_listener(owners.get());
            tree.set_protection_listener(owners.get());
        }
    }
    // Freed columns already have a listener: RecurrentSlots calls it next.
    void watch_states(const CacheConfig& config) {
        PoolListener* next = columns.get();
        if (next == nullptr) next = owners.get();
        states = std::make_unique<RecurrentSlots>(config.num_state_slots, pool,
                                                  policy_->unreachable(), next);
        if (columns != nullptr) columns->need_checkpoints();
    }
    void make_host(const CacheConfig& config, const Grouping& grouping) {
        std::unique_ptr<EvictionPolicy> policy =
            make_policy(config.host_eviction, config.page_size);
        if (!grouping.is_plain() || config.num_host_state_slots > 0) {
            policy = wrap(std::move(policy), config.num_host_state_slots, host_policy_);
        }
        const std::int64_t num_records =
            grouping.is_plain() ? config.host_pages
                                : grouping.most_columns(config.host_pages, config.max_sequences,
                                                        config.max_seq_len);
        host = std::make_unique<TierIndex>(num_records, config.page_size, std::move(policy));
        if (!grouping.is_plain()) {
            host_columns = std::make_unique<ColumnPages>(grouping, config.host_pages, 0,
                                                         host->pool(), host->tree(), *host_policy_);
        }
        if (config.has_stores) record_keys = std::make_unique<RecordKeys>(host->num_pages());
        if (config.num_host_state_slots == 0) return;
        host_states =
            std::make_unique<RecurrentSlots>(config.num_host_state_slots, host->pool(),
                                             host_policy_->unreachable(), host_columns.get());
        if (host_columns != nullptr) host_columns->need_checkpoints();
        policy_->unreachable().assume_tier();
    }
    // Columns and kept windows have one order of eviction. Pages that no checkpoint makes useful
    // are evicted before both.
    [[nodiscard]] std::unique_ptr<EvictionPolicy> with_groups(
        const CacheConfig& config, const Grouping& grouping,
        std::unique_ptr<EvictionPolicy> policy) {
        if (grouping.is_plain() && config.states.empty()) return policy;
        if (policy == nullptr) policy = std::make_unique<LruPolicy>();
        return wrap(std::move(policy), config.num_state_slots, policy_);
    }
    [[nodiscard]] static std::unique_ptr<EvictionPolicy> wrap(
        std::unique_ptr<EvictionPolicy> policy, std::int64_t num_slots, WindowPolicy*& made) {
        auto wrapped =
            std::make_unique<WindowPolicy>(std::move(policy), static_cast<std::size_t>(num_slots));
        made = wrapped.get();
        return wrapped;
    }
};

}  // namespace kvcore
