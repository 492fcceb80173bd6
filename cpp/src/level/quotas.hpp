// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "cache/admission.hpp"
#include "kvcore/cache_types.hpp"
#include "level/replica.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

struct ManagerState;

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

/// Pages that a commit finds in the tree already, of which nobody held any: they are held from then
/// on. Where they take the place of a row's own pages, those are free, and quotas can be kept;
/// where both stay, there may be no room for them.
///
/// Owns: their ids, in memory kept from call to call. Threads: none of its own. Cost: O(pages).
class OwnedCommit {
   public:
    /// Columns `first` .. known.depth - 1 of a row are cached on the way to `known`. False where
    /// they must not be committed now. Throws std::bad_alloc, and has changed nothing.
    [[nodiscard]] bool begin(const ManagerState& state, const Sequence& sequence,
                             SequenceHandle handle, TreePosition known, std::int32_t first);
    /// They are committed.
    void end() noexcept;

   private:
    void add(BlockId cached, BlockId own);

    Replica* home_ = nullptr;
    std::vector<BlockId> pages_;
    std::vector<Owner> takers_;  // of each, whose it is where its owner has no room for it
};

/// What the quotas of tenants mean for the verbs of a manager. None is asked without quotas.
namespace quotas {

/// Throws std::invalid_argument for quotas that cannot be.
void check(const CacheConfig& config);
/// The owner that a number of a tenant stands for. Throws std::invalid_argument for one that is
/// none.
[[nodiscard]] Owner owner_of(const CacheConfig& config, std::int32_t tenant);
/// Quotas leave no room for so many tokens of a request of that owner, were it alone: with what it
/// shares now, or could by a hit of at most `max_hit` tokens, counted for those it shares it with.
/// O(1) where that is little, else the match of its prompt.
[[nodiscard]] bool exceeds_ceiling(const ManagerState& state, const Sequence& sequence,
                                   const RequestView& request, std::int64_t tokens, Owner owner,
                                   std::int64_t max_hit);
/// Throws CapacityError where that is so of a claimed one.
void require_ceiling(const ManagerState& state, const Sequence& sequence,
                     const RequestView& request, std::int64_t tokens, std::int64_t row,
                     std::int64_t max_hit = ReserveOptions::kUnlimited);

/// Evictable pages that a hit will hold go to `pages`, each with those it is read with.
void find_idle(const Replica& home, const FoundHit& hit, std::vector<BlockId>& pages);
/// A reservation of `owner` fits only where quotas allow it, with `ahead` pages more.
void heed(const Replica& home, const Sequence& sequence, Owner owner, std::int64_t ahead,
          Admission& admission);
/// Calls visit(page) for pages of a row that an admission makes free.
template <class Visit>
void for_each_returned_page(const Replica& home, const PageRow& row, const Admission& admission,
                            const Visit& visit) {
    for_each_returned(home, row, admission, [&](BlockId column) {
        if (home.columns == nullptr) {
            visit(column);
        } else {
            home.columns->for_each_page(column, visit);
        }
    });
}
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
