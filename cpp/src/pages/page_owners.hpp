// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/types.hpp"
#include "pages/protection_listener.hpp"

namespace kvcore {

/// The owner that a page counts for: 0 for no tenant, else the number of its quota + 1.
using Owner = std::uint16_t;

/// The number of pages that each owner holds, and the limits of its quota.
///
/// Owns: a count per owner. Threads: not thread-safe. Cost: O(1) per verb, O(owners) to copy.
class HeldCounts {
   public:
    explicit HeldCounts(const std::vector<TenantQuota>& quotas);

    void add(Owner owner, std::int64_t n) noexcept {
        Share& share = shares_[owner];
        leave(share);
        share.held += n;
        enter(share);
    }
    [[nodiscard]] std::int64_t held(Owner owner) const noexcept { return shares_[owner].held; }
    [[nodiscard]] const TenantQuota& quota(Owner owner) const noexcept {
        return shares_[owner].quota;
    }
    [[nodiscard]] std::size_t num_owners() const noexcept { return shares_.size(); }
    /// The number of pages that are reserved, for all owners together.
    [[nodiscard]] std::int64_t num_reserved() const noexcept { return num_reserved_; }
    /// The number of pages that reservations lack, and that must stay available.
    [[nodiscard]] std::int64_t unfilled() const noexcept { return unfilled_; }
    /// Returns true if no owner is above its ceiling and available pages can fill all reservations.
    [[nodiscard]] bool is_lawful(std::int64_t available) const noexcept {
        return num_over_ == 0 && available >= unfilled_;
    }
    /// Returns true if a page that begins to be held counts for `taker` instead of its owner: the
    /// owner has no room, or the page would take from the taker's own reservation.
    [[nodiscard]] bool is_for_taker(Owner owner, Owner taker,
                                    std::int64_t available) const noexcept {
        const Share& share = shares_[owner];
        const Share& takes = shares_[taker];
        if (owner == taker) return false;
        if (share.held > share.quota.max_pages) return true;
        return available < unfilled_ && share.held > share.quota.reserved_pages &&
               takes.held < takes.quota.reserved_pages;
    }

   private:
    struct Share {
        TenantQuota quota;
        std::int64_t held = 0;
    };

    [[nodiscard]] static std::int64_t lacks(const Share& share) noexcept {
        const std::int64_t lacking = share.quota.reserved_pages - share.held;
        return lacking > 0 ? lacking : 0;
    }
    void leave(const Share& share) noexcept {
        unfilled_ -= lacks(share);
        num_over_ -= share.held > share.quota.max_pages ? 1 : 0;
    }
    void enter(const Share& share) noexcept {
        unfilled_ += lacks(share);
        num_over_ += share.held > share.quota.max_pages ? 1 : 0;
    }

    std::vector<Share> shares_;
    std::int64_t num_reserved_ = 0;
    std::int64_t unfilled_ = 0;
    std::int64_t num_over_ = 0;  // owners above their ceiling
};

/// Counts of the requests of an owner.
struct OwnerTally {
    std::int64_t refused = 0;  // reservations refused only because of a quota
    std::int64_t input_tokens = 0;
    std::int64_t cache_tokens = 0;
    std::int64_t generated_tokens = 0;
};

/// The owner of each page of a replica, and which pages are held: neither free nor evictable.
///
///     free  -- allocated: the taker's, held -->  a request's own
///       ^                                           | cached
///       |                                           v
///       +---- evicted -- cached, not held <-- cached, held
///
/// If a column is a page, the pool and the tree's protection report these changes; otherwise
/// ColumnPages reports them. Both report pins late (see Protection), so a caller asks for the
/// number of evictable pages before it reads counts. A page that the tree no longer protects stays
/// held as long as it has another reference. The pool reports when the last reference ends.
///
/// Owns: two bytes per page, a count per owner. Invariant: the count of an owner is the number of
/// its held pages. Threads: not thread-safe; CacheManager locks around it.
/// Cost: O(1) per page; no memory after construction.
class PageOwners final : public PoolListener, public ProtectionListener {
   public:
    /// The largest number of tenants.
    static constexpr std::size_t kMaxTenants = 0x7ffe;

    /// For the pages of a pool.
    PageOwners(const BlockPool& pool, const std::vector<TenantQuota>& quotas)
        : pool_(pool),
          states_(static_cast<std::size_t>(pool.end_id())),
          counts_(quotas),
          tallies_(quotas.size() + 1) {}

    [[nodiscard]] const HeldCounts& counts() const noexcept { return counts_; }
    [[nodiscard]] Owner owner(BlockId page) const noexcept {
        return static_cast<Owner>(state(page) & ~kHeld);
    }
    [[nodiscard]] bool is_held(BlockId page) const noexcept { return (state(page) & kHeld) != 0; }

    /// Sets the owner of the pages that are taken from now on.
    void set_taker(Owner taker) noexcept { taker_ = taker; }
    /// Pages [n] were taken from the pool, or evicted for a request.
    void take(const BlockId* pages, std::int64_t n) noexcept {
        let_go(pages, n);
        for (std::int64_t i = 0; i < n; ++i) {
            states_[static_cast<std::size_t>(pages[i])] = static_cast<Owner>(taker_ | kHeld);
        }
        counts_.add(taker_, n);
    }
    /// Marks pages [n] as held, or as not held. Pages that have this mark already do not change.
    void hold(const BlockId* pages, std::int64_t n) noexcept;
    void let_go(const BlockId* pages, std::int64_t n) noexcept;
    /// Gives a page that was evictable to the taker if its owner has no room: see HeldCounts.
    void share_out(BlockId page, Owner taker, std::int64_t available) noexcept {
        if (!is_held(page) || !counts_.is_for_taker(owner(page), taker, available)) return;
        give(&page, 1, taker);
    }
    /// Makes pages [n] count for another owner from now on.
    void give(const BlockId* pages, std::int64_t n, Owner owner) noexcept;

    /// The counts of that owner's requests.
    [[nodiscard]] OwnerTally& tally(Owner owner) noexcept { return tallies_[owner]; }
    void reset_tallies() noexcept { tallies_.assign(tallies_.size(), {}); }

    void freed(const BlockId* pages, std::int64_t n) noexcept override { let_go(pages, n); }
    void protect(const BlockId* pages, std::int32_t n, bool is_protected) noexcept override {
        if (is_protected) return hold(pages, n);
        for (std::int32_t i = 0; i < n; ++i) {
            if (pool_.ref_count(pages[i]) <= 1) let_go(pages + i, 1);
        }
    }

    /// Throws IntegrityError unless the counts match the pages.
    void check_integrity() const;

   private:
    static constexpr Owner kHeld = 0x8000;

    [[nodiscard]] Owner state(BlockId page) const noexcept {
        return states_[static_cast<std::size_t>(page)];
    }

    const BlockPool& pool_;
    std::vector<Owner> states_;  // each page's owner, with a bit if it is held
    HeldCounts counts_;
    std::vector<OwnerTally> tallies_;
    Owner taker_ = 0;
};

}  // namespace kvcore
