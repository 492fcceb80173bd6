// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "level/level.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

/// The counts of held pages per tenant after a call, computed before the call changes anything.
///
/// Owns: a copy of the counts. Threads: no locks of its own. Cost: O(tenants) to construct, O(1)
/// per page.
class QuotaTrial {
   public:
    /// `home` must have quotas.
    explicit QuotaTrial(const Replica& home)
        : owners_(*home.owners), available_(home.num_available()), counts_(owners_.counts()) {}
    /// Starts with these counts.
    QuotaTrial(const PageOwners& owners, std::int64_t available, HeldCounts counts)
        : owners_(owners), available_(available), counts_(std::move(counts)) {}

    /// The taker takes `n` pages.
    void take(Owner taker, std::int64_t n) noexcept {
        counts_.add(taker, n);
        available_ -= n;
    }
    /// An evictable page becomes held.
    void hold(BlockId page) noexcept { take(owners_.owner(page), 1); }
    /// Holds the pages of a hit, for several hits one after the other. Removes pages of earlier
    /// hits from `pages`; pages that are already held are not counted again. Throws std::bad_alloc.
    void hold_once(std::vector<BlockId>& pages);
    /// A held page becomes free.
    void give_back(BlockId page) noexcept { take(owners_.owner(page), -1); }
    /// A page that becomes held may count for the taker from now on: see HeldCounts.
    void share_out(BlockId page, Owner taker) noexcept {
        const Owner owner = owners_.owner(page);
        if (!counts_.is_for_taker(owner, taker, available_)) return;
        counts_.add(owner, -1);
        counts_.add(taker, 1);
    }
    [[nodiscard]] bool is_lawful() const noexcept { return counts_.is_lawful(available_); }
    /// The number of pages that the taker could have taken instead of `n` pages.
    [[nodiscard]] std::int64_t room(Owner taker, std::int64_t n) const noexcept;

   private:
    const PageOwners& owners_;
    std::int64_t available_;  // before counts_: reports recent pins
    HeldCounts counts_;
    std::set<BlockId> seen_;  // pages of earlier `hold_once` calls
};

/// The effects of quotas on the calls of a manager. Without quotas each hold is allowed.
namespace quotas {

/// Throws std::invalid_argument for invalid quotas.
void check(const CacheConfig& config);
/// Writes the evictable pages that a hit will hold to `pages`: of full groups, and of the windows
/// that the hit reads. Without quotas `pages` does not change.
void list_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages);
inline void find_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages) {
    if (home.owners != nullptr) list_idle(home, hit, pages);
}
/// These pages were evictable and are now held: they count for `taker` if their owners have no
/// room.
void share_out(Replica& home, const std::vector<BlockId>& pages, Owner taker) noexcept;
/// Shortens a hit, before it is allocated, to the pages that quotas allow; drops it if at most
/// `taken` tokens are left. Cuts runs where the hit ends, so that it holds no other pages. Throws
/// std::bad_alloc.
void shorten(Replica& home, FoundHit& hit, std::int64_t taken);
/// The longest part of a cached prefix that quotas allow to hold, in columns, with the windows that
/// a hit of the part reads; 0: no part.
[[nodiscard]] std::int32_t longest_held(const Replica& home, TreePosition at);
/// As above, for a hold on the windows of all columns from `first` on, as exports and stores have.
[[nodiscard]] std::int32_t longest_held(const Replica& home, TreePosition at, std::int32_t first);
/// True if quotas allow a hold on the whole prefix, and on the windows of its columns from `first`
/// on. Throws std::bad_alloc.
[[nodiscard]] bool may_hold(const Replica& home, TreePosition at, std::int32_t first);

}  // namespace quotas

}  // namespace kvcore
