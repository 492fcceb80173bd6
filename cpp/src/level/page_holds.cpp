// SPDX-License-Identifier: Apache-2.0
#include "level/page_holds.hpp"

#include <utility>

#include "kvcore/errors.hpp"
#include "level/page_ids.hpp"

namespace kvcore {
namespace {

[[noreturn]] void refuse_free(BlockId page) {
    throw InvalidHandleError(
        detail::concat("page ", page, " is free, must be cached or held by a request"));
}

bool is_before(const std::pair<BlockId, TreePosition>& entry, BlockId column) noexcept {
    return entry.first < column;
}

}  // namespace

PageSet::PageSet(Replica& home, const BlockId* pages, std::int64_t n) : home_(&home) {
    const std::vector<BlockId> columns = page_ids::columns_of(home, pages, n);
    for (std::int64_t i = 0; i < n; ++i) {
        const BlockId column = columns[static_cast<std::size_t>(i)];
        if (column < 0 || home.pool.ref_count(column) == 0) refuse_free(pages[i]);
    }
    pages_.assign(pages, pages + n);
    const std::vector<std::pair<BlockId, TreePosition>> cached = page_ids::locate(home, columns);
    holds_.reserve(columns.size());
    for (const BlockId column : columns) {
        const auto at = std::lower_bound(cached.begin(), cached.end(), column, is_before);
        holds_.push_back(at != cached.end() && at->first == column
                             ? PageHold::pin(home, at->second, column)
                             : PageHold::share(home, column));
    }
    require_lawful();
    home.note_peak();
}

// A hold stays with its column unless the other column has the page now.
void PageSet::follow(BlockId from, BlockId to, TreePosition at) noexcept {
    for (std::size_t i = 0; i < holds_.size(); ++i) {
        PageHold& hold = holds_[i];
        if (!hold.is_reference() || hold.page() != from) continue;
        bool is_there = false;
        home_->for_each_page(to, [&](BlockId page) { is_there |= page == pages_[i]; });
        if (is_there) hold.move_to_column(to, at);
    }
}

// If quotas do not allow the holds, releases them again and throws.
void PageSet::require_lawful() {
    if (home_->owners == nullptr) return;
    const std::int64_t available = home_->num_available();
    if (home_->owners->counts().is_lawful(available)) return;
    const std::int64_t n = static_cast<std::int64_t>(pages_.size());
    holds_.clear();
    static_cast<void>(home_->num_available());  // reports the released pages to the owners
    throw CapacityError(detail::concat("the quotas of tenants leave no room to hold ", n,
                                       " pages: a held page counts for its tenant; hold fewer "
                                       "pages, or release requests of these tenants"));
}

}  // namespace kvcore
