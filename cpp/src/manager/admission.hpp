// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "index/tree_pin.hpp"
#include "kvcore/cache_manager.hpp"
#include "manager/transfer_ledger.hpp"

namespace kvcore {

/// A reservation worked out against the present state: nothing has been done yet.
struct CacheManager::Admission {
    bool takes_hit = false;       // a longer prefix than the claim has
    PrefixMatch match;            // that prefix
    std::int64_t hit_tokens = 0;  // its length, with the partial page
    std::int32_t hit_pages = 0;   // committed columns afterwards
    TreePosition below;           // in the host tier, where the hit goes on there
    std::int64_t start = 0;       // where the request stands afterwards
    std::int64_t active = 0;
    std::int32_t needed = 0;     // pages of the row for what runs next
    std::int32_t replaced = 0;   // frozen columns that the next tokens would write into
    std::int64_t appended = 0;   // pages added at the row's end
    std::int64_t returned = 0;   // own pages that become superfluous
    std::int64_t evicted = 0;    // pages to evict
    std::int64_t available = 0;  // pages that could be had
    bool fits = false;
    bool declines_partial = false;  // a page to copy from was there, but had to be evicted

    /// It takes over pages of the tree.
    [[nodiscard]] bool shares() const noexcept { return takes_hit && match.at.node != nullptr; }
    [[nodiscard]] std::int64_t new_pages() const noexcept { return appended + replaced; }
};

/// Where a row that is cut shorter ends in the trees, held: no places where it is not cut there.
struct CacheManager::CutPlaces {
    TreePin place;
    StorePlace host_place;
};

/// An admission with all that it takes beside pages: places in the trees, memory for the row, room
/// in the lists that it adds to. Nothing has changed that anybody sees, and applying it cannot
/// fail.
struct CacheManager::Reservation {
    const Admission& admission;        // the caller's
    TreePin place;                     // of the hit's end, or of an opened namespace
    CutPlaces cut;                     // where the row is written again
    std::unique_ptr<HostFlight> load;  // what comes from the host tier
};

}  // namespace kvcore
