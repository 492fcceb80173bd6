// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cache/row_cut.hpp"
#include "kvcore/cache_types.hpp"
#include "kvcore/prefix_tree.hpp"
#include "level/replica.hpp"
#include "level/window_hold.hpp"
#include "pages/page_owners.hpp"
#include "request/page_row.hpp"
#include "transfer/tier_flights.hpp"
#include "tree/tree_pin.hpp"

namespace kvcore {

/// The longest prefix that a claim can take out of the cache: whole pages of the tree, and behind
/// them either a page to copy the start of, or pages of the tier below.
struct FoundHit {
    PrefixMatch match;
    TreePosition below;       // in the host tier, where the hit goes on there
    std::int64_t tokens = 0;  // all of it; 0: no longer one than the claim has
    // With states: whole pages went on up to this token without a checkpoint; -1: not looked for.
    std::int64_t branch = -1;
    std::int64_t wanted = 0;  // whole pages that were looked for

    [[nodiscard]] bool is_taken() const noexcept { return tokens > 0; }
    /// It takes over pages of the tree.
    [[nodiscard]] bool shares() const noexcept { return is_taken() && match.at.node != nullptr; }
    [[nodiscard]] bool is_partial() const noexcept { return match.partial_tokens > 0; }
    /// Its end is in the host tier alone.
    [[nodiscard]] bool ends_below() const noexcept { return below.depth > match.at.depth; }
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

}  // namespace kvcore
