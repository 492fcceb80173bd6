// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "level/hit.hpp"
#include "level/replica.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

/// What a call would make of the pages that tenants hold, before it does anything.
///
/// Owns: a copy of the counts. Threads: none of its own. Cost: O(tenants) to make, O(1) per page.
class QuotaTrial {
   public:
    /// `home` has quotas.
    explicit QuotaTrial(const Replica& home)
        : owners_(*home.owners), available_(home.num_available()), counts_(owners_.counts()) {}
    /// Begins with these counts.
    QuotaTrial(const PageOwners& owners, std::int64_t available, HeldCounts counts)
        : owners_(owners), available_(available), counts_(std::move(counts)) {}

    /// So many pages are taken.
    void take(Owner taker, std::int64_t n) noexcept {
        counts_.add(taker, n);
        available_ -= n;
    }
    /// A page that is evictable is held.
    void hold(BlockId page) noexcept { take(owners_.owner(page), 1); }
    /// The pages of several hits, of which those are held already that they take over whole. Pages
    /// of a hit before are no more in the list of this one. Throws std::bad_alloc.
    void hold_once(std::vector<BlockId>& pages);
    /// A page that is held is free.
    void give_back(BlockId page) noexcept { take(owners_.owner(page), -1); }
    /// The owner of a page that begins to be held may be the taker from now on: see HeldCounts.
    void share_out(BlockId page, Owner taker) noexcept {
        const Owner owner = owners_.owner(page);
        if (!counts_.is_for_taker(owner, taker, available_)) return;
        counts_.add(owner, -1);
        counts_.add(taker, 1);
    }
    [[nodiscard]] bool is_lawful() const noexcept { return counts_.is_lawful(available_); }
    /// Pages that the taker could have in place of `n` that it took.
    [[nodiscard]] std::int64_t room(Owner taker, std::int64_t n) const noexcept;

   private:
    const PageOwners& owners_;
    std::int64_t available_;  // asked first: that tells of pins since
    HeldCounts counts_;
    std::set<BlockId> seen_;  // by hold_once
};

/// What the quotas of tenants mean for the verbs of a manager. None is asked without quotas.
namespace quotas {

/// Throws std::invalid_argument for quotas that cannot be.
void check(const CacheConfig& config);
/// Evictable pages that a hit will hold go to `pages`, each with those it is read with.
void find_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages);
/// Pages [n] that were evictable are held now, by `taker` where their owners have no room.
void share_out(Replica& home, const std::vector<BlockId>& pages, Owner taker) noexcept;
/// A hit of more than `taken` tokens, cut to what may be held before it is allocated; runs end
/// where it does, so that no more is held. Throws std::bad_alloc.
void shorten(Replica& home, FoundHit& hit, std::int64_t taken);
/// The longest part of a cached prefix that may be held for its own sake, in columns; 0: none. With
/// the windows that a hit of it reads.
[[nodiscard]] std::int32_t longest_held(const Replica& home, TreePosition at);
/// The same for a hold on the windows of all columns from `first` on: exports and stores hold
/// these.
[[nodiscard]] std::int32_t longest_held(const Replica& home, TreePosition at, std::int32_t first);
/// Quotas allow a hold on all of the prefix, and on the windows of its columns from `first` on.
/// Throws std::bad_alloc.
[[nodiscard]] bool may_hold(const Replica& home, TreePosition at, std::int32_t first);

}  // namespace quotas

}  // namespace kvcore
