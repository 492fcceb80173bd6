// SPDX-License-Identifier: Apache-2.0
#include "level/refs.hpp"

#include <algorithm>
#include <cstddef>

#include "kvcore/errors.hpp"
#include "level/level.hpp"
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

// If quotas do not allow the references, ends them again and throws.
void require_lawful(Replica& home, std::vector<PageRef>& refs) {
    if (home.owners == nullptr) return;
    const std::int64_t available = home.num_available();
    if (home.owners->counts().is_lawful(available)) return;
    const auto n = static_cast<std::int64_t>(refs.size());
    refs.clear();
    static_cast<void>(home.num_available());  // reports the released pages to the owners
    throw CapacityError(detail::concat("the quotas of tenants leave no room to hold ", n,
                                       " pages: a held page counts for its tenant; hold fewer "
                                       "pages, or release requests of these tenants"));
}

}  // namespace

std::vector<PageRef> hold_pages(Replica& home, const BlockId* pages, std::int64_t n) {
    const std::vector<BlockId> columns = page_ids::columns_of(home, pages, n);
    for (std::int64_t i = 0; i < n; ++i) {
        const BlockId column = columns[static_cast<std::size_t>(i)];
        if (column < 0 || home.pool.ref_count(column) == 0) refuse_free(pages[i]);
    }
    std::vector<PageRef> refs;
    refs.reserve(columns.size());
    const std::vector<std::pair<BlockId, TreePosition>> cached = page_ids::locate(home, columns);
    for (std::size_t i = 0; i < columns.size(); ++i) {
        const BlockId column = columns[i];
        const auto at = std::lower_bound(cached.begin(), cached.end(), column, is_before);
        const bool is_cached = at != cached.end() && at->first == column;
        refs.push_back(is_cached ? PageRef::pin(home, at->second, column)
                                 : PageRef::share(home, column));
        refs.back().set_page(pages[i]);
    }
    require_lawful(home, refs);
    home.note_peak();
    return refs;
}

void PrefixRef::end_with(bool touch) noexcept {
    if (home_ == nullptr) return;
    unlink();
    windows_.reset();
    if (TreeNode* node = std::exchange(node_, nullptr)) home_->tree.unpin(node, touch);
    const Pages pages = std::exchange(references_, {});
    if (pages.n > 0) home_->pool.free(pages.ids, pages.n);
    home_ = nullptr;
}

}  // namespace kvcore
