// SPDX-License-Identifier: Apache-2.0
// A reservation in three steps: `plan_reservation` works it out and changes nothing, `prepare` gets
// everything that can be missing except pages, `apply` carries it out and cannot fail. A batch
// takes the same steps for its rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cache/cache_data.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "layers/residency.hpp"
#include "level/level.hpp"
#include "pages/page_owners.hpp"
#include "transfer/tier_flights.hpp"
#include "tree/pins.hpp"

namespace kvcore {

/// The arguments of a reservation besides its request.
struct ReserveArgs {
    static constexpr ReserveOptions kNoOptions{};

    std::int64_t num_steps;
    const ReserveOptions& options = kNoOptions;  // the caller's
    Owner stranger = 0;  // owner of the pages of a request that is not claimed
    bool runs = false;   // the call hands out the state of the request
};

/// Returns true if the request has the handle of a claim.
[[nodiscard]] inline bool is_claimed(const RequestView& request) noexcept {
    return request.sequence.generation != 0;
}

/// The token from which a request runs. A claim without pages has no written tokens, wherever its
/// context stood before.
[[nodiscard]] inline std::int64_t begin_of(const Sequence& sequence,
                                           const RequestView& request) noexcept {
    return sequence.pages.empty() ? 0 : request.start;
}
/// Returns true if a hit can still change the request: nothing of it was fetched or written, and
/// tokens are left for the hit besides the token that must run.
[[nodiscard]] inline bool may_hit(const Sequence& sequence, const RequestView& request) noexcept {
    const std::int64_t begin = begin_of(sequence, request);
    return !sequence.is_sealed() && begin == sequence.hit_tokens && request.active - begin > 1;
}

/// Prepares a cut of a row to `columns` columns: the new end of its committed part in the tree, and
/// of its stored part in the tiers. Preparing may run out of memory; applying cannot fail.
///
/// Owns: both places; they are empty if the cut removes no committed column.
class RowCut {
   public:
    /// Throws std::bad_alloc.
    RowCut(CacheData& cache, SequenceHandle handle, const Sequence& sequence, std::int32_t columns)
        : columns_(columns),
          place_(sequence.pages.find_cut(cache.home_of(sequence).tree, columns)) {
        if (place_) stored_ = cache.ledger.flights.find_cut(handle, sequence.replica, columns);
    }

    void apply(CacheData& cache, SequenceHandle handle, Sequence& sequence) noexcept {
        if (!place_) return;
        cache.ledger.flights.move_back(handle, columns_, std::move(stored_));
        sequence.pages.move_back(columns_, std::move(place_));
    }

   private:
    std::int32_t columns_ = 0;
    TreePin place_;
    PrefixRef stored_;
};

/// A reservation worked out against the present state; it has changed nothing yet.
struct Plan {
    FoundHit hit;
    std::int32_t hit_pages = 0;  // committed columns after the reservation
    std::int64_t start = 0;      // start of the request after the reservation
    std::int64_t active = 0;
    std::int32_t needed = 0;    // columns that the row needs in all
    std::int32_t replaced = 0;  // read-only columns that the next tokens would write into
    std::int64_t appended = 0;  // columns added at the row's end
    std::int32_t windowed = 0;  // columns for which windows get pages, with groups
    std::int32_t patched = 0;   // columns of the hit that get pages from the host tier
    std::int64_t pages = 0;     // new pages in all
    std::int64_t returned = 0;  // own pages that become free
    std::int64_t returned_columns = 0;
    std::int64_t evicted = 0;    // pages to evict
    std::int64_t available = 0;  // pages that are free or evictable
    std::int64_t kept = 0;       // pages that must be left
    std::int64_t lacking = 0;    // pages that are missing
    bool fits = false;
    bool is_over_quota = false;     // only quotas of tenants prevent it
    bool is_cut = false;            // `active` is cut to the token where a checkpoint is due
    bool lacks_slot = false;        // no slot is left for its state
    bool resumes = false;           // continues from the state kept before rejected drafts
    bool keeps = false;             // keeps the state at `start`, before possible drafts
    std::int32_t slots = 0;         // slots that it takes for states
    bool declines_partial = false;  // a page to copy from existed, but had to be evicted

    [[nodiscard]] std::int64_t new_columns() const noexcept {
        return appended + replaced + patched;
    }
    /// Pages and columns that it takes, minus the pages and columns that it frees.
    [[nodiscard]] PageNeed need() const noexcept {
        return {pages - returned, new_columns() - returned_columns};
    }
};

/// Calls visit(column) for each own column of a row that a plan frees. Columns with another
/// reference stay: forks, copies and holds have references.
template <class Visit>
void for_each_returned(const Replica& home, const PageRow& row, const Plan& plan,
                       const Visit& visit) {
    const bool is_cut = row.read_only_end() > plan.needed;
    const std::int32_t from = is_cut ? plan.needed : row.committed();
    const std::int32_t end = is_cut ? row.size() : std::min(row.size(), plan.hit_pages);
    for (std::int32_t c = from; c < end; ++c) {
        if (row.is_own(c) && home.pool.ref_count(row[c]) == 1) visit(row[c]);
    }
}

/// The need of a plan now: earlier rows of its batch may have freed shared pages of its row.
[[nodiscard]] inline PageNeed need_now(const Replica& home, const PageRow& row, const Plan& plan) {
    PageNeed need{plan.pages, plan.new_columns()};
    for_each_returned(home, row, plan, [&](BlockId column) {
        need.pages -= home.count_pages(column);
        --need.columns;
    });
    return need;
}

/// A plan and everything it needs except pages: places in the trees, memory for the row, room
/// in the lists that it adds to. Preparing it changes nothing visible, and applying it cannot fail.
struct Reservation {
    explicit Reservation(const Plan& given) noexcept : plan(given) {}

    const Plan& plan;    // the caller's
    TreePin place;       // of the hit's end, or of an opened namespace
    WindowHold windows;  // of the hit, and of the page that it copies from
    WindowHold source;
    StateHold checkpoint;              // at the end of the hit
    std::optional<RowCut> cut;         // where the row is written again
    std::unique_ptr<TierFlight> load;  // load from the host tier
    TreePosition partial;              // the page that the hit copies from
    std::vector<BlockId> idle;         // with quotas: evictable pages that the hit holds
};

// ---- plan ---------------------------------------------------------------------------------------

/// Finds the longest hit of a claim of which nothing has been fetched or written, of at most
/// `max_hit` tokens. Costs the comparison of the prompt with the cache.
void find_hit(const CacheData& cache, FoundHit& hit, const Sequence& sequence,
              const RequestView& request, std::int64_t max_hit, bool allow_partial = true);
/// The number of evictable pages that a request holds after it has taken that hit.
[[nodiscard]] std::int64_t count_adopted(const CacheData& cache, const Replica& home,
                                         const FoundHit& hit);
/// The effects of a reservation with that hit. If the reservation itself needs the page to copy
/// from, only the whole pages of the hit are used.
[[nodiscard]] Plan plan_reservation(const CacheData& cache, const FoundHit& hit,
                                    const Sequence& sequence, const RequestView& request,
                                    const ReserveArgs& args);
/// Finds the longest hit, and returns the effects of a reservation with it.
[[nodiscard]] Plan plan_reservation(const CacheData& cache, const Sequence& sequence,
                                    const RequestView& request, const ReserveArgs& args,
                                    bool allow_partial = true);

// ---- prepare ------------------------------------------------------------------------------------

/// Throws std::bad_alloc, and has changed nothing visible.
[[nodiscard]] Reservation prepare(CacheData& cache, const Plan& plan, Sequence& sequence,
                                  const RequestView& request, Transfers* transfers);
/// Called next, with write-back: stores the pages that `apply` would evict, if they must be stored
/// first. Returns true if stores were handed out; then the caller drops the reservation, and makes
/// it again later.
[[nodiscard]] bool store_before_eviction(CacheData& cache, const Reservation& reservation,
                                         const Sequence& sequence, Transfers& transfers);
/// Called next: evicts the pages that `apply` needs beyond free pages. Throws IntegrityError if
/// these pages or a state slot are missing although the plan fits, and std::bad_alloc.
void evict_for(CacheData& cache, const Reservation& reservation, const Sequence& sequence,
               SequenceHandle handle);

// ---- apply --------------------------------------------------------------------------------------

/// Returns true if the request now continues from another token. `row` is its row in the batch, for
/// `transfers->moved`. The caller calls `evict_for` before, and `end_room` of the replica after.
/// O(pages added and replaced).
bool apply(CacheData& cache, Reservation& reservation, Sequence& sequence, RequestView& request,
           std::int64_t row, Transfers* transfers);

// ---- all steps ----------------------------------------------------------------------------------

/// Carries out a plan if it fits.
[[nodiscard]] ReserveStatus carry_out(CacheData& cache, const Plan& plan, Sequence& sequence,
                                      RequestView& request, std::int64_t row, Transfers* transfers);

/// Reserves the rows `missing` of a fetch, which ascend, or no row. If their pages are not all
/// available, sets `result` and returns false. If it throws std::bad_alloc, nothing has changed.
/// Rows that only grow cost O(pages added) together; each other row costs as much as its
/// reservation by itself.
[[nodiscard]] bool reserve_rows(CacheData& cache, const RequestBatch& batch,
                                const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                                Transfers* transfers, FetchResult& result);

}  // namespace kvcore
