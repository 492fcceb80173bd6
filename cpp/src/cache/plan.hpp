// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "cache/state.hpp"
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

/// Where the committed part of a row ends once it has but so many columns, and what is stored of it
/// below. Got beforehand, since that may run out of memory; applied when nothing can fail any more.
///
/// Owns: both places, or none where the row is not cut there.
class RowCut {
   public:
    RowCut() noexcept = default;
    /// Throws std::bad_alloc.
    RowCut(ManagerState& state, SequenceHandle handle, const Sequence& sequence,
           std::int32_t columns)
        : columns_(columns),
          place_(sequence.pages.find_cut(state.home_of(sequence).tree, columns)) {
        if (place_) stored_ = state.flights.find_cut(handle, sequence.replica, columns);
    }

    void apply(ManagerState& state, SequenceHandle handle, Sequence& sequence) noexcept {
        if (!place_) return;
        state.flights.move_back(handle, columns_, std::move(stored_));
        sequence.pages.move_back(columns_, std::move(place_));
    }

   private:
    std::int32_t columns_ = 0;
    TreePin place_;
    StorePlace stored_;
};

/// What is asked of a reservation beside its request.
struct Asked {
    static constexpr ReserveOptions kNoOptions{};

    std::int64_t num_steps;
    const ReserveOptions& options = kNoOptions;  // the caller's
    Owner stranger = 0;  // whose the pages of a request are that is not claimed
    bool runs = false;   // the call hands out the state of the request

    /// A claim's handle, or none.
    [[nodiscard]] static bool is_claimed(const RequestView& request) noexcept {
        return request.sequence.generation != 0;
    }
};

/// A reservation worked out against the present state: nothing has been done yet.
struct Admission {
    FoundHit hit;
    std::int32_t hit_pages = 0;  // committed columns afterwards
    std::int64_t start = 0;      // where the request stands afterwards
    std::int64_t active = 0;
    std::int32_t needed = 0;    // columns of the row for what it is to hold
    std::int32_t replaced = 0;  // frozen columns that the next tokens would write into
    std::int64_t appended = 0;  // columns added at the row's end
    std::int32_t windowed = 0;  // columns for which windows get pages, with groups
    std::int32_t patched = 0;   // columns of the hit that get some from below
    std::int64_t pages = 0;     // new pages in all
    std::int64_t returned = 0;  // own pages that are free then
    std::int64_t returned_columns = 0;
    std::int64_t evicted = 0;    // pages to evict
    std::int64_t available = 0;  // pages that could be had
    std::int64_t kept = 0;       // pages that are to be left
    std::int64_t lacking = 0;    // pages for want of which it does not fit
    bool fits = false;
    bool is_over_quota = false;  // all that is in the way are quotas of tenants
    bool is_cut = false;      // `active` is where a checkpoint is due, in front of what was asked
    bool lacks_slot = false;  // there is none for its state
    bool resumes = false;     // from the state that was kept in front of rejected drafts
    bool keeps = false;       // the state at `start`, in front of what may be drafts
    std::int32_t slots = 0;   // that it takes for states
    bool declines_partial = false;  // a page to copy from was there, but had to be evicted

    [[nodiscard]] std::int64_t new_pages() const noexcept { return pages; }
    /// Pages and columns that it takes, less the ones that it makes free.
    [[nodiscard]] PageNeed need() const noexcept {
        return {pages - returned, appended + replaced + patched - returned_columns};
    }
};

/// Calls visit(column) for each own column of a row that an admission makes free. Columns with
/// another reference stay: forks, copies and holds have references.
template <class Visit>
void for_each_returned(const Replica& home, const PageRow& row, const Admission& admission,
                       const Visit& visit) {
    const bool is_cut = row.frozen() > admission.needed;
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
        need.pages -= home.columns == nullptr ? 1 : home.columns->count_pages(column);
        --need.columns;
    });
    return need;
}

/// An admission with all that it takes beside pages: places in the trees, memory for the row, room
/// in the lists that it adds to. Nothing has changed that anybody sees, and applying it cannot
/// fail.
struct Reservation {
    explicit Reservation(const Admission& asked) noexcept : admission(asked) {}

    const Admission& admission;  // the caller's
    TreePin place;               // of the hit's end, or of an opened namespace
    WindowHold windows;          // of the hit, and of the page that it copies from
    WindowHold source;
    StateHold checkpoint;              // where the hit ends
    RowCut cut;                        // where the row is written again
    std::unique_ptr<TierFlight> load;  // what comes from the host tier
    TreePosition partial;              // where the page is that the hit copies from
    std::vector<BlockId> idle;         // with quotas: evictable pages that the hit holds
};

/// The first half of a reservation: works out what it would do and changes nothing. `plan` is that
/// half alone, so it tells exactly what `reserve` would do. The second half is the Reserver's.
///
/// Threads: none of its own. Cost: comparing the prompt with the cache, where a hit is looked for,
/// and O(columns that are written again).
class Admitter {
   public:
    Admitter(const ManagerState& state, const Departures& departures) noexcept
        : state_(state), departures_(departures) {}

    /// The longest hit of a claim of which nothing has been fetched or written.
    [[nodiscard]] FoundHit find_hit(const Sequence& sequence, const RequestView& request) const {
        FoundHit hit;
        find_hit(hit, sequence, request, ReserveOptions::kUnlimited, true);
        return hit;
    }
    /// What a reservation with that hit does, or with its whole pages alone where the page to copy
    /// from would be needed itself.
    [[nodiscard]] Admission admit(const FoundHit& hit, const Sequence& sequence,
                                  const RequestView& request, std::int64_t num_steps) const {
        Admission admission;
        admission.hit = hit;
        complete(admission, sequence, request, {num_steps});
        return admission;
    }
    /// Both.
    [[nodiscard]] Admission admit(const Sequence& sequence, const RequestView& request,
                                  const Asked& asked, bool allow_partial = true) const {
        Admission admission;
        find_hit(admission.hit, sequence, request, asked.options.max_hit, allow_partial);
        complete(admission, sequence, request, asked);
        return admission;
    }
    /// Evictable pages that a request has once it has taken that hit.
    [[nodiscard]] std::int64_t count_adopted(const Replica& home, const FoundHit& hit) const;

   private:
    void find_hit(FoundHit& hit, const Sequence& sequence, const RequestView& request,
                  std::int64_t max_hit, bool allow_partial) const;
    void narrow_to_state(FoundHit& hit, TreePosition& whole, const Replica& home,
                         std::int64_t limit) const;
    void find_below(FoundHit& hit, const TierIndex& host, const RequestView& request,
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
    // Columns that the request has in a window then, and others read too or are not the `owner`'s.
    [[nodiscard]] std::int64_t count_shared(std::size_t window, const Admission& admission,
                                            const Sequence& sequence, const RequestView& request,
                                            const Owner* owner) const;
    [[nodiscard]] std::int32_t first_read(std::size_t window, const Admission& admission,
                                          const RequestView& request) const;
    void count_available(Admission& admission, const Sequence& sequence) const;
    [[nodiscard]] std::int64_t count_source(const Replica& home, const FoundHit& hit) const;
    void place_state(Admission& admission, const Sequence& sequence, const RequestView& request,
                     const Asked& asked) const;

    const ManagerState& state_;
    const Departures& departures_;
};

/// What the quotas of tenants mean for a reservation. Not asked without quotas.
namespace quotas {

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

}  // namespace quotas

}  // namespace kvcore
