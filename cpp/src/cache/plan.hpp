// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "cache/cache_data.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "level/replica.hpp"
#include "level/window_hold.hpp"
#include "pages/page_owners.hpp"
#include "request/page_row.hpp"
#include "transfer/departures.hpp"
#include "transfer/tier_flights.hpp"
#include "tree/tree_pin.hpp"

namespace kvcore {

/// Prepares a cut of a row to `columns` columns: the new end of its committed part in the tree, and
/// of its stored part in the tiers. Preparing may run out of memory; applying cannot fail.
///
/// Owns: both places; they are empty if the cut removes no committed column.
class RowCut {
   public:
    RowCut() noexcept = default;
    /// Throws std::bad_alloc.
    RowCut(CacheData& state, SequenceHandle handle, const Sequence& sequence, std::int32_t columns)
        : columns_(columns),
          place_(sequence.pages.find_cut(state.home_of(sequence).tree, columns)) {
        if (place_) stored_ = state.flights.find_cut(handle, sequence.replica, columns);
    }

    void apply(CacheData& state, SequenceHandle handle, Sequence& sequence) noexcept {
        if (!place_) return;
        state.flights.move_back(handle, columns_, std::move(stored_));
        sequence.pages.move_back(columns_, std::move(place_));
    }

   private:
    std::int32_t columns_ = 0;
    TreePin place_;
    StorePlace stored_;
};

/// The arguments of a reservation besides its request.
struct Asked {
    static constexpr ReserveOptions kNoOptions{};

    std::int64_t num_steps;
    const ReserveOptions& options = kNoOptions;  // the caller's
    Owner stranger = 0;  // owner of the pages of a request that is not claimed
    bool runs = false;   // the call hands out the state of the request

    /// Returns true if the request has the handle of a claim.
    [[nodiscard]] static bool is_claimed(const RequestView& request) noexcept {
        return request.sequence.generation != 0;
    }
};

/// A reservation worked out against the present state; it has changed nothing yet.
struct Admission {
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

    [[nodiscard]] std::int64_t new_pages() const noexcept { return pages; }
    /// Pages and columns that it takes, minus the pages and columns that it frees.
    [[nodiscard]] PageNeed need() const noexcept {
        return {pages - returned, appended + replaced + patched - returned_columns};
    }
};

/// Calls visit(column) for each own column of a row that an admission frees. Columns with another
/// reference stay: forks, copies and holds have references.
template <class Visit>
void for_each_returned(const Replica& home, const PageRow& row, const Admission& admission,
                       const Visit& visit) {
    const bool is_cut = row.read_only_end() > admission.needed;
    const std::int32_t from = is_cut ? admission.needed : row.committed();
    const std::int32_t end = is_cut ? row.size() : std::min(row.size(), admission.hit_pages);
    for (std::int32_t c = from; c < end; ++c) {
        if (row.is_own(c) && home.pool.ref_count(row[c]) == 1) visit(row[c]);
    }
}

/// The need of an admission now: earlier rows of its batch may have freed shared pages of its row.
[[nodiscard]] inline PageNeed need_now(const Replica& home, const PageRow& row,
                                       const Admission& admission) {
    PageNeed need{admission.pages, admission.appended + admission.replaced + admission.patched};
    for_each_returned(home, row, admission, [&](BlockId column) {
        need.pages -= home.count_pages(column);
        --need.columns;
    });
    return need;
}

/// An admission and everything it needs except pages: places in the trees, memory for the row, room
/// in the lists that it adds to. Preparing it changes nothing visible, and applying it cannot fail.
struct Reservation {
    explicit Reservation(const Admission& asked) noexcept : admission(asked) {}

    const Admission& admission;  // the caller's
    TreePin place;               // of the hit's end, or of an opened namespace
    WindowHold windows;          // of the hit, and of the page that it copies from
    WindowHold source;
    StateHold checkpoint;              // at the end of the hit
    RowCut cut;                        // where the row is written again
    std::unique_ptr<TierFlight> load;  // load from the host tier
    TreePosition partial;              // the page that the hit copies from
    std::vector<BlockId> idle;         // with quotas: evictable pages that the hit holds
};

/// The first half of a reservation: works out its effects and changes nothing. `plan` is only this
/// half, so it returns exactly what `reserve` would do. The second half is the Reserver.
///
/// Threads: not thread-safe. Cost: comparing the prompt with the cache if a hit is searched, and
/// O(columns that are written again).
class Admitter {
   public:
    Admitter(const CacheData& state, const Departures& departures) noexcept
        : state_(state), departures_(departures) {}

    /// The longest hit of a claim of which nothing has been fetched or written.
    [[nodiscard]] FoundHit find_hit(const Sequence& sequence, const RequestView& request) const {
        FoundHit hit;
        find_hit(hit, sequence, request, ReserveOptions::kUnlimited, true);
        return hit;
    }
    /// The effects of a reservation with that hit. If the reservation itself needs the page to copy
    /// from, only the whole pages of the hit are used.
    [[nodiscard]] Admission admit(const FoundHit& hit, const Sequence& sequence,
                                  const RequestView& request, std::int64_t num_steps) const {
        Admission admission;
        admission.hit = hit;
        complete(admission, sequence, request, {num_steps});
        return admission;
    }
    /// Finds the longest hit, and returns the effects of a reservation with it.
    [[nodiscard]] Admission admit(const Sequence& sequence, const RequestView& request,
                                  const Asked& asked, bool allow_partial = true) const {
        Admission admission;
        find_hit(admission.hit, sequence, request, asked.options.max_hit, allow_partial);
        complete(admission, sequence, request, asked);
        return admission;
    }
    /// The number of evictable pages that a request holds after it has taken that hit.
    [[nodiscard]] std::int64_t count_adopted(const Replica& home, const FoundHit& hit) const;

   private:
    void find_hit(FoundHit& hit, const Sequence& sequence, const RequestView& request,
                  std::int64_t max_hit, bool allow_partial) const;
    void narrow_to_state(FoundHit& hit, TreePosition& whole, const Replica& home,
                         std::int64_t limit) const;
    void find_below(FoundHit& hit, const Level& host, const RequestView& request,
                    std::int64_t limit) const;
    void find_columns_below(FoundHit& hit, TreePosition whole, const Replica& home,
                            const RequestView& request, std::int64_t limit) const;
    void complete(Admission& admission, const Sequence& sequence, const RequestView& request,
                  const Asked& asked) const;
    void count(Admission& admission, const Sequence& sequence, const RequestView& request,
               const Asked& asked) const;
    void count_columns(Admission& admission, const Sequence& sequence, std::int64_t needed) const;
    void count_returned(Admission& admission, const Sequence& sequence) const;
    void count_pages(Admission& admission, const Sequence& sequence, const RequestView& request,
                     std::int64_t num_steps) const;
    [[nodiscard]] std::int64_t count_ahead(const Admission& admission, const Sequence& sequence,
                                           const RequestView& request, const Asked& asked,
                                           const Owner* owner) const;
    // The columns of the request in a window that others also read, or whose page does not belong
    // to `owner`.
    [[nodiscard]] std::int64_t count_shared(std::size_t window, const Admission& admission,
                                            const Sequence& sequence, const RequestView& request,
                                            const Owner* owner) const;
    [[nodiscard]] std::int32_t first_read(std::size_t window, const Admission& admission,
                                          const RequestView& request) const;
    void count_available(Admission& admission, const Sequence& sequence) const;
    [[nodiscard]] std::int64_t count_source(const Replica& home, const FoundHit& hit) const;
    void place_state(Admission& admission, const Sequence& sequence, const RequestView& request,
                     const Asked& asked) const;

    const CacheData& state_;
    const Departures& departures_;
};

/// The effects of tenants' quotas on a reservation. Called only with quotas.
namespace quotas {

/// Returns true if quotas leave no room for `tokens` tokens of a request of `owner`, even without
/// other requests. Pages that it shares now, or could share by a hit of at most `max_hit` tokens,
/// count for their present owners. O(1) if the pages fit under the ceiling, else the match of its
/// prompt.
[[nodiscard]] bool exceeds_ceiling(const CacheData& state, const Sequence& sequence,
                                   const RequestView& request, std::int64_t tokens, Owner owner,
                                   std::int64_t max_hit);
/// Throws CapacityError if that is true of a claimed request.
void require_ceiling(const CacheData& state, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, std::int64_t row,
                     std::int64_t max_hit = ReserveOptions::kUnlimited);

/// Applies quotas to an admission: it fits only if quotas allow it with `ahead` more pages.
void heed(const Replica& home, const Sequence& sequence, Owner owner, std::int64_t ahead,
          Admission& admission);
/// Calls visit(page) for each page of a row that an admission frees.
template <class Visit>
void for_each_returned_page(const Replica& home, const PageRow& row, const Admission& admission,
                            const Visit& visit) {
    for_each_returned(home, row, admission,
                      [&](BlockId column) { home.for_each_page(column, visit); });
}

}  // namespace quotas

}  // namespace kvcore
